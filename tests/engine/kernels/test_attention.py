"""Attention over the cache in parts, and what is written to the cache."""

from collections.abc import Sequence

import numpy as np
import pytest

from armillary import reference
from armillary.checkpoints.tensors import encode
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.kv_layout import CHUNK, SCRATCH, SEGMENTS, Stored, value_width
from support.cached_text import Text, kept, text
from support.kernels import EPSILON, call, count, drawn, library_for, machines, spaced

HERE = "this machine"
SPAN = CHUNK * SEGMENTS
"""Tokens that are segments of one chunk each."""
EACH = pytest.mark.parametrize("stored", CACHE_FORMATS)
SIZES = {1: (3, 10), 2: (2, 64), 3: (2, 10), 4: (1, 80), 5: (2, 16), 8: (1, 10)}
"""Key/value heads and d_head for each count of queries that share a head."""


def attend(
    q: np.ndarray,
    texts: Sequence[Text],
    lengths: Sequence[int],
    *,
    window: int = 0,
    cap: float = 0.0,
    sinks: np.ndarray | None = None,
    threads: int = 1,
    machine: str = HERE,
) -> np.ndarray:
    """(R, h · width) by the kernels: query row i reads the first lengths[i] tokens of texts[i]."""
    kv_heads, _, d = texts[0].keys.shape
    heads, width = q.shape[1] // d, texts[0].values.shape[2]
    group, d_value = heads // kv_heads, value_width(width)
    wide = spaced(q)
    found = np.full((len(q), kv_heads, SEGMENTS, group, 2 + d_value), np.nan, np.float32)
    out = spaced(np.full((len(q), heads * width), np.nan, np.float32))
    sizes = {"kv_heads": kv_heads, "d_value": d_value, "group": group}
    reading = {
        "window": window,
        "lengths": np.array(lengths),
        "found": found,
        "rows": count(len(q)),
    }
    prepare(wide, texts[0].stored, heads, d, machine=machine)
    code = library_for(machine)
    call(
        f"attention_{texts[0].stored}",
        code=code,
        threads=threads,
        q=wide,
        q_stride=wide.strides[0],
        d_head=d,
        cap=cap,
        keys=np.array([each.key_memory.ctypes.data for each in texts]),
        values=np.array([each.value_memory.ctypes.data for each in texts]),
        capacities=np.array([each.room for each in texts]),
        scratch=np.full(SCRATCH * threads, 0xFF, np.uint8),
        **sizes,
        **reading,
    )
    joined = {"out": out, "out_stride": out.strides[0], "sinks": sinks, "width": width}
    call("combine", code=code, threads=threads, **joined, **sizes, **reading)
    assert np.isnan(out[:, heads * width :]).all()
    return out[:, : heads * width]


def prepare(
    q: np.ndarray,
    stored: Stored,
    heads: int,
    d: int,
    *,
    factor: float = 1.0,
    threads: int = 2,
    machine: str = HERE,
) -> None:
    """Bring queries to what the kernel takes."""
    call(
        f"queries_{stored}",
        code=library_for(machine),
        threads=threads,
        x=q,
        stride=q.strides[0],
        heads=heads,
        d_head=d,
        factor=factor,
        rows=count(len(q)),
    )


def check(
    q: np.ndarray,
    texts: Sequence[Text],
    lengths: Sequence[int],
    *,
    window: int = 0,
    cap: float = 0.0,
    sinks: np.ndarray | None = None,
    threads: int = 1,
    machine: str = HERE,
) -> None:
    """The kernels against the specification, to what rounding may cost."""
    settings = {"window": window, "cap": cap, "sinks": sinks, "threads": threads}
    result = attend(q, texts, lengths, machine=machine, **settings)  # type: ignore[arg-type]
    for row, (each, length) in enumerate(zip(texts, lengths, strict=True)):
        heads, _, d = each.keys.shape
        low = max(0, length - window) if window else 0
        keys, values = (
            part[None, :, low:length].astype(float) for part in (each.keys, each.values)
        )
        queries = q[row].astype(float).reshape(1, -1, 1, d)
        may_read = np.ones((1, 1, length - low), bool)
        expected = reference.attention(
            queries, keys, values, may_read, scale=1.0, soft_cap=cap or None, sinks=sinks
        ).reshape(-1)
        largest = np.abs(queries).max() * np.abs(keys).max() * d
        bound = 2 * (d + 8) * EPSILON * largest + 4e-7 * (1 + cap)
        if each.stored == "int8":
            # Numbers of a query, and weights of a chunk, are at most half a step of 15 bits off.
            bound += (2 * largest + CHUNK) / 2**16
        bound *= np.abs(values).max()
        gap = np.abs(result[row] - expected).max()
        assert gap <= bound, (row, length, gap, bound)
        assert heads


