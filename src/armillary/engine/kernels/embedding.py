"""Rows of a table by number, as float32."""

from typing import Any

from llvmlite import ir
from numba.core import types

from armillary.engine.emit import Emit, emitted
from armillary.engine.formats import Format
from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels.common import floats, share_items, word


def embedding(form: Format) -> Kernel:
    """Rows of a table in a format."""
    decode = _decode(form)

    def embedding(
        thread: int,
        threads: int,
        table: Address,
        row_bytes: Size,
        order: Address,
        k: Size,
        scale: Number,
        numbers: Address,
        out: Address,
        out_stride: Size,
        rows: Live,
    ) -> None:
        first, last = share_items(rows, thread, threads)
        for row in range(first, last):
            number = word(numbers + 8 * row)
            stored = word(order + 8 * number) if order else number
            place = out + row * out_stride
            decode(table + stored * row_bytes, k, place)
            x = floats(place)
            for i in range(k):
                x[i] = x[i] * scale

    return kernel(embedding, form.name)


def _decode(form: Format) -> Any:
    @emitted(types.void)
    def decode(e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        form.decode(e, weights, k, out)

    return decode
