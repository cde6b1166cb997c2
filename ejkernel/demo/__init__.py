"""Trains a small byte-level language model with gated linear attention and writes a page about it.

`python -m ejkernel.demo`, or `ejkernel demo`; needs the extras `layers` and `cli`.
"""
