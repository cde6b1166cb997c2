"""Everything that is timed on one NVIDIA GPU; `python -m benchmarks.gpu` runs it."""
