"""Rows of activations times a matrix, Y = X·Wᵀ; memory sets the pace, each weight is read once.

Weights lie as their format has them, (N, K); the threads share out the N. Some rows of weights meet
all rows of activations while they are at hand. For more than ROWS rows they are laid out first, in
memory that stays in a cache: what comes out is the same, to the last bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types

from armillary.engine.emit import F32, I64, Emit, emitted, vector
from armillary.engine.formats import ROWS, Format
from armillary.engine.kernel import Address, Kernel, Live, Size, kernel
from armillary.engine.kernels.common import share, word
from armillary.engine.machine import Machine

AHEAD = 2048
"""Bytes behind the next rows of weights at which memory is asked for what follows."""


def product(form: Format, machine: Machine) -> Kernel:
    """Products with weights of a format.

    More than ROWS rows only where formats lay weights out, in `scratch`.
    """
    products = _products(form, machine)

    def product(
        thread: int,
        threads: int,
        weights: Address,
        row_bytes: Size,
        order: Address,
        n: Size,
        k: Size,
        x: Address,
        x_stride: Size,
        x_private: Size,
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
        x += thread * x_private
        products(
            weights,
            row_bytes,
            order,
            first,
            last,
            x,
            x_stride,
            k,
            bias,
            out,
            out_stride,
            adds,
            scratch + thread * scratch_bytes,
            rows,
        )

    # What comes out of a row must not depend on how many others are computed with it.
    return kernel(product, form.name, exact=True)


def experts_product(form: Format, machine: Machine) -> Kernel:
    """Products of the rows in each expert's slots with that expert's weights, all in one format.

    An expert has more than ROWS only as in `product`.
    """
    products = _products(form, machine)

    def experts_product(
        thread: int,
        threads: int,
        weights: Address,
        row_bytes: Size,
        order: Address,
        n: Size,
        k: Size,
        x: Address,
        x_stride: Size,
        x_private: Size,
        bias: Address,
        out: Address,
        out_stride: Size,
        adds: Size,
        scratch: Address,
        scratch_bytes: Size,
        starts: Address,
        experts: Size,
    ) -> None:
        # `weights`, `order`: for each expert the address of what `product` has.
        first, last = share(n, thread, threads)
        x += thread * x_private
        for expert in range(experts):
            begin, end = word(starts + 8 * expert), word(starts + 8 * expert + 8)
            if begin < end:
                products(
                    word(weights + 8 * expert),
                    row_bytes,
                    word(order + 8 * expert),
                    first,
                    last,
                    x + begin * x_stride,
                    x_stride,
                    k,
                    bias + 4 * n * expert if bias else 0,
                    out + begin * out_stride,
                    out_stride,
                    adds,
                    scratch + thread * scratch_bytes,
                    end - begin,
                )

    return kernel(experts_product, form.name, exact=True)


def _products(form: Format, machine: Machine) -> Any:
    """The products of the rows of weights from one to another."""
    one, few = (form.together(machine, alone=alone) for alone in (True, False))
    laid = form.together_laid(machine)

    @emitted(types.void)
    def products(
        e: Emit,
        weights: ir.Value,
        row_bytes: ir.Value,
        order: ir.Value,
        first: ir.Value,
        end: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        bias: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
        adds: ir.Value,
        panel: ir.Value,
        rows: ir.Value,
    ) -> None:
        b = e.builder
        totals = e.scratch(4 * max(few, laid) * ROWS)

        def place(number: ir.Value) -> ir.Value:
            # Behind the last row it stands for those that there are not.
            number = b.select(b.icmp_unsigned("<", number, end), number, e.sub(end, 1))
            address = e.add(order, e.mul(number, 8))
            stored = e.where(order, partial(e.load, I64, address), number)
            return e.add(weights, e.mul(stored, row_bytes))

        def finish(total: ir.Value, number: ir.Value, row: ir.Value) -> None:
            zero = e.constant(0.0, total.type)
            address = e.add(bias, e.mul(number, 4))
            start = e.where(bias, partial(e.load, total.type, address), zero)
            to = e.add(e.add(out, e.mul(out_stride, row)), e.mul(number, 4))
            before = e.where(adds, partial(e.load, total.type, to), zero)
            e.store(e.fadd(e.fadd(total, start), before), to)

        def put(many: int, begin: ir.Value, done: "int | ir.Value", count: ir.Value) -> None:
            """Totals of `count` rows, behind those that are done, to where they belong."""
            left = e.sub(end, begin)
            whole = b.icmp_unsigned(">=", left, e.int(many))
            with e.loop(count) as row:
                of_row, to = e.add(totals, e.mul(row, 4 * many)), e.add(row, done)
                with b.if_else(whole) as (all_of_them, some):
                    with all_of_them:
                        finish(e.load(vector(F32, many), of_row), begin, to)
                    with some, e.loop(left) as lane:
                        total = e.load(F32, e.add(of_row, e.mul(lane, 4)))
                        finish(total, e.add(begin, lane), to)

        def sweep(many: int, meet: Callable[[ir.Value, list[ir.Value]], None]) -> None:
            with e.loop(e.div(e.add(e.sub(end, first), many - 1), many)) as index:
                begin = e.add(first, e.mul(index, many))
                meet(begin, [place(e.add(begin, lane)) for lane in range(many)])

        def meet_few(begin: ir.Value, places: list[ir.Value]) -> None:
            many = len(places)
            ahead = e.add(places[0], e.add(e.mul(row_bytes, many), AHEAD))
            form.dots(e, machine, places, ahead, x, stride, k, rows, totals)
            put(many, begin, 0, rows)

        def sweep_few() -> None:
            if one == few:
                sweep(few, meet_few)
                return
            with b.if_else(b.icmp_unsigned("==", rows, e.int(1))) as (is_one, are_several):
                with is_one:
                    sweep(one, meet_few)
                with are_several:
                    sweep(few, meet_few)

        def meet_many(begin: ir.Value, places: list[ir.Value]) -> None:
            form.lay(e, places, k, panel)
            with e.loop(e.div(e.add(rows, ROWS - 1), ROWS)) as part:
                done = e.mul(part, ROWS)
                rest, most = e.sub(rows, done), e.int(ROWS)
                count = b.select(b.icmp_unsigned("<", rest, most), rest, most)
                xs = e.add(x, e.mul(stride, done))
                form.dots_laid(e, machine, panel, xs, stride, k, count, totals)
                put(laid, begin, done, count)

        if not laid:
            sweep_few()
            return
        with b.if_else(b.icmp_unsigned("<=", rows, e.int(ROWS))) as (is_few, is_many):
            with is_few:
                sweep_few()
            with is_many:
                sweep(laid, meet_many)

    return products
