"""Fused, grouped, turned and split tensors: views on reading, and back without a changed bit."""

from collections.abc import Callable

import numpy as np
import pytest

from armillary.checkpoints.layouts import (
    Groups,
    HeadRows,
    Interleaved,
    KeysAndValues,
    Layout,
    Numbered,
    Place,
    Plus,
    Rows,
    Same,
    Together,
    Transposed,
    places,
    read_tensors,
    write_tensors,
)
from armillary.checkpoints.parameters import parameter_shapes
from armillary.checkpoints.tensors import StoredTensor, TensorToWrite, encode
from armillary.checkpoints.views import columns
from armillary.config import LatentConfig, LayerConfig, NormConfig
from armillary.errors import CheckpointError
from support.models import config, layer

QKV = tuple(f"layers.{{i}}.attention.{name}.weight" for name in "qkv")
Q_NORM = ("layers.{i}.attention.q_norm.weight",)
OWN_NORMS = layer(attention={"qk_norm": NormConfig(), "qk_norm_over": "head_own_weights"})
LAYER = layer()
# 6 heads with keys of 6 channels that do not turn and values of 8, out of 12.
LATENT = layer(
    attention={"n_kv_heads": 6, "latent": LatentConfig(kv_rank=12, d_rope=4, d_value=8)},
    rotary={"d_rotary": 4},
)
KV_UP = ("layers.{i}.attention.kv_up.weight",)
SHAPES = [(60, 40), (20, 40), (20, 40)]
RNG = np.random.default_rng(0)


def stored(name: str, array: np.ndarray, encoding: str = "F32") -> StoredTensor:
    """An array as a file has it."""
    return StoredTensor(name, array.shape, encoding, encode(array, encoding), "file")


def read(layout: Layout, theirs: list[np.ndarray], shapes, layer: LayerConfig = LAYER):
    """Ours out of theirs, and where the layout was applied."""
    named = layout.theirs(shapes, layer)
    assert [array.shape for array in theirs] == list(named.values())
    place = Place(layout, dict(zip(layout.ours, shapes, strict=True)), named, layer)
    found = [stored(name, array) for name, array in zip(named, theirs, strict=True)]
    ours = layout.read(found, place)
    assert [tensor.shape for tensor in ours] == list(shapes)
    return ours, place


def written(layout: Layout, ours: list[StoredTensor], place: Place) -> list[np.ndarray]:
    """Theirs out of ours again."""
    chunks = [TensorToWrite(t.name, "F32", t.shape, t.encoded("F32")) for t in ours]
    return [
        np.concatenate([np.frombuffer(chunk, np.uint8) for chunk in tensor.chunks])
        .view("<f4")
        .reshape(tensor.shape)
        for tensor in layout.write(chunks, place)
    ]


CASES: dict[str, tuple[Layout, list[tuple[int, ...]], LayerConfig]] = {
    "same": (Same("x", QKV[:1]), SHAPES[:1], LAYER),
    "rows": (Rows("x", QKV), SHAPES, LAYER),
    "groups": (Groups("x", QKV), SHAPES, LAYER),
    "groups of one": (
        Groups("x", QKV),
        [(60, 40)] * 3,
        layer(attention={"n_kv_heads": 6}),
    ),
    "one group": (
        Groups("x", QKV),
        [(60, 40), (10, 40), (10, 40)],
        layer(attention={"n_kv_heads": 1}),
    ),
    "interleaved": (Interleaved("x", QKV[1:2]), SHAPES[1:2], LAYER),
    "turned": (Transposed(Same("x", QKV[:1])), SHAPES[:1], LAYER),
    "turned rows": (Transposed(Rows("x", QKV)), SHAPES, LAYER),
    "turned groups": (Transposed(Groups("x", QKV)), SHAPES, LAYER),
    "head rows": (HeadRows("x", Q_NORM), [(60,)], OWN_NORMS),
    "numbered": (Numbered("x.{n}", Q_NORM, "attention.n_heads"), [(60,)], OWN_NORMS),
    "together": (Together(("x", "y"), QKV[1:]), SHAPES[1:], LAYER),
    "keys and values": (KeysAndValues("x", "y", KV_UP), [(84, 12)], LATENT),
}


@pytest.mark.parametrize("name", CASES)
def test_out_and_back_changes_no_bit(name):
    layout, shapes, of = CASES[name]
    theirs = [RNG.normal(size=shape).astype("f4") for shape in layout.theirs(shapes, of).values()]
    again = written(layout, *read(layout, theirs, shapes, of))
    for before, after in zip(theirs, again, strict=True):
        np.testing.assert_array_equal(after, before)


