"""Products of many rows with plain weights, on every kind of machine that this can be."""

import numpy as np
import pytest

from armillary.checkpoints.tensors import encode
from armillary.engine.compiler import assembly
from armillary.engine.formats import FORMATS
from armillary.engine.kernels import matmul
from armillary.engine.machine import Machine
from armillary.engine.program import aligned
from armillary.engine.tiling import (
    LANES,
    MOST_ROWS,
    WHOLE_ROWS,
    multiplied_as,
    panel_bytes,
    row_stride,
)
from support.kernels import call, count, drawn, library_for, machines
from support.quantised import PLAIN, numbers, stored

HERE = "this machine"
ELSEWHERE = ("BF16",)
SIZES = ((1, 24), (13, 61), (40, 100), (8, 16), (50, 40), (32, 32))
"""R and N: no whole tiles, no whole vectors, fewer columns than threads can share, one of each."""


WIDTHS = (1, 10, 33, 300)
"""K that are no whole vectors, and more than are laid out together."""


def rows_of(x: np.ndarray, stride: int, lines: int) -> np.ndarray:
    """Rows of bytes, some apart, with ones of NaN behind them."""
    whole = aligned(stride * lines).reshape(lines, stride)
    whole[:] = 0xFF
    flat = x.view(np.uint8).reshape(len(x), x.shape[1] * x.itemsize)
    whole[: len(x), : flat.shape[1]] = flat
    return whole


