"""Freed memory goes back to the system."""

import ctypes

import pytest

from armillary.memory import give_back


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_pieces_between_kept_ones_go_back():
    """Pieces below the size that the C library maps one by one, each followed by one that stays."""
    pieces, kept = [], []
    for _ in range(800):
        pieces.append(bytearray(b"x" * 100_000))
        kept.append(bytearray(2000))
    held = anonymous_bytes()
    del pieces
    give_back()
    assert held - anonymous_bytes() > 60_000_000
    assert len(kept) == 800