def test_rows_are_views_of_the_file():
    whole = RNG.normal(size=(100, 40)).astype("f4")
    ours, _ = read(Rows("x", QKV), [whole], SHAPES)
    for tensor, part in zip(ours, np.split(whole, [60, 80]), strict=True):
        assert tensor.in_place
        assert tensor.nbytes == part.nbytes
        np.testing.assert_array_equal(tensor.to_float32(), part)
    base = ours[0].data.base
    assert base is not None
    assert all(tensor.data.base is base for tensor in ours)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_groups_hold_the_queries_of_a_key_head_then_the_key_and_the_value(kv_heads):
    of = layer(attention={"n_kv_heads": kv_heads})
    shapes = [(60, 3), (10 * kv_heads, 3), (10 * kv_heads, 3)]
    each = 6 // kv_heads
    heads = [
        np.full((10, 3), 100 * kind + head, "f4")
        for group in range(kv_heads)
        for kind, head in [
            *((0, group * each + i) for i in range(each)),
            (1, group),
            (2, group),
        ]
    ]
    ours, _ = read(Groups("x", QKV), [np.concatenate(heads)], shapes, of)
    for kind, (tensor, count) in enumerate(zip(ours, (6, kv_heads, kv_heads), strict=True)):
        expected = np.repeat(100 * kind + np.arange(count), 10)[:, None] * np.ones((1, 3))
        np.testing.assert_array_equal(tensor.to_float32(), expected)


def test_groups_of_blocks_change_places_too():
    """Blocks run along a row, so quantised weights are split and joined as others are."""
    whole = RNG.normal(size=(100, 32)).astype("f4")
    layout, shapes = Groups("x", QKV), [(60, 32), (20, 32), (20, 32)]
    place = Place(layout, dict(zip(QKV, shapes, strict=True)), {"x": (100, 32)}, LAYER)
    tensor = stored("x", whole, "Q8_0")
    ours = layout.read([tensor], place)
    chunks = [TensorToWrite(t.name, "Q8_0", t.shape, t.encoded("Q8_0")) for t in ours]
    (again,) = layout.write(chunks, place)
    np.testing.assert_array_equal(np.concatenate(list(again.chunks)), tensor.data)


@pytest.mark.parametrize("encoding", ["F64", "F32", "F16", "BF16"])
def test_turned_matrices_are_read_by_any_rows(encoding):
    whole = RNG.normal(size=(40, 60)).astype("f4")
    layout = Transposed(Same("x", QKV[:1]))
    place = Place(layout, {QKV[0]: (60, 40)}, {"x": (40, 60)}, LAYER)
    tensor = stored("x", whole, encoding)
    (ours,) = layout.read([tensor], place)
    assert not ours.in_place
    expected = tensor.to_float32().T
    np.testing.assert_array_equal(ours.to_float32(), expected)
    np.testing.assert_array_equal(ours.rows(7, 19), expected[7:19])
    np.testing.assert_array_equal(ours.reordered(np.arange(60)[::-1]).rows(0, 3), expected[:-4:-1])


@pytest.mark.parametrize("encoding", ["F32", "BF16"])
@pytest.mark.parametrize("inner", [(), (12,)], ids=["vectors", "matrices"])
def test_columns_of_stacks_are_read_by_any_rows(encoding, inner):
    """Of a stack of vectors or matrices, for some of the experts as for all."""
    numbers = RNG.normal(size=(5, *inner, 14))
    tensor = stored("x", numbers, encoding)
    for first in (0, 1):
        ours = columns(tensor, (5, 7, *inner), first, 2)
        taken = tensor.to_float32()[..., first::2]
        expected = taken.swapaxes(1, 2) if inner else taken
        np.testing.assert_array_equal(ours.to_float32(), expected)
        order = np.array([4, 0, 2])
        np.testing.assert_array_equal(ours.taking_rows(order).to_float32(), expected[order])
        np.testing.assert_array_equal(ours.row_range(1, 4).rows(1, 3), expected[2:4])


