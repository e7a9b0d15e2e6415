"""16 rows of weights, whatever their format, as columns of the panel that tiles read."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.emit import I64, Emit, emitted
from armillary.engine.formats import Format
from armillary.engine.kernels.common import floats, set_word, word
from armillary.engine.kernels.tile import WORDS, lay, transposed
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES, PART, multiplied_as


def panel_filler(form: Format, machine: Machine) -> Any:
    """What brings rows of weights to a panel, in the numbers that they are multiplied as."""
    if form.name == multiplied_as(form, machine) == "BF16":
        return _copy(form, machine)
    return _decode(form, machine)


def _copy(form: Format, machine: Machine) -> Any:
    """Bfloat16 as it is stored; for rows that there are not, the last one."""
    pair = 2 * LANES
    fill = _decode(form, machine)

    @emitted(types.void)
    def exchange(e: Emit, places: ir.Value, pairs: ir.Value, out: ir.Value, step: ir.Value) -> None:
        starts = [e.load(I64, places, 8 * row) for row in range(LANES)]
        with e.loop(pairs) as index:
            words = [e.load(WORDS, e.add(start, e.mul(index, 4 * LANES))) for start in starts]
            for number, column in enumerate(transposed(e, words)):
                place = e.mul(e.add(e.mul(index, LANES), number), step)
                e.store(column, e.add(out, place))

    @register_jitable
    def copy(
        weights: int,
        row_bytes: int,
        order: int,
        n: int,
        k: int,
        first: int,
        stage: int,
        panel: int,
        step: int,
    ) -> None:
        for row in range(LANES):
            number = min(first + row, n - 1)
            stored = word(order + 8 * number) if order else number
            set_word(stage + 8 * row, weights + stored * row_bytes)
        exchange(stage, k // pair, panel, step)
        done = k // pair * pair
        if done < k:
            rest, to = weights + 2 * done, panel + done // 2 * step
            fill(rest, row_bytes, order, n, k - done, first, stage, to, step)

    return copy


def _decode(form: Format, machine: Machine) -> Any:
    """Numbers of any format; for rows that there are not, zeros."""
    lay_out = lay(machine, multiplied_as(form, machine))
    per_word = 1 if multiplied_as(form, machine) == "F32" else 2
    block, nbytes = form.block, form.nbytes

    @emitted(types.void)
    def decode(e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        form.decode(e, weights, k, out)

    @register_jitable
    def fill(
        weights: int,
        row_bytes: int,
        order: int,
        n: int,
        k: int,
        first: int,
        stage: int,
        panel: int,
        step: int,
    ) -> None:
        for begin in range(0, k, PART):
            count = min(PART, k - begin)
            pairs = (count + 2 * LANES - 1) // (2 * LANES)
            for row in range(LANES):
                numbers = floats(stage + 4 * PART * row)
                there = 0
                if first + row < n:
                    there = count
                    stored = word(order + 8 * (first + row)) if order else first + row
                    place = weights + stored * row_bytes + begin // block * nbytes
                    decode(place, count, stage + 4 * PART * row)
                for i in range(there, pairs * 2 * LANES):
                    numbers[i] = 0
            lay_out(stage, 4 * PART, pairs, panel + begin // per_word * step, step)

    return fill