@EACH
@pytest.mark.parametrize("group", SIZES)
def test_lengths_across_the_ends_of_blocks_and_chunks(group: int, stored: Stored) -> None:
    """Every count of queries on a head, and of threads; unused places hold NaN (case 48).

    The longest have segments of several chunks, whose sums shrink when a larger score comes.
    """
    heads, d = SIZES[group]
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 200, SPAN, SPAN + 1, 2 * SPAN + 100):
        each = text(heads, length, d, stored)
        q = drawn(1, heads * group * d, seed=1) * d**-0.5
        for threads in (1, 2, 3, 7):
            check(q, [each], [length], threads=threads)


@EACH
@pytest.mark.parametrize(("d", "width"), [(12, 20), (40, 24), (76, 64)])
def test_values_of_another_width_than_keys(d: int, width: int, stored: Stored) -> None:
    for length in (1, 65, 200, SPAN + 1):
        each = text(2, length, d, stored, width=width)
        q = drawn(1, 2 * 5 * d, seed=1) * d**-0.5
        for threads in (1, 3):
            check(q, [each], [length], threads=threads)


@EACH
@pytest.mark.parametrize("machine", [name for name in machines() if name != HERE])
def test_machines_without_wide_vectors(machine: str, stored: Stored) -> None:
    for group, (heads, d) in SIZES.items():
        each = text(heads, 200, d, stored)
        q = drawn(1, heads * group * d, seed=1) * d**-0.5
        for length in (1, 17, 65, 200):
            check(q, [each], [length], threads=2, machine=machine)


@EACH
def test_a_window_counts_the_query_itself(stored: Stored) -> None:
    """Case 52, where its begin lies anywhere in a chunk; a window longer than the text is none."""
    each = text(2, 200, 10, stored)
    q = drawn(1, 60, seed=1)
    for window in (1, 2, 16, 63, 64, 65, 130, 199, 200, 1000):
        for length in (1, 5, 64, 65, 127, 200):
            for threads in (1, 3):
                check(q, [each], [length], window=window, threads=threads)


@EACH
def test_what_lies_before_a_window_is_not_read(stored: Stored) -> None:
    each = text(2, 100, 10, stored)
    keys, values = each.keys.copy(), each.values.copy()
    keys[:, :80] = kept(100 * keys[:, :80], stored)
    values[:, :80] = kept(np.full_like(values[:, :80], 1e6), stored)
    far = Text(keys, values, stored, each.room)
    q = drawn(1, 60, seed=1)
    near, other = (attend(q, [one], [100], window=20) for one in (each, far))
    np.testing.assert_allclose(other, near, atol=1e-6)


@EACH
@pytest.mark.parametrize("cap", [0.5, 2.0, 30.0])
def test_soft_caps(cap: float, stored: Stored) -> None:
    each = text(2, 70, 10, stored)
    for size in (0.3, 3.0):
        q = size * drawn(1, 60, seed=1)
        for threads in (1, 2):
            check(q, [each], [70], cap=cap, threads=threads)
            check(q, [each], [70], cap=cap, window=9, threads=threads)


@EACH
@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
def test_sinks(size: float, stored: Stored) -> None:
    """Of each query head its own: small ones, and such as leave the tokens little."""
    for length in (1, 70, SPAN + 1):
        each, q = text(2, length, 10, stored), drawn(1, 60, seed=1)
        for window in (0, 9):
            check(q, [each], [length], window=window, sinks=size * drawn(6, seed=4), threads=2)


