"""The number formats that weights are read in, as they lie in a file: one file for each kind."""

from armillary.engine.formats.affine import A4, A8
from armillary.engine.formats.format import ROWS, Format
from armillary.engine.formats.plain import BF16, F16, F32
from armillary.engine.formats.q4_0 import Q4_0
from armillary.engine.formats.q4_1 import Q4_1
from armillary.engine.formats.q8_0 import Q8_0

FORMATS: dict[str, Format] = {
    each.name: each for each in (F32(), F16(), BF16(), Q8_0(), Q4_0(), Q4_1(), A4(), A8())
}
"""By GGML's names, where GGML has them."""

__all__ = ["FORMATS", "ROWS", "Format"]
