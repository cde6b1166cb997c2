"""Trains a small byte-level language model with gated linear attention and writes a page about it.

`python -m examples.demo`, in a checkout; needs the extras `layers` and `cli`.
"""
