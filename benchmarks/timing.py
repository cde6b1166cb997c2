"""The harness is `ejkernel bench`'s; this is where the modules of this folder take it from."""

from ejkernel.bench.timing import Row, compare, table

__all__ = ["Row", "compare", "table"]