@EACH
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_rows_of_several_texts_read_each_their_own(threads: int, stored: Stored) -> None:
    """Of any lengths and rooms, some of one text at several lengths, as a prompt has them."""
    one, two, three = (
        text(2, length, 10, stored, seed=length, room=room)
        for length, room in ((1, 64), (90, 128), (200, 512))
    )
    texts = [one, two, two, two, three, three, one]
    lengths = [1, 88, 89, 90, 200, 3, 1]
    q = drawn(7, 60, seed=1)
    check(q, texts, lengths, threads=threads)
    check(q, texts, lengths, threads=threads, window=7)


@EACH
def test_equal_scores_give_the_mean_and_heads_read_their_group(stored: Stored) -> None:
    """Case 61: 8 heads, 2 kv heads of constant values 1 and 2."""
    values = np.broadcast_to(np.array([1.0, 2.0])[:, None, None], (2, 33, 10))
    each = Text(np.zeros((2, 33, 10), np.float32), values.astype(np.float32), stored, 64)
    result = attend(drawn(1, 80), [each], [33], threads=2).reshape(8, 10)
    np.testing.assert_allclose(result, np.repeat([1.0, 2.0], 4)[:, None] * np.ones(10), rtol=1e-6)


@EACH
def test_one_score_far_above_the_others(stored: Stored) -> None:
    """The largest score may come in any chunk and any thread's part."""
    for place in (0, 63, 64, 199):
        keys, values = np.zeros((1, 200, 10), np.float32), drawn(1, 200, 10)
        keys[0, place, 0] = 1.0
        each = Text(keys, kept(values, stored), stored, 256)
        q = np.zeros((1, 10), np.float32)
        for size in (200.0, 1e4):
            q[0, 0] = size
            for threads in (1, 2, 4):
                result = attend(q, [each], [200], threads=threads)
                np.testing.assert_allclose(result[0], each.values[0, place], atol=1e-5)


@EACH
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("heads", "d", "width"), [(2, 10, 10), (3, 16, 16), (1, 80, 80), (1, 40, 24), (2, 6, 18)]
)
def test_new_keys_and_values_are_written_where_they_belong(
    heads: int, d: int, width: int, threads: int, stored: Stored
) -> None:
    """Byte for byte what the layout says, and nothing else changes."""
    whole = text(heads, 100, d, "F32", width=width)
    expected = Text(whole.keys, whole.values, stored, 128)
    empty = Text(whole.keys[:, :0], whole.values[:, :0], stored, 128)
    for places in ([0], [1, 2, 3], list(range(4, 20)), *([n] for n in range(20, 100))):
        # Rows of both are as far apart.
        k, v = np.full((2, len(places), heads * max(d, width) + 3), np.nan, np.float32)
        for rows, part in ((k, whole.keys), (v, whole.values)):
            rows[:, : heads * part.shape[2]] = part[:, places].swapaxes(0, 1).reshape(len(rows), -1)
        call(
            f"append_{stored}",
            threads=threads,
            k=k,
            v=v,
            stride=k.strides[0],
            kv_heads=heads,
            d_head=d,
            width=width,
            d_value=value_width(width),
            keys=np.full(16, empty.key_memory.ctypes.data),
            values=np.full(16, empty.value_memory.ctypes.data),
            capacities=np.full(16, 128),
            places=np.array(places),
            rows=count(len(places)),
        )
    # NaN in the padding of values that no token has written is as good as any number.
    for ours, theirs in (
        (empty.key_memory, expected.key_memory),
        (empty.value_memory, expected.value_memory),
    ):
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


def test_bfloat16_is_rounded_to_the_nearest_even_number() -> None:
    numbers = np.array([1.0, 1.00390625, 1.01171875, 1e-40, -3.3895314e38, 0.1] * 2, np.float32)
    each = Text(np.zeros((1, 0, 12), np.float32), np.zeros((1, 0, 12), np.float32), "BF16", 64)
    call(
        "append_BF16",
        k=numbers,
        v=numbers,
        stride=48,
        kv_heads=1,
        d_head=12,
        width=12,
        d_value=16,
        keys=np.array([each.key_memory.ctypes.data]),
        values=np.array([each.value_memory.ctypes.data]),
        capacities=np.array([64]),
        places=np.array([0]),
        rows=count(1),
    )
    written = each.key_memory[0, 0, :, 0].reshape(-1)
    np.testing.assert_array_equal(written, encode(numbers, "BF16").view(np.uint16))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_queries_are_scaled(stored: Stored, threads: int) -> None:
    x = drawn(5, 60)
    wide = spaced(x)
    prepare(wide, stored, 6, 10, factor=0.3, threads=threads)
    np.testing.assert_array_equal(wide[:, :60], x * np.float32(0.3))