def test_a_turned_matrix_of_blocks_is_refused():
    tensor = stored("x", RNG.normal(size=(64, 32)).astype("f4"), "Q8_0")
    place = Place(Same("x", ("y",)), {"y": (32, 64)}, {"x": (64, 32)}, LAYER)
    with pytest.raises(CheckpointError, match="rows for columns in Q8_0; only plain numbers"):
        Transposed(Same("x", ("y",))).read([tensor], place)


def in_two_stacks(width: int) -> tuple[KeysAndValues, Place]:
    layout = KeysAndValues("x", "y", KV_UP)
    return layout, Place(
        layout, {KV_UP[0]: (84, width)}, {"x": (6, width, 6), "y": (6, 8, width)}, LATENT
    )


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_keys_and_values_are_read_by_any_rows(encoding):
    """Head by head the rows of its keys, then those of its values."""
    layout, place = in_two_stacks(12)
    keys, values = RNG.normal(size=(6, 12, 6)), RNG.normal(size=(6, 8, 12))
    found = [stored(*each, encoding) for each in (("x", keys), ("y", values))]
    (ours,) = layout.read(found, place)
    turned = found[0].to_float32().swapaxes(1, 2)
    expected = np.concatenate([turned, found[1].to_float32()], axis=1).reshape(84, 12)
    assert ours.encoding == encoding
    np.testing.assert_array_equal(ours.to_float32(), expected)
    np.testing.assert_array_equal(ours.rows(4, 31), expected[4:31])
    order = np.array([83, 0, 13, 14])
    np.testing.assert_array_equal(ours.taking_rows(order).to_float32(), expected[order])


def test_keys_in_blocks_are_written_in_float32_and_values_as_they_are():
    """Blocks run along a row, which turning would break."""
    layout, place = in_two_stacks(32)
    tensor = stored("w", RNG.normal(size=(84, 32)).astype("f4"), "Q8_0")
    wanted = TensorToWrite("w", "Q8_0", (84, 32), tensor.encoded("Q8_0"))
    theirs = layout.write([wanted], place)
    assert [each.encoding for each in theirs] == ["F32", "Q8_0"]
    found = [
        StoredTensor(each.name, each.shape, each.encoding, np.concatenate(list(each.chunks)), "f")
        for each in theirs
    ]
    (back,) = layout.read(found, place)
    np.testing.assert_array_equal(back.to_float32(), tensor.to_float32())


def test_numbered_tensors_are_one_after_the_other():
    layout = Numbered("norms.{n}.weight", Q_NORM, "attention.n_heads")
    heads = [RNG.normal(size=10).astype("f4") for _ in range(6)]
    (ours,), place = read(layout, heads, [(60,)], OWN_NORMS)
    assert list(place.theirs)[3] == "norms.3.weight"
    np.testing.assert_array_equal(ours.to_float32(), np.concatenate(heads))
    np.testing.assert_array_equal(ours.rows(8, 33), np.concatenate(heads)[8:33])
    order = np.random.default_rng(1).permutation(60)
    np.testing.assert_array_equal(ours.reordered(order).to_float32(), np.concatenate(heads)[order])


def test_matrices_are_numbered_along_the_first_dimension():
    """As experts are."""
    layout = Numbered("experts.{n}", ("layers.{i}.x",), "attention.n_kv_heads")
    parts = [RNG.normal(size=(24, 40)).astype("f4") for _ in range(2)]
    (ours,), place = read(layout, parts, [(2, 24, 40)])
    np.testing.assert_array_equal(ours.to_float32(), np.stack(parts))
    np.testing.assert_array_equal(ours.rows(1, 2), np.stack(parts)[1:])
    for before, after in zip(parts, written(layout, [ours], place), strict=True):
        np.testing.assert_array_equal(after, before)


def test_parts_of_one_tensor_must_be_stored_alike():
    layout = Numbered("norms.{n}", Q_NORM, "attention.n_kv_heads")
    named = layout.theirs([(20,)], OWN_NORMS)
    place = Place(layout, {Q_NORM[0]: (20,)}, named, OWN_NORMS)
    found = [stored("a", np.zeros(10, "f4")), stored("b", np.zeros(10, "f4"), "F16")]
    with pytest.raises(CheckpointError, match="b is F16 and a F32"):
        layout.read(found, place)


def test_plus_holds_a_number_more():
    layout = Plus("x", Q_NORM)
    (ours,), place = read(layout, [np.array([1.5, 0.25], "f4")], [(2,)])
    np.testing.assert_array_equal(ours.to_float32(), [0.5, -0.75])
    (again,) = written(layout, [ours], place)
    np.testing.assert_array_equal(again, [1.5, 0.25])


