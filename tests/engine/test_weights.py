"""Tensors as kernels read them: in place where there are kernels, else brought to a type once."""

import numpy as np
import pytest

from armillary.checkpoints.views import JoinedTensor
from armillary.engine.formats import FORMATS
from armillary.engine.weights import Weights
from support.engine import stored_tensors
from support.kernels import drawn
from support.quantised import IN_FILES, PLAIN, numbers

EACH = pytest.mark.parametrize("encoding", [*PLAIN, *IN_FILES])


def ignored(_: str) -> None:
    pass


@pytest.mark.parametrize("encoding", [name for name in (*PLAIN, *IN_FILES) if name in FORMATS])
def test_a_matrix_is_read_in_place(encoding: str) -> None:
    tensors = stored_tensors({"w": drawn(5, 64)}, encoding)
    matrix = Weights(tensors, "stored", ignored).matrix("w")
    assert np.shares_memory(matrix.data, tensors["w"].data)
    assert (matrix.format, matrix.n, matrix.k) == (FORMATS[encoding], 5, 64)
    assert matrix.row_bytes * 5 == tensors["w"].nbytes
    assert matrix.order is None


@EACH
@pytest.mark.parametrize(("width", "name"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_a_matrix_is_brought_to_a_width_once(width: str, name: str, encoding: str) -> None:
    tensor = stored_tensors({"w": drawn(5, 64)}, encoding)["w"]
    order = np.array([3, 1, 4, 0, 2])
    for given in (tensor, tensor.reordered(order)):
        weights = Weights({"w": given}, width, ignored)  # type: ignore[arg-type]
        matrix = weights.matrix("w")
        assert matrix.format is FORMATS[name]
        assert weights.matrix("w") is matrix
        found = numbers(name, matrix.data.reshape(5, -1))
        if matrix.order is not None:
            found = found[matrix.order]
        np.testing.assert_allclose(found, given.to_float32(), rtol=0 if name == "F32" else 2**-8)


def test_rows_of_a_matrix_follow_its_order() -> None:
    tensor = stored_tensors({"w": drawn(6, 32)})["w"]
    order = np.array([3, 1, 5, 4, 0, 2])
    for given in (tensor, tensor.reordered(order)):
        whole = Weights({"w": given}, "stored", ignored).matrix("w")
        part = whole.rows(2, 5)
        assert part.n == 3
        rows = part.data.view(np.float32).reshape(-1, 32)
        found = rows if part.order is None else rows[part.order]
        np.testing.assert_array_equal(found, given.to_float32()[2:5])


@EACH
def test_experts_are_matrices_of_one_stack(encoding: str) -> None:
    tensor = stored_tensors({"w": drawn(4, 5, 64)}, encoding)["w"]
    order = np.array([3, 1, 0])
    for given in (tensor, tensor.taking_rows(order)):
        weights = Weights({"w": given}, "stored", ignored)
        stack = weights.stack("w")
        assert weights.stack("w") is stack
        for matrix, expected in zip(stack.matrices, given.to_float32(), strict=True):
            assert (matrix.n, matrix.k, matrix.format) == (5, 64, stack.format)
            found = numbers(stack.format.name, matrix.data.reshape(-1, matrix.row_bytes))
            if matrix.order is not None:
                found = found[matrix.order]
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("encoding", [name for name in (*PLAIN, *IN_FILES) if name in FORMATS])
def test_experts_that_are_stored_one_by_one_are_read_in_place(encoding: str) -> None:
    parts = stored_tensors({f"w{n}": drawn(5, 64, seed=n) for n in range(3)}, encoding)
    joined = JoinedTensor.of(list(parts.values()), (3, 5, 64))
    stack = Weights({"w": joined}, "stored", ignored).stack("w")
    for matrix, part in zip(stack.matrices, parts.values(), strict=True):
        assert np.shares_memory(matrix.data, part.data)
    addresses = [part.data.ctypes.data for part in parts.values()]
    assert stack.arguments()["weights"].tolist() == addresses


def test_a_stack_that_was_joined_and_reordered_is_what_it_says() -> None:
    parts = stored_tensors({f"w{n}": drawn(5, 64, seed=n) for n in range(3)}, "Q8_0")
    joined = JoinedTensor.of(list(parts.values()), (3, 5, 64)).taking_rows(np.array([2, 0]))
    stack = Weights({"w": joined}, "stored", ignored).stack("w")
    for matrix, expected in zip(stack.matrices, (parts["w2"], parts["w0"]), strict=True):
        np.testing.assert_array_equal(matrix.data, expected.data)


def test_a_router_is_float32_whatever_the_width() -> None:
    tensors = stored_tensors({"w": drawn(6, 32)}, "BF16")
    weights = Weights(tensors, "bfloat16", ignored)
    matrix = weights.exact("w")
    assert matrix.format is FORMATS["F32"]
    assert weights.exact("w") is matrix
    np.testing.assert_array_equal(
        matrix.data.view(np.float32).reshape(6, 32), tensors["w"].to_float32()
    )


def test_vectors_are_float32_and_may_be_added_to() -> None:
    weights = Weights(stored_tensors({"v": drawn(7)}), "bfloat16", ignored)
    np.testing.assert_array_equal(weights.vector("v"), drawn(7))
    np.testing.assert_array_equal(weights.vector("v", 1.0), drawn(7) + np.float32(1))
    assert weights.optional("absent") is None
    assert "v" in weights
    assert "absent" not in weights


@pytest.mark.parametrize("width", ["stored", "float32"])
def test_formats_without_kernels_are_told_of_once_when_they_are_wanted_as_stored(
    width: str,
) -> None:
    tensors = stored_tensors({"a": drawn(2, 64), "b": drawn(2, 64), "c": drawn(3)})
    as_double = {
        name: type(tensor)(
            name,
            tensor.shape,
            "F64",
            tensor.to_float32().astype(np.float64).reshape(-1).view("u1"),
            "",
        )
        for name, tensor in tensors.items()
    }
    told: list[str] = []
    weights = Weights(as_double, width, told.append)  # type: ignore[arg-type]
    assert weights.matrix("a").format.name == "F32"
    np.testing.assert_array_equal(weights.vector("c"), drawn(3))
    expected = ["no kernels for F64: these weights are held as float32"]
    assert told == (expected if width == "stored" else [])