@pytest.mark.parametrize("d", [10, 16, 48, 1024])
def test_queries_for_int8_are_whole_numbers_of_fifteen_bits(d: int) -> None:
    """And their scale behind them; of fewer where sums over so wide a head could be too large."""
    x = drawn(3, 2 * d)
    x[1, :d] = 0
    wide = spaced(x)
    prepare(wide, "int8", 2, d, factor=0.3, threads=2)
    most = min(2**15 - 1, (2**31 - 1) // (127 * d))
    for head, numbers in zip(wide[:, : 2 * d].reshape(6, d), x.reshape(6, d), strict=True):
        whole, scale = head.view(np.int16)[:d].astype(int), head[d // 2]
        assert np.abs(whole).max() == (most if numbers.any() else 0)
        assert np.abs(whole).max() * 127 * d < 2**31
        np.testing.assert_allclose(whole * scale, numbers * 0.3, atol=0.51 * scale)


def test_int8_is_rounded_to_the_nearest_step_and_nothing_is_nothing() -> None:
    """x = s·q with s = max|x| / 127; a token of zeros, or next to it, has zeros."""
    tokens = np.zeros((3, 12), np.float32)
    tokens[0, :5] = [127.0, -127.0, 0.4, -1.6, 63.2]
    tokens[2] = 1e-38
    each = Text(np.zeros((1, 0, 12), np.float32), np.zeros((1, 0, 12), np.float32), "int8", 64)
    call(
        "append_int8",
        k=tokens,
        v=tokens,
        stride=48,
        kv_heads=1,
        d_head=12,
        width=12,
        d_value=16,
        keys=np.full(3, each.key_memory.ctypes.data),
        values=np.full(3, each.value_memory.ctypes.data),
        capacities=np.full(3, 64),
        places=np.arange(3),
        rows=count(3),
    )
    first = each.key_memory[0, 0]
    keys = first[: 12 * 16].view(np.int8).reshape(6, 16, 2)[:, :3].swapaxes(0, 1).reshape(3, 12)
    np.testing.assert_array_equal(keys[0, :5], [127, -127, 0, -2, 63])
    assert not keys[1:].any()
    scales = first[12 * 16 :].view(np.float32)
    np.testing.assert_allclose(scales[:3], [1, 0, 0], rtol=1e-6, atol=1e-30)
    assert np.isnan(scales[3:]).all()


@EACH
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_what_a_narrow_cache_loses_is_the_rounding_of_keys_and_values(
    size: float, stored: Stored
) -> None:
    """Beside the numbers as they were: half a step of each, at any scale and length."""
    step = {"F32": 2.0**-23, "BF16": 2.0**-8, "int8": 1 / 127}[stored]
    whole = text(2, 300, 64, "F32")
    each = Text(kept(whole.keys, stored), kept(size * whole.values, stored), stored, 320)
    q = drawn(1, 6 * 64, seed=1) / 8
    ours = attend(q, [each], [300])[0]
    exact = reference.attention(
        q.astype(float).reshape(1, 6, 1, 64),
        whole.keys[None].astype(float),
        size * whole.values[None].astype(float),
        np.ones((1, 1, 300), bool),
        scale=1.0,
        soft_cap=None,
    ).reshape(-1)
    # A score is off by at most the sum of |q|·|k − kept|, a weight by twice that of itself.
    of_scores = np.abs(q).reshape(6, 64).sum(-1).max() * np.abs(whole.keys).max() * step / 2
    bound = np.abs(whole.values).max() * size * (2 * of_scores + step / 2) + size * 1e-3 * step
    assert np.abs(ours - exact).max() <= bound
    assert np.abs(ours - exact).max() >= bound / 1000
