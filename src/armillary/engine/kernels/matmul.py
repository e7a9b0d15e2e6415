"""Many rows of activations times a matrix, Y = X·Wᵀ, where arithmetic sets the pace.

A thread brings some columns of Wᵀ at a time, whatever their format, to the layout that tiles read,
in memory of its own that stays in its cache; then all rows of activations meet them.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.emit import F32 as FLOAT
from armillary.engine.emit import FLOATS, Emit, emitted, vector
from armillary.engine.formats import Format
from armillary.engine.kernel import Address, Kernel, Live, Size, kernel
from armillary.engine.kernels import amx
from armillary.engine.kernels.common import floats, share, share_items, shorts, word
from armillary.engine.kernels.panel import panel_filler
from armillary.engine.kernels.tile import SUMS, nearest, pack, tile
from armillary.engine.machine import Machine
from armillary.engine.tiling import (
    AMX_VECTORS,
    LANES,
    PART,
    multiplied_as,
    multiplied_by_amx,
    tile_rows,
    tile_vectors,
)


def matmul(form: Format, machine: Machine) -> Kernel:
    """Products with weights of a format. X is in the numbers that `multiplied_as` names.

    Rows are computed up to a whole tile, and columns up to a whole vector: `x` and `out` have
    memory for them.
    """
    multiply = _multiply(form, machine)

    def matmul(
        thread: int,
        threads: int,
        weights: Address,
        row_bytes: Size,
        order: Address,
        n: Size,
        k: Size,
        x: Address,
        x_stride: Size,
        bias: Address,
        out: Address,
        out_stride: Size,
        adds: Size,
        scratch: Address,
        scratch_bytes: Size,
        rows: Live,
    ) -> None:
        # `order`: row i of W is stored row order[i]. `adds`: to what `out` holds.
        first, last = share(n, thread, threads)
        mine = scratch + thread * scratch_bytes
        multiply(
            weights, row_bytes, order, n, k, first, last, x, x_stride, bias, out, out_stride, adds,
            mine, rows,
        )  # fmt: skip

    return kernel(matmul, form.name, exact=True)


def experts_matmul(form: Format, machine: Machine) -> Kernel:
    """Products of the rows in each expert's slots with that expert's weights, all in one format.

    What is computed behind an expert's last row lies in the slots of the next one, which the same
    thread writes after it.
    """
    multiply = _multiply(form, machine)

    def experts_matmul(
        thread: int,
        threads: int,
        weights: Address,
        row_bytes: Size,
        order: Address,
        n: Size,
        k: Size,
        x: Address,
        x_stride: Size,
        bias: Address,
        out: Address,
        out_stride: Size,
        adds: Size,
        scratch: Address,
        scratch_bytes: Size,
        starts: Address,
        experts: Size,
    ) -> None:
        # `weights`, `order`: for each expert the address of what `matmul` has.
        first, last = share(n, thread, threads)
        mine = scratch + thread * scratch_bytes
        for expert in range(experts):
            begin, end = word(starts + 8 * expert), word(starts + 8 * expert + 8)
            if begin < end:
                place, ordered = word(weights + 8 * expert), word(order + 8 * expert)
                own = bias + 4 * n * expert if bias else 0
                xs, to = x + begin * x_stride, out + begin * out_stride
                multiply(
                    place, row_bytes, ordered, n, k, first, last, xs, x_stride, own, to, out_stride,
                    adds, mine, end - begin,
                )  # fmt: skip

    return kernel(experts_matmul, form.name, exact=True)


def _multiply(form: Format, machine: Machine) -> Any:
    """All rows of activations times some rows of a matrix, in a thread's own memory."""
    number = multiplied_as(form, machine)
    per_word = 1 if number == "F32" else 2
    by_amx = multiplied_by_amx(number, machine)
    most = AMX_VECTORS if by_amx else tile_vectors(machine)
    vectors_of, column_of, sweep = _by_amx() if by_amx else _by_vectors(form, machine)
    fill = panel_filler(form, machine)

    @register_jitable
    def multiply(
        weights: int,
        row_bytes: int,
        order: int,
        n: int,
        k: int,
        first: int,
        last: int,
        x: int,
        x_stride: int,
        bias: int,
        out: int,
        out_stride: int,
        adds: int,
        starts: int,
        rows: int,
    ) -> None:
        count = (k + per_word - 1) // per_word
        zeros = starts + 4 * LANES * most
        stage = zeros + 4 * LANES * most
        panel = stage + 4 * LANES * PART
        while first < last:
            vectors = vectors_of(last - first)
            given, begin, nothing = floats(bias), floats(starts), floats(zeros)
            for i in range(vectors * LANES):
                begin[i] = given[first + i] if bias and first + i < n else np.float32(0)
                nothing[i] = np.float32(0)
            for v in range(vectors):
                column, step = column_of(v, vectors, count)
                at = first + v * LANES
                fill(weights, row_bytes, order, n, k, at, stage, panel + column, step)
            to = out + 4 * first
            sweep(x, x_stride, panel, count, vectors, starts, zeros, to, out_stride, adds, rows)
            first += vectors * LANES

    return multiply


