"""Decoding on the CPU without torch: kernels written in Python, and programs made of them."""