def test_fused_parts_in_two_encodings_are_refused():
    layout = Rows("x", QKV)
    place = Place(layout, dict(zip(QKV, SHAPES, strict=True)), {"x": (100, 40)}, LAYER)
    ours = [
        TensorToWrite(name, encoding, shape, [])
        for name, shape, encoding in zip(QKV, SHAPES, ("F32", "F16", "F32"), strict=True)
    ]
    with pytest.raises(CheckpointError, match="would be F16 and F32; write them all in one"):
        layout.write(ours, place)


def of_all(model=None) -> tuple[Layout, ...]:
    """Q, k and v of a model fused, all else as it is."""
    model = model or config()
    fused = Rows("blk.{i}.qkv", QKV)
    names = {name.replace("layers.0.", "layers.{i}.") for name in parameter_shapes(model)}
    others = [n for n in sorted(names) if n not in QKV and not n.startswith("layers.1.")]
    return (*(Same(f"their.{name}", (name,)) for name in others), fused)


def arrays(model) -> dict[str, np.ndarray]:
    return {
        name: RNG.normal(size=shape).astype("f4") for name, shape in parameter_shapes(model).items()
    }


def test_a_whole_model_goes_out_and_back():
    model = config()
    before = arrays(model)
    ours = [stored(name, array) for name, array in before.items()]
    chunks = [TensorToWrite(t.name, "F32", t.shape, t.encoded("F32")) for t in ours]
    theirs = write_tensors(model, of_all(), chunks, "file")
    assert {"blk.0.qkv", "blk.1.qkv"} <= {tensor.name for tensor in theirs}
    found = {
        t.name: StoredTensor(t.name, t.shape, "F32", np.concatenate([*t.chunks]), "file")
        for t in theirs
    }
    after = read_tensors(model, of_all(), found, "file")
    assert list(after) == list(before)
    for name, array in before.items():
        assert after[name].name == name
        np.testing.assert_array_equal(after[name].to_float32(), array)


def test_tensors_are_written_in_the_order_of_ours():
    model = config()
    ours = [TensorToWrite(n, "F32", s, []) for n, s in reversed(parameter_shapes(model).items())]
    names = [tensor.name for tensor in write_tensors(model, of_all(), ours, "file")]
    assert names[0] == "their.head.weight"
    assert names.index("blk.1.qkv") < names.index("blk.0.qkv")


def without(found):
    del found["blk.1.qkv"]


def of_another_shape(found):
    found["blk.1.qkv"] = stored("blk.1.qkv", np.zeros((120, 40), "f4"))


def one_more(found):
    found["blk.2.qkv"] = found["blk.1.qkv"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without, r"missing 'blk\.1\.qkv'"),
        (of_another_shape, r"'blk\.1\.qkv' has shape \[120, 40\], .* asks for \[100, 40\]"),
        (one_more, r"belonging to no parameter 'blk\.2\.qkv'"),
    ],
)
def test_tensors_that_do_not_fit_are_fatal(damage: Callable[[dict], None], message):
    """Cases.md 74, 75 and 82: shapes come from the layout, and every parameter is filled once."""
    model = config()
    found = {
        name: stored(name, np.zeros(shape, "f4"))
        for place in places(model, of_all(), "file")
        for name, shape in place.theirs.items()
    }
    assert set(read_tensors(model, of_all(), found, "file")) == set(parameter_shapes(model))
    damage(found)
    with pytest.raises(CheckpointError, match=message):
        read_tensors(model, of_all(), found, "file")


def test_a_parameter_without_a_name_is_an_error():
    with pytest.raises(CheckpointError, match=r"no name for the parameter embedding\.weight"):
        places(config(), (Rows("x", QKV),), "file")


def test_names_may_depend_on_what_else_a_layer_has():
    norms = ("layers.{i}.norm1.weight", "layers.{i}.norm2.weight")
    parallel = Together(("attn", "ffn"), norms, {"residual": "parallel"})
    alone = [Same(f"{name}.{{i}}", (name,)) for name in norms]
    for residual, expected in (("parallel", {"attn", "ffn"}), ("sequential", set())):
        model = config(layer(residual=residual))
        rest = tuple(each for each in of_all(model) if each.ours[0] not in norms)
        found = places(model, (*rest, *alone, parallel), "file")
        assert {"attn", "ffn"} & {name for place in found for name in place.theirs} == expected
