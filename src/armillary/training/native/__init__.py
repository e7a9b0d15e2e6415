"""Decoder layers for training on processors, with kernels in C between the matrix products.

Fast and not pretty, so it stands apart: `parts` says what is computed, and is what the tests hold
this against.
"""
