"""Products with weights of every format, on every kind of machine that this one can be."""

from typing import Any

import numpy as np
import pytest

from armillary.engine.tiling import panel_bytes
from support.kernels import EPSILON, call, count, drawn, library_for, machines, spaced
from support.quantised import PLAIN, QUANTISED, meant, numbers, packed, stored, summands

MACHINES = pytest.mark.parametrize("machine", machines())
FORMATS = pytest.mark.parametrize("name", [*PLAIN, *QUANTISED])


def widths(name: str) -> tuple[int, ...]:
    """K that are no whole vectors where the format allows."""
    return (32, 96, 160) if name in QUANTISED else (1, 15, 16, 33, 75)


def multiply(
    machine: str,
    name: str,
    rows: np.ndarray,
    x: np.ndarray,
    *,
    order: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
    threads: int = 1,
    private: bool = False,
) -> np.ndarray:
    """(R, N) by the kernel, for activations (R, K) float32 or, quantised, packed bytes."""
    n = len(rows) if order is None else len(order)
    k = numbers(name, rows[:1]).shape[1]
    out = spaced(np.full((len(x), n), np.nan, np.float32) if start is None else start)
    # Each thread's own activations; another's are poison.
    copies = np.ascontiguousarray(np.broadcast_to(x, (threads, *x.shape))) if private else x
    call(
        f"product_{name}",
        code=library_for(machine),
        threads=threads,
        weights=rows,
        row_bytes=rows.shape[1],
        order=order,
        n=n,
        k=k,
        x=copies,
        x_stride=x.strides[0],
        x_private=x.nbytes if private else 0,
        bias=bias,
        out=out,
        out_stride=out.strides[0],
        adds=int(start is not None),
        scratch=np.full(threads * panel_bytes(k), 0xFF, np.uint8),
        scratch_bytes=panel_bytes(k),
        rows=count(len(x)),
    )
    assert np.isnan(out[:, n:]).all(), "written beyond a row"
    return out[:, :n]


def check(machine: str, name: str, rows: np.ndarray, x: np.ndarray, **more: Any) -> None:
    """The kernel's product against float64 on the same numbers, to float32's rounding."""
    activations = packed(x) if name in QUANTISED else x
    result = multiply(machine, name, rows, activations, **more)
    exact = meant(x) if name in QUANTISED else x.astype(np.float64)
    order, bias, start = (more.get(key) for key in ("order", "bias", "start"))
    chosen = rows if order is None else rows[order]
    expected = exact @ numbers(name, chosen).T
    sizes = np.abs(exact) @ summands(name, chosen).T
    for added in (bias, start):
        if added is not None:
            expected, sizes = expected + added, sizes + np.abs(added)
    bound = (exact.shape[1] / 8 + 16) * EPSILON * sizes
    assert (np.abs(result - expected) <= bound).all(), (np.abs(result - expected) / bound).max()


@MACHINES
@FORMATS
def test_any_count_of_rows(machine: str, name: str) -> None:
    """Some formats take eight, four, two and one at a time; one alone goes another way."""
    for k in widths(name):
        rows = stored(name, drawn(37, k))
        for count_of_rows in range(1, 17):
            check(machine, name, rows, drawn(count_of_rows, k, seed=count_of_rows))


@MACHINES
@FORMATS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_out_the_columns(machine: str, name: str, threads: int) -> None:
    k = widths(name)[-1]
    for n in (1, 16, 17, 37, 64, 100):
        check(machine, name, stored(name, drawn(n, k)), drawn(3, k, seed=1), threads=threads)


@MACHINES
@FORMATS
def test_bias_order_and_adding(machine: str, name: str) -> None:
    k, n = widths(name)[-2], 21
    rows, x = stored(name, drawn(n, k)), drawn(5, k, seed=1)
    order = np.random.default_rng(2).permutation(n).astype(np.int64)
    for more in (
        {"bias": drawn(n, seed=3)},
        {"order": order},
        {"order": order[4:11]},
        {"start": drawn(5, n, seed=4)},
        {"bias": drawn(n, seed=3), "order": order, "start": drawn(5, n, seed=4)},
    ):
        check(machine, name, rows, x, **more)
        check(machine, name, rows, x, threads=2, private=True, **more)