def narrowed(machine: str, x: np.ndarray) -> np.ndarray:
    """Rows as bfloat16, with zeros up to whole vectors."""
    k = x.shape[1]
    stride = row_stride("BF16", k)
    out = rows_of(np.zeros((0, k), np.uint16), stride, -(-len(x) // WHOLE_ROWS) * WHOLE_ROWS)
    call(
        "narrow",
        code=library_for(machine),
        threads=3,
        x=x,
        x_stride=x.strides[0],
        k=k,
        out=out,
        out_stride=stride,
        rows=count(len(x)),
    )
    return out


def multiply(
    machine: str,
    name: str,
    weights: np.ndarray,
    x: np.ndarray,
    *,
    order: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    start: float | None = None,
    threads: int = 1,
) -> np.ndarray:
    """(R, N) for weights as stored."""
    k = x.shape[1]
    n = len(weights) if order is None else len(order)
    lines = -(-len(x) // WHOLE_ROWS) * WHOLE_ROWS
    if multiplied_as(FORMATS[name], machines()[machine]) == "BF16":
        from_ = narrowed(machine, x)
    else:
        from_ = rows_of(x, row_stride("F32", k), lines)
    begun = np.full((len(x), n), np.nan if start is None else start, np.float32)
    out = rows_of(begun, row_stride("F32", n), lines)
    scratch = np.full(threads * panel_bytes(k), 0xFF, np.uint8)
    call(
        f"matmul_{name}",
        code=library_for(machine),
        threads=threads,
        weights=weights,
        row_bytes=weights.shape[1],
        order=order,
        n=n,
        k=k,
        x=from_,
        x_stride=from_.strides[0],
        bias=bias,
        out=out,
        out_stride=out.strides[0],
        adds=int(start is not None),
        scratch=scratch,
        scratch_bytes=panel_bytes(k),
        rows=count(len(x)),
    )
    numbers_ = out.view(np.float32)
    beyond = -(-n // LANES) * LANES
    assert np.isnan(numbers_[:, beyond:]).all(), "written beyond the last vector of a row"
    return numbers_[: len(x), :n]


def as_bf16(numbers: np.ndarray) -> np.ndarray:
    """Numbers rounded to bfloat16, float64."""
    halves = encode(numbers.astype(np.float32), "BF16").view(np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32).reshape(numbers.shape).astype(np.float64)


def expected(
    machine: str, name: str, weights: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Products of what the kernel multiplies, and how far rounding of sums may be off, (R, N)."""
    w = numbers(name, weights)
    if multiplied_as(FORMATS[name], machines()[machine]) == "BF16":
        w, x = as_bf16(w), as_bf16(x)
    size = np.abs(x.astype(np.float64)) @ np.abs(w).T
    return x.astype(np.float64) @ w.T, size * 2.0**-24 * (x.shape[1] + 8)


CASES = [(HERE, name) for name in PLAIN]
CASES += [(machine, name) for machine in machines() if machine != HERE for name in ELSEWHERE]


@pytest.mark.parametrize(("machine", "name"), CASES)
def test_products_are_those_of_the_numbers_that_are_multiplied(machine: str, name: str) -> None:
    for k in WIDTHS:
        for rows, n in SIZES:
            weights, x = stored(name, drawn(n, k, seed=1)), drawn(rows, k, seed=2)
            wanted, close = expected(machine, name, weights, x)
            got = multiply(machine, name, weights, x)
            assert (np.abs(got - wanted) <= close + 1e-30).all(), (k, rows, n)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_threads_share_out_columns_and_change_nothing(name: str) -> None:
    weights, x = stored(name, drawn(200, 96, seed=1)), drawn(11, 96, seed=2)
    one = multiply(HERE, name, weights, x)
    for threads in (2, 3, 7, 20):
        np.testing.assert_array_equal(multiply(HERE, name, weights, x, threads=threads), one)


def test_rows_do_not_depend_on_those_beside_them() -> None:
    weights, x = stored("BF16", drawn(100, 70, seed=1)), drawn(23, 70, seed=2)
    whole = multiply(HERE, "BF16", weights, x)
    alone = [multiply(HERE, "BF16", weights, x[row : row + 1]) for row in range(len(x))]
    np.testing.assert_array_equal(np.concatenate(alone), whole)


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("name", ["F32", "BF16"])
def test_bias_order_and_what_is_there_already(name: str, machine: str) -> None:
    weights, x = stored(name, drawn(61, 40, seed=1)), drawn(39, 40, seed=2)
    order = np.random.default_rng(3).permutation(61)[:45]
    bias = drawn(45, seed=4)
    products_, _ = expected(machine, name, weights, x)
    for start in (None, 2.5):
        for added in (None, bias):
            given = {"order": order, "bias": added, "start": start, "threads": 2}
            got = multiply(machine, name, weights, x, **given)  # type: ignore[arg-type]
            wanted = products_[:, order] + (0 if added is None else added) + (start or 0)
            np.testing.assert_allclose(got, wanted, atol=3e-5)


def test_amx_multiplies_where_there_is_amx() -> None:
    features = "avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vnni avx512bf16"
    named = dict.fromkeys(features.split(), True)
    triple, cpu = "x86_64-unknown-linux-gnu", "sapphirerapids"
    for more, there in (({}, False), ({"amx-tile": True, "amx-bf16": True}, True)):
        machine = Machine.of(triple, cpu, named | more)
        text = assembly([matmul.matmul(FORMATS["BF16"], machine)], machine)
        for instruction in ("ldtilecfg", "tdpbf16ps", "tilerelease"):
            assert (instruction in text) == there


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("k", [1, 31, 64, 77])
def test_rows_are_narrowed_to_the_nearest(machine: str, k: int) -> None:
    x = drawn(5, k)
    out = narrowed(machine, x).view(np.uint16)
    np.testing.assert_array_equal(out[:5, :k], encode(x, "BF16").view(np.uint16).reshape(5, k))
    whole = -(-k // (2 * LANES)) * 2 * LANES
    assert (out[:5, k:whole] == 0).all()
    assert (out[:5, whole:] == 0xFFFF).all()


def test_sums_of_a_tile_stay_in_registers() -> None:
    """The products of a tile are read from no memory but of rows and columns."""
    here = machines().get("without AMX", machines()[HERE])
    if not here.bf16_dot:
        pytest.skip("no bfloat16 products on this machine")
    lines = assembly([matmul.matmul(FORMATS["BF16"], here)], here).splitlines()
    products_ = [number for number, line in enumerate(lines) if "vdpbf16ps" in line]
    assert len(products_) >= MOST_ROWS * 3
    first, last = products_[0], products_[-1]
    between = [line for line in lines[first:last] if "vdpbf16ps" in line]
    assert not any("(%rsp" in line or "(%rbp" in line for line in between)
