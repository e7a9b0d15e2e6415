"""A kernel's arguments are read off its annotations."""

import pytest

from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels import all_kernels
from armillary.engine.machine import host


def test_arguments_have_kinds_and_variants_names() -> None:
    def scale(thread: int, threads: int, x: Address, n: Size, by: Number, rows: Live) -> None: ...

    made = kernel(scale, "F32", 4)
    kinds = {"x": "address", "n": "size", "by": "number", "rows": "live"}
    assert made == Kernel("scale_F32_4", scale, kinds)  # type: ignore[arg-type]
    assert list(made.arguments) == list(kinds)
    assert kernel(scale).name == "scale"


def test_a_kernel_begins_with_the_threads() -> None:
    def wrong(x: Address, thread: int) -> None: ...

    with pytest.raises(TypeError, match=r"wrong must begin with \(thread, threads\)"):
        kernel(wrong)


def test_every_argument_says_what_it_is() -> None:
    def wrong(thread: int, threads: int, x: int) -> None: ...

    with pytest.raises(TypeError, match="wrong: x is no Address, Size, Live or Number"):
        kernel(wrong)


def test_no_two_kernels_have_one_name() -> None:
    names = [each.name for each in all_kernels(host())]
    assert len(names) == len(set(names))