def _by_vectors(form: Format, machine: Machine) -> tuple[Any, Any, Any]:
    """Rows of activations times a panel of columns, a word of a row at a time.

    How many vectors of columns are taken together, where each begins in the panel and how far apart
    its words are, and the products.
    """
    at_once, most = tile_rows(machine), tile_vectors(machine)
    multiply_many, multiply_few = (_tile(form, machine, vectors) for vectors in (most, 1))
    # One sum over all of a long row would lose digits that bfloat16 has not.
    stretch = 64 if multiplied_as(form, machine) == "F32" else 1 << 30

    @register_jitable
    def vectors_of(columns: int) -> int:
        return most if columns > LANES * (most - 1) else 1

    @register_jitable
    def column_of(vector: int, vectors: int, _count: int) -> tuple[int, int]:
        return 4 * LANES * vector, 4 * LANES * vectors

    @register_jitable
    def sweep(
        x: int,
        x_stride: int,
        panel: int,
        count: int,
        vectors: int,
        starts: int,
        zeros: int,
        out: int,
        out_stride: int,
        adds: int,
        rows: int,
    ) -> None:
        for row in range(0, rows, at_once):
            from_, there = x + row * x_stride, out + row * out_stride
            for done in range(0, count, stretch):
                xs, ws = from_ + 4 * done, panel + done * 4 * LANES * vectors
                words = min(stretch, count - done)
                start, more = (zeros, 1) if done else (starts, adds)
                if vectors == most:
                    multiply_many(xs, x_stride, ws, words, start, there, out_stride, more)
                else:
                    multiply_few(xs, x_stride, ws, words, start, there, out_stride, more)

    return vectors_of, column_of, sweep


def _by_amx() -> tuple[Any, Any, Any]:
    """The same by AMX: two blocks of rows and two vectors of columns at a time, while there are.

    Several such pairs of columns meet the rows while these are in the first cache.
    """
    of_2_2, of_2_1, of_1_2, of_1_1 = (
        amx.multiply(blocks, vectors) for blocks in (2, 1) for vectors in (2, 1)
    )
    begin, end, block, pair = amx.begin, amx.end, amx.ROWS, 2 * 4 * LANES

    @register_jitable
    def vectors_of(columns: int) -> int:
        return min(AMX_VECTORS, (columns + LANES - 1) // LANES)

    @register_jitable
    def column_of(vector: int, vectors: int, count: int) -> tuple[int, int]:
        words = (count + LANES - 1) // LANES * LANES
        step = pair // 2 if vector == vectors - 1 and vectors % 2 else pair
        return vector // 2 * words * pair + vector % 2 * 4 * LANES, step

    @register_jitable
    def sweep(
        x: int,
        x_stride: int,
        panel: int,
        count: int,
        vectors: int,
        starts: int,
        _zeros: int,
        out: int,
        out_stride: int,
        adds: int,
        rows: int,
    ) -> None:
        begin(0)
        for row in range(0, rows, 2 * block):
            xs, there = x + row * x_stride, out + row * out_stride
            for done in range(0, vectors, 2):
                ws = panel + column_of(done, vectors, count)[0]
                start, to = starts + done * 4 * LANES, there + done * 4 * LANES
                if rows - row > block:
                    if vectors - done > 1:
                        of_2_2(xs, x_stride, ws, count, start, to, out_stride, adds)
                    else:
                        of_2_1(xs, x_stride, ws, count, start, to, out_stride, adds)
                elif vectors - done > 1:
                    of_1_2(xs, x_stride, ws, count, start, to, out_stride, adds)
                else:
                    of_1_1(xs, x_stride, ws, count, start, to, out_stride, adds)
        end(0)

    return vectors_of, column_of, sweep


def _tile(form: Format, machine: Machine, vectors: int) -> Any:
    """A tile of the product, put where it belongs."""
    number, rows = multiplied_as(form, machine), tile_rows(machine)

    @emitted(types.void)
    def multiply(
        e: Emit,
        x: ir.Value,
        stride: ir.Value,
        panel: ir.Value,
        count: ir.Value,
        starts: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
        adds: ir.Value,
    ) -> None:
        xs = [e.add(x, e.mul(stride, row)) for row in range(rows)]
        bias = [e.load(SUMS, starts, 4 * LANES * one) for one in range(vectors)]

        def finish(row: int, sums: list[ir.Value]) -> None:
            place = e.add(out, e.mul(out_stride, row))
            for one, total in enumerate(sums):
                offset = 4 * LANES * one
                old = functools.partial(e.load, SUMS, place, offset)
                before = e.where(adds, old, e.constant(0.0, SUMS))
                e.store(e.fadd(e.fadd(total, bias[one]), before), place, offset)

        tile(e, machine, number, xs, 4, panel, 4 * LANES * vectors, count, vectors, finish)

    return multiply


def narrow(machine: Machine) -> Kernel:
    """Rows of float32 as bfloat16, with zeros up to whole vectors of words."""

    @emitted(types.void)
    def narrow_part(e: Emit, x: ir.Value, out: ir.Value) -> None:
        kind = vector(FLOAT, FLOATS)
        e.store(pack(e, machine, e.load(kind, x), e.load(kind, x, 4 * FLOATS)), out)

    def narrow(
        thread: int,
        threads: int,
        x: Address,
        x_stride: Size,
        k: Size,
        out: Address,
        out_stride: Size,
        rows: Live,
    ) -> None:
        first, last = share_items(rows, thread, threads)
        whole = k // (2 * LANES)
        for row in range(first, last):
            a, b = x + row * x_stride, out + row * out_stride
            for part in range(whole):
                narrow_part(a + 8 * LANES * part, b + 4 * LANES * part)
            from_, to = floats(a), shorts(b)
            for i in range(whole * 2 * LANES, k):
                to[i] = nearest(from_[i])
            for i in range(k, (k + 2 * LANES - 1) // (2 * LANES) * 2 * LANES):
                to[i] = 0

    return kernel(narrow)