@MACHINES
@pytest.mark.parametrize("name", QUANTISED)
def test_many_rows_are_each_row_alone(machine: str, name: str) -> None:
    """To the last bit, though weights are laid out for them; parts of 16 rows and what is left."""
    k, n = 160, 53
    rows, x = stored(name, drawn(n, k)), packed(drawn(37, k, seed=1))
    order = np.random.default_rng(2).permutation(n).astype(np.int64)
    more: dict[str, Any] = {"bias": drawn(n, seed=3), "order": order}
    alone = [multiply(machine, name, rows, x[row : row + 1], **more) for row in range(len(x))]
    for count_of_rows in (1, 2, 16, 17, 37):
        for threads in (1, 3):
            some = multiply(machine, name, rows, x[:count_of_rows], threads=threads, **more)
            np.testing.assert_array_equal(some, np.concatenate(alone[:count_of_rows]))


@FORMATS
def test_each_thread_reads_its_own_activations(name: str) -> None:
    k = widths(name)[-1]
    rows, x = stored(name, drawn(64, k)), drawn(3, k, seed=1)
    check("this machine", name, rows, x, threads=2, private=True)
    # The second thread's part comes from what lies behind the first's.
    both = np.stack([x, 2 * x])
    activations = np.stack([packed(each) for each in both]) if name in QUANTISED else both
    out = np.full((3, 64), np.nan, np.float32)
    call(
        f"product_{name}",
        threads=2,
        weights=rows,
        row_bytes=rows.shape[1],
        order=None,
        n=64,
        k=k,
        x=activations,
        x_stride=activations.strides[1],
        x_private=activations.strides[0],
        bias=None,
        out=out,
        out_stride=out.strides[0],
        adds=0,
        scratch=None,
        scratch_bytes=0,
        rows=count(3),
    )
    expected = (meant(x) if name in QUANTISED else x) @ numbers(name, rows).T
    np.testing.assert_allclose(out[:, :32], expected[:, :32], atol=1e-4)
    np.testing.assert_allclose(out[:, 32:], 2 * expected[:, 32:], atol=2e-4)


@MACHINES
def test_the_largest_bytes_are_added_up_exactly(machine: str) -> None:
    """−128 · ±127, 160 times over: sums of pairs must not saturate, and −128 has no opposite."""
    k, one = 160, np.float16(1).tobytes()
    for q in (-128, -127, 127):
        block = np.frombuffer(one + np.full(32, q, np.int8).tobytes(), np.uint8)
        rows = np.tile(block, (3, k // 32))
        for sign in (1, -1):
            x = np.full((2, k), sign * 127, np.float32)
            result = multiply(machine, "Q8_0", rows, packed(x))
            assert (result == q * sign * 127 * k).all()


@MACHINES
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_the_largest_halves_of_bytes_are_added_up_exactly(machine: str, name: str) -> None:
    """All 0 or all 15, with a scale and an offset of 1."""
    k = 96
    head = np.ones(1 if name == "Q4_0" else 2, np.float16).tobytes()
    for q in (0, 15):
        block = np.frombuffer(head + bytes([q * 17] * 16), np.uint8)
        rows = np.tile(block, (3, k // 32))
        for sign in (1, -1):
            x = np.full((2, k), sign * 127, np.float32)
            weight = q - 8 if name == "Q4_0" else q + 1
            assert (multiply(machine, name, rows, packed(x)) == weight * sign * 127 * k).all()


@MACHINES
@FORMATS
def test_nothing_times_anything_is_nothing(machine: str, name: str) -> None:
    k = widths(name)[-1]
    for rows, x in (
        (stored(name, np.zeros((5, k), np.float32)), drawn(3, k)),
        (stored(name, drawn(5, k)), np.zeros((3, k), np.float32)),
    ):
        activations = packed(x) if name in QUANTISED else x
        assert not multiply(machine, name, rows, activations).any()


@MACHINES
def test_every_float16_is_read(machine: str) -> None:
    """Subnormal numbers and both zeros too; a weight is finite."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits[np.isfinite(bits.view(np.float16))]
    rows = every.view(np.uint8).reshape(len(every), 2)
    result = multiply(machine, "F16", rows, np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(result[0], every.view(np.float16).astype(np.float32))


@MACHINES
@pytest.mark.parametrize("name", QUANTISED)
def test_scales_of_any_size_are_read(machine: str, name: str) -> None:
    rows = stored(name, drawn(3, 32))
    for scale in (0.0, 6e-8, 1e-5, 1.0, 65504.0, -2.0):
        changed = rows.copy()
        changed[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        check(machine, name, changed, drawn(2, 32, seed=1))
