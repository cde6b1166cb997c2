"""`python -m benchmarks.page`: rows of `ejkernel bench` as a page of tables and pictures."""
