"""Attention of many queries over the cache, against the specification row by row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from armillary import reference
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.kv_layout import CHUNK, Stored, value_width
from armillary.engine.tiling import attention_bytes, query_blocks
from support.cached_text import Text, kept, text
from support.kernels import EPSILON, call, count, drawn, library_for, machines, spaced

HERE = "this machine"
EACH = pytest.mark.parametrize("stored", CACHE_FORMATS)
SIZES = {1: (3, 10), 2: (2, 64), 3: (2, 10), 5: (2, 16), 7: (1, 80), 71: (1, 8)}
"""Key/value heads and d_head for each count of queries that share a head."""


def attend(
    q: np.ndarray,
    texts: Sequence[Text],
    lengths: Sequence[int],
    *,
    window: int = 0,
    cap: float = 0.0,
    scale: float = 1.0,
    sinks: np.ndarray | None = None,
    threads: int = 1,
    machine: str = HERE,
) -> np.ndarray:
    """(R, h · width): query row i reads the first lengths[i] tokens of texts[i]."""
    kv_heads, _, d = texts[0].keys.shape
    heads, width = q.shape[1] // d, texts[0].values.shape[2]
    wide = spaced(q)
    out = spaced(np.full((len(q), heads * width), np.nan, np.float32))
    tiles = CACHE_FORMATS[texts[0].stored].tiles
    blocks = query_blocks(tiles, machines()[machine], d, value_width(width))
    scratch_bytes = attention_bytes(d, value_width(width), blocks)
    call(
        f"block_attention_{texts[0].stored}",
        code=library_for(machine),
        threads=threads,
        q=wide,
        q_stride=wide.strides[0],
        kv_heads=kv_heads,
        group=heads // kv_heads,
        d_head=d,
        width=width,
        d_value=value_width(width),
        window=window,
        cap=cap,
        scale=scale,
        keys=np.array([each.key_memory.ctypes.data for each in texts]),
        values=np.array([each.value_memory.ctypes.data for each in texts]),
        capacities=np.array([each.room for each in texts]),
        lengths=np.array(lengths),
        sinks=sinks,
        out=out,
        out_stride=out.strides[0],
        blocks=blocks,
        scratch=np.full(threads * scratch_bytes, 0xFF, np.uint8),
        scratch_bytes=scratch_bytes,
        rows=count(len(q)),
    )
    assert np.isnan(out[:, heads * width :]).all()
    return out[:, : heads * width]


def check(
    q: np.ndarray,
    texts: Sequence[Text],
    lengths: Sequence[int],
    *,
    window: int = 0,
    cap: float = 0.0,
    scale: float = 1.0,
    sinks: np.ndarray | None = None,
    threads: int = 1,
    machine: str = HERE,
) -> None:
    """The kernel against the specification, to what rounding may cost."""
    settings = {"window": window, "cap": cap, "scale": scale, "sinks": sinks, "threads": threads}
    result = attend(q, texts, lengths, machine=machine, **settings)  # type: ignore[arg-type]
    stored = texts[0].stored
    # Queries are scaled for powers of two before they are rounded.
    by = np.float32(scale) * np.float32(np.log2(np.e))
    tiles = CACHE_FORMATS[stored].tiles
    scaled = kept(q * by, tiles).astype(float) / float(by) * scale
    for row, (each, length) in enumerate(zip(texts, lengths, strict=True)):
        heads, _, d = each.keys.shape
        low = max(0, length - window) if window else 0
        keys, values = (
            part[None, :, low:length].astype(float) for part in (each.keys, each.values)
        )
        queries = scaled[row].reshape(1, -1, 1, d)
        may_read = np.ones((1, 1, length - low), bool)
        expected = reference.attention(
            queries, keys, values, may_read, scale=1.0, soft_cap=cap or None, sinks=sinks
        ).reshape(-1)
        largest = np.abs(queries).max() * np.abs(keys).max() * d
        bound = 2 * (d + 8) * EPSILON * largest + 1e-6 * (1 + cap)
        if tiles == "BF16":
            # Weights are rounded too, but the largest, which is 1, unless it meets a scale.
            bound += (2.0**-8 if stored == "int8" else 2.0**-9) + 1e-4
        gap = np.abs(result[row] - expected).max()
        assert gap <= bound * np.abs(values).max(), (row, length, gap, bound)
        assert heads


def prompt(
    group: int,
    past: int,
    rows: int,
    stored: Stored,
    **settings: Any,
) -> None:
    """Check rows of one text behind some tokens of it."""
    heads, d = SIZES[group]
    each = text(
        heads,
        past + rows,
        d,
        stored,
        room=(past + rows) // CHUNK * CHUNK + 2 * CHUNK,
        beside=0,
    )
    q = drawn(rows, heads * group * d, seed=1)
    lengths = range(past + 1, past + rows + 1)
    check(q, [each] * rows, lengths, scale=d**-0.5, **settings)


@EACH
@pytest.mark.parametrize("group", SIZES)
def test_rows_of_a_prompt_read_as_far_as_themselves(group: int, stored: Stored) -> None:
    """Counts of queries that are no whole vectors, from any place of a block or a chunk."""
    for past, rows in ((0, 1), (0, 40), (7, 17), (63, 2), (70, 33), (128, 16)):
        for threads in (1, 2, 3):
            prompt(group, past, rows, stored, threads=threads)


@EACH
def test_many_queries_meet_a_chunk_together(stored: Stored) -> None:
    """Blocks of them, each with its own end, and with its own begin in a window."""
    for window in (0, 5, 100):
        prompt(5, 70, 300, stored, window=window)


@EACH
@pytest.mark.parametrize(("d", "width"), [(12, 20), (40, 24), (76, 64)])
def test_values_of_another_width_than_keys(d: int, width: int, stored: Stored) -> None:
    for past, rows in ((0, 40), (70, 33)):
        each = text(2, past + rows, d, stored, room=192, beside=0, width=width)
        q = drawn(rows, 2 * 5 * d, seed=1)
        lengths = range(past + 1, past + rows + 1)
        for threads in (1, 3):
            check(q, [each] * rows, lengths, scale=d**-0.5, threads=threads)


@EACH
def test_windows_begin_anywhere(stored: Stored) -> None:
    for window in (1, 2, 16, 63, 64, 65, 130, 1000):
        for past in (0, 70):
            prompt(3, past, 90, stored, window=window, threads=2)


@EACH
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps(cap: float, stored: Stored) -> None:
    prompt(3, 5, 70, stored, cap=cap)
    prompt(1, 5, 70, stored, cap=cap, window=9)


@EACH
@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
def test_sinks(size: float, stored: Stored) -> None:
    """Of each query head its own: small ones, and such as leave the tokens little."""
    for window in (0, 9):
        prompt(3, 5, 70, stored, window=window, sinks=size * drawn(6, seed=4))


@EACH
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_of_several_texts_read_each_their_own(threads: int, stored: Stored) -> None:
    one, two, three = (
        text(2, length, 10, stored, seed=length, room=room, beside=0)
        for length, room in ((30, 64), (90, 128), (200, 512))
    )
    texts = [one] * 20 + [two] * 3 + [three] * 33
    lengths = [*range(11, 31), 88, 89, 90, *range(168, 201)]
    q = drawn(len(texts), 60, seed=1)
    check(q, texts, lengths, threads=threads)
    check(q, texts, lengths, threads=threads, window=7)


@EACH
@pytest.mark.parametrize("window", [0, 20])
def test_what_is_computed_with_a_row_changes_no_bit_of_it(window: int, stored: Stored) -> None:
    each = text(2, 150, 10, stored, room=256, beside=0)
    q = drawn(100, 60, seed=1)
    lengths = range(51, 151)
    whole = attend(q, [each] * 100, lengths, window=window, threads=3)
    for size in (1, 7, 33):
        parts = [
            attend(
                q[at : at + size],
                [each] * len(q[at : at + size]),
                lengths[at : at + size],
                window=window,
            )
            for at in range(0, 100, size)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@EACH
def test_what_no_row_may_read_changes_nothing(stored: Stored) -> None:
    """Before a window and behind the last token."""
    each = text(2, 100, 10, stored, room=192, beside=0)
    keys, values = each.keys.copy(), each.values.copy()
    keys[:, :60] = kept(100 * keys[:, :60], stored)
    values[:, :60] = kept(np.full_like(values[:, :60], 1e6), stored)
    far = Text(keys, values, stored, each.room, beside=0)
    q = drawn(20, 60, seed=1)
    near, other = (attend(q, [one] * 20, range(81, 101), window=20) for one in (each, far))
    np.testing.assert_array_equal(other, near)


@EACH
def test_large_scores_lose_nothing(stored: Stored) -> None:
    """Scores of ± hundreds, the largest anywhere: a weight of 1 for it."""
    each = text(1, 200, 10, stored, beside=0)
    q = 100 * drawn(40, 30, seed=1)
    result = attend(q, [each] * 40, range(161, 201))
    assert np.isfinite(result).all()
    assert np.abs(result).max() <= np.abs(each.values).max() * 1.01


@EACH
@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("most", [20.0, 60.0, 400.0])
@pytest.mark.parametrize("falls", [False, True])
def test_scores_that_grow_from_chunk_to_chunk(
    falls: bool, most: float, machine: str, stored: Stored
) -> None:
    """By less and by more than weights have room for; beside queries whose scores do not grow."""
    each = text(2, 400, 10, stored, room=512, beside=0)
    slope = np.linspace(0, 1, 400, dtype=np.float32)[:: -1 if falls else 1]
    keys = kept(each.keys / 10 + slope[None, :, None], stored)
    grown = Text(keys, each.values, stored, each.room, beside=0)
    q = drawn(50, 60, seed=1) / 10 + most / 10
    q[::3] /= most
    for window in (0, 150):
        check(q, [grown] * 50, range(351, 401), window=window, machine=machine)


@pytest.mark.parametrize("machine", machines())
def test_weights_are_rounded_to_the_nearest_bfloat16(machine: str) -> None:
    """To less than half of what rounding costs: only what lies in the middle may go either way."""
    each = text(1, 300, 16, "BF16", room=512, beside=0)
    q = drawn(200, 16, seed=1)
    result = attend(q, [each] * 200, range(101, 301), machine=machine)
    scores = kept(q * np.float32(np.log2(np.e)), "BF16").astype(float) @ each.keys[0].T
    exact, rounded = np.empty((2, 200, 16))
    for row, score in enumerate(scores):
        # The largest score of the first chunk has a weight of 1.
        weights = np.exp2(score[: row + 101] - score[:CHUNK].max())
        for out, of_row in ((exact, weights), (rounded, kept(weights.astype(np.float32), "BF16"))):
            out[row] = of_row @ each.values[0, : row + 101] / of_row.sum()
    by_nearest, in_all = (np.sqrt(((result - each) ** 2).mean()) for each in (rounded, exact))
    assert 0 < by_nearest < in_all / 2


@EACH
@pytest.mark.parametrize("machine", [name for name in machines() if name != HERE])
def test_machines_without_wide_vectors(machine: str, stored: Stored) -> None:
    for past, rows, window in ((0, 40, 0), (70, 33, 0), (70, 90, 20)):
        prompt(3, past, rows, stored, window=window, machine=machine)  # type: ignore[arg-type]
