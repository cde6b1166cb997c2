"""Times by length, as `ejkernel bench` takes them, for docs/benchmarks.md."""

from pathlib import Path

from ejkernel.bench import command

OPS = (
    "simple_gla",
    "linear_attention",
    "retention",
    "recurrent_gla",
    "lightning_attn",
    "attention",
    "flash_attention",
)
SIZES = ("--lengths", "512", "2048", "8192", "32768", "--batch", "4", "--heads", "16", "--dim", "128", "--limit", "0.3")


def main(file: Path) -> int:
    return command.main([*OPS, *SIZES, "--json", str(file)])
