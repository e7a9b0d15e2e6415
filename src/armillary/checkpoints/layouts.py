"""How the tensors of a file hold ours: fused, in groups, transposed, in another order of rows.

Each layout is data, with the names of both sides as templates (`{i}` the layer, `{n}` a number
within it), and does its work both ways: by views on reading, so that nothing is copied until it is
asked for, and on writing with the bytes of no more than one of the file's tensors in memory.
Knows nothing of families and formats.
"""

# A layout need not use all that it is given.
# ruff: noqa: ARG002

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.parameters import (
    Shape,
    check_fitting,
    parameter_shapes,
    template_of,
)
from armillary.checkpoints.tensors import (
    StoredTensor,
    TensorToWrite,
    block_size,
    encode,
    in_heads,
    mapped,
    transposed,
    turned_stacks,
    whole,
    with_rows,
)
from armillary.checkpoints.views import HeadsTensor, JoinedTensor, TransposedTensor, columns
from armillary.config import DecoderConfig, LayerConfig
from armillary.errors import CheckpointError
from armillary.rope_layout import half_split_from_interleaved, interleaved_from_half_split

Order = NDArray[np.intp]


class Layout(Protocol):
    """Between some tensors of a file and some of ours.

    `ours` are parameter templates. A layout applies to a layer (or, without `{i}`, to the model)
    where the configuration has all of them.
    """

    @property
    def ours(self) -> tuple[str, ...]:
        """Templates of our parameters."""

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """The file's names, `{i}` still in them, and shapes, for ours of these shapes."""

    def read(self, found: Sequence[StoredTensor], place: "Place") -> list[StoredTensor]:
        """Ours, in order and under any name, out of theirs."""

    def write(self, ours: Sequence[TensorToWrite], place: "Place") -> list[TensorToWrite]:
        """Theirs, in order and under any name, out of ours."""


@dataclass(frozen=True)
class Place:
    """Where a layout is applied: our names and shapes, theirs, and the layer, if it is in one."""

    layout: Layout
    ours: dict[str, Shape]
    theirs: dict[str, Shape]
    layer: LayerConfig | None


@dataclass(frozen=True)
class _OneToOne:
    """A tensor of the shape of ours."""

    name: str
    ours: tuple[str, ...]

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """The same shape."""
        return {self.name: shapes[0]}


@dataclass(frozen=True)
class _OneBelowOther:
    """A tensor of as many rows as several of ours together."""

    name: str
    ours: tuple[str, ...]

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """As many rows as all of ours."""
        return {self.name: (sum(shape[0] for shape in shapes), *shapes[0][1:])}


@dataclass(frozen=True)
class Same(_OneToOne):
    """One tensor, as it is."""

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """As it is."""
        return list(found)

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """As it is."""
        return list(ours)


@dataclass(frozen=True)
class Rows(_OneBelowOther):
    """Several of ours one below the other: q, k and v in one matrix, gate and up in another."""

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """Ranges of rows."""
        parts, start = [], 0
        for rows, *_ in place.ours.values():
            parts.append(found[0].row_range(start, start + rows))
            start += rows
        return parts

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """One after the other."""
        return [_below_each_other(ours, place)]


@dataclass(frozen=True)
class Groups(_OneBelowOther):
    """q, k and v in one matrix, by key/value heads: the queries of a group, its key, its value.

    With as many key/value heads as queries that is q, k, v of each head (GPT-NeoX); with one, all
    queries, then the key and the value (Falcon 7B).
    """

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """Rows out of the groups."""
        return [found[0].taking_rows(rows) for rows in _grouped_rows(place)]

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """Rows into the groups."""
        back = np.argsort(np.concatenate(_grouped_rows(place)))
        return [with_rows(_below_each_other(ours, place), back)]


def _below_each_other(ours: Sequence[TensorToWrite], place: Place) -> TensorToWrite:
    """All rows of ours as the one tensor of the file's."""
    ((name, shape),) = place.theirs.items()
    encodings = sorted({tensor.encoding for tensor in ours})
    if len(encodings) > 1:
        raise CheckpointError(
            f"{name} holds {', '.join(place.ours)}, which would be {' and '.join(encodings)}; "
            "write them all in one encoding"
        )
    chunks = chain.from_iterable(tensor.chunks for tensor in ours)
    return ours[0]._replace(shape=shape, chunks=chunks)


def _grouped_rows(place: Place) -> list[Order]:
    """The file's rows of q, of k and of v."""
    assert place.layer is not None
    attention = place.layer.attention
    groups, width = attention.n_kv_heads, attention.d_head
    queries = attention.n_heads // groups
    rows = np.arange(groups * (queries + 2) * width).reshape(groups, queries + 2, width)
    return [
        rows[:, part].reshape(-1)
        for part in (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, None))
    ]


@dataclass(frozen=True)
class Together:
    """Several tensors, each as it is, in layers that have all of them and say what `when` does.

    For names that depend on what else a layer has.
    """

    names: tuple[str, ...]
    ours: tuple[str, ...]
    when: Mapping[str, object] = field(default_factory=dict)

    def applies(self, layer: LayerConfig | None) -> bool:
        """Whether the layer's own entries are those."""
        return all(getattr(layer, name) == value for name, value in self.when.items())

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """The same shapes."""
        return dict(zip(self.names, shapes, strict=True))

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """As they are."""
        return list(found)

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """As they are."""
        return list(ours)


@dataclass(frozen=True)
class Interleaved(_OneToOne):
    """Rows of queries or keys stored for interleaved rotation; ours are as the layer says.

    Keys have fewer heads than queries: the rows of each are counted in heads of their own.
    """

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """Rows in half-split order."""
        order = _rotary_rows(place, half_split_from_interleaved)
        return [found[0] if order is None else found[0].reordered(order)]

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """Rows in interleaved order."""
        order = _rotary_rows(place, interleaved_from_half_split)
        return [ours[0] if order is None else with_rows(ours[0], order)]


def _rotary_rows(place: Place, order: Callable[[int, int, int], Any]) -> Order | None:
    """The order of the rows, None where they stay: nothing rotates, or interleaved as stored."""
    assert place.layer is not None
    attention = place.layer.attention
    rotary = attention.rotary
    if rotary is None or rotary.layout == "interleaved":
        return None
    ((rows, *_),) = place.ours.values()
    rows_in_order: Order = order(rows // attention.d_head, attention.d_head, rotary.d_rotary)
    return rows_in_order


@dataclass(frozen=True)
class Transposed:
    """Another layout of matrices that are stored (in, out), as GPT-2's are."""

    of: Layout

    @property
    def ours(self) -> tuple[str, ...]:
        """Those of the other layout."""
        return self.of.ours

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """The other layout's, with the two dimensions exchanged."""
        return {name: (shape[1], shape[0]) for name, shape in self.of.theirs(shapes, layer).items()}

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """Rows that are columns of the file's."""
        return self.of.read([TransposedTensor.of(tensor) for tensor in found], place)

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """Columns of what the other layout writes."""
        turned: dict[str, Shape] = {
            name: (shape[1], shape[0]) for name, shape in place.theirs.items()
        }
        inner = replace(place, layout=self.of, theirs=turned)
        return [transposed(tensor) for tensor in self.of.write(ours, inner)]


@dataclass(frozen=True)
class Plus(_OneToOne):
    """A vector that the file holds plus a number: GGUF's norms of Gemma, which hold 1 + weight."""

    number: float = 1.0

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """Less the number, in float32."""
        tensor = found[0]
        data = encode(tensor.to_float32() - np.float32(self.number), "F32")
        return [StoredTensor(tensor.name, tensor.shape, "F32", data, tensor.where)]

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """Plus the number, in the encoding that is asked for."""
        return [mapped(ours[0], lambda numbers: numbers + np.float32(self.number))]


@dataclass(frozen=True)
class HeadRows:
    """One vector of ours stored as a matrix with a row for each head."""

    name: str
    ours: tuple[str, ...]

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """(heads, d_head)."""
        assert layer is not None
        d_head = layer.attention.d_head
        return {self.name: (shapes[0][0] // d_head, d_head)}

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """The rows one after the other."""
        (shape,) = place.ours.values()
        return [replace(found[0], shape=shape)]

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """A row for each head."""
        (shape,) = place.theirs.values()
        return [ours[0]._replace(shape=shape)]


@dataclass(frozen=True)
class Numbered:
    """One tensor of ours stored as several, with a number `{n}` in their names.

    A vector in equal parts, as many as the layer's entry at `count` says (`attention.n_heads`);
    anything else along its first dimension (experts).
    """

    name: str
    ours: tuple[str, ...]
    count: str

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """One for each number."""
        number: Any = layer
        for part in self.count.split("."):
            number = getattr(number, part)
        shape = shapes[0]
        each = (shape[0] // number,) if len(shape) == 1 else shape[1:]
        return {self.name.replace("{n}", str(n)): each for n in range(number)}

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """One after the other, where they lie."""
        (shape,) = place.ours.values()
        return [JoinedTensor.of(found, shape)]

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """Equal parts; ours is held from the first of them to the last."""
        tensor, count = ours[0], len(place.theirs)
        held: list[NDArray[np.uint8]] = []

        def chunk(number: int) -> Iterator[NDArray[np.uint8]]:
            if not held:
                held.append(whole(tensor).reshape(count, -1))
            part = held[0][number]
            if number == count - 1:
                held.clear()
            yield part

        return [
            tensor._replace(shape=shape, chunks=chunk(number))
            for number, shape in enumerate(place.theirs.values())
        ]


@dataclass(frozen=True)
class KeysAndValues:
    """The matrix of latent attention that gives each head's keys and values, as two stacks.

    Keys are turned, so that they can be multiplied into queries (llama.cpp's deepseek2).
    """

    keys: str
    values: str
    ours: tuple[str, ...]

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """(heads, latent, d_key), (heads, d_value, latent)."""
        assert layer is not None
        attention = layer.attention
        assert attention.latent is not None
        heads, (_, width) = attention.n_heads, shapes[0]
        d_key = attention.d_head - attention.latent.d_rope
        return {
            self.keys: (heads, width, d_key),
            self.values: (heads, attention.latent.d_value, width),
        }

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """Keys' rows and values' in turn, head by head."""
        return [HeadsTensor.of(found[0], found[1])]

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """Two stacks, of one matrix that is held meanwhile."""
        heads, _, d_key = next(iter(place.theirs.values()))
        return list(in_heads(ours[0], heads, d_key))


@dataclass(frozen=True)
class Turned:
    """Stacks of experts stored (E, in, out), the columns of several of ours in turn (gpt-oss).

    Their biases (E, out) likewise.
    """

    name: str
    ours: tuple[str, ...]

    def theirs(self, shapes: Sequence[Shape], layer: LayerConfig | None) -> dict[str, Shape]:
        """(E, in, out of all), or (E, out of all)."""
        stack, n_out, *inner = shapes[0]
        return {self.name: (stack, *inner, n_out * len(shapes))}

    def read(self, found: Sequence[StoredTensor], place: Place) -> list[StoredTensor]:
        """Columns as rows."""
        shapes = list(place.ours.values())
        return [columns(found[0], shape, first, len(shapes)) for first, shape in enumerate(shapes)]

    def write(self, ours: Sequence[TensorToWrite], place: Place) -> list[TensorToWrite]:
        """Rows as columns."""
        ((name, shape),) = place.theirs.items()
        encodings = sorted({tensor.encoding for tensor in ours})
        if len(encodings) > 1 or block_size(encodings[0])[0] > 1:
            raise CheckpointError(
                f"{name} holds {', '.join(place.ours)} with rows for columns in one encoding of "
                f"plain numbers, not {' and '.join(encodings)}"
            )
        return [turned_stacks(ours, shape)]


def places(config: DecoderConfig, layouts: Iterable[Layout], where: str) -> list[Place]:
    """Where each layout applies, in the order of our parameters.

    Raises CheckpointError for a parameter that no layout has.
    """
    shapes = parameter_shapes(config)
    of_template: dict[str, list[Layout]] = {}
    # What holds several comes before what holds one: which applies depends on what there is.
    for layout in sorted(layouts, key=lambda layout: -len(layout.ours)):
        for template in layout.ours:
            of_template.setdefault(template, []).append(layout)
    found: list[Place] = []
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        template = template_of(name)
        number = name.split(".")[1] if template != name else ""
        layer = config.layers[int(number)] if number else None
        for layout in of_template.get(template, []):
            ours = [each.replace("{i}", number) for each in layout.ours]
            applies = not isinstance(layout, Together) or layout.applies(layer)
            if applies and all(each in shapes for each in ours):
                break
        else:
            raise CheckpointError(f"{where}: this family has no name for the parameter {name}")
        theirs = layout.theirs([shapes[each] for each in ours], layer)
        named = {each.replace("{i}", number): shape for each, shape in theirs.items()}
        found.append(Place(layout, {each: shapes[each] for each in ours}, named, layer))
        done.update(ours)
    return found


def name_of(layouts: Iterable[Layout], template: str) -> str | None:
    """The template of the one tensor that holds a parameter of ours, None where there is none."""
    for layout in layouts:
        if template in layout.ours and isinstance(layout, _OneToOne | _OneBelowOther):
            return layout.name
    return None


def read_tensors(
    config: DecoderConfig,
    layouts: Iterable[Layout],
    found: Mapping[str, StoredTensor],
    where: str,
    allow_missing: bool = False,
) -> dict[str, StoredTensor]:
    """The tensors of a file by our names.

    Raises CheckpointError when a parameter has no tensor (unless `allow_missing`), a tensor no
    parameter, or the shapes differ.
    """
    placed = places(config, layouts, where)
    expected = {name: shape for place in placed for name, shape in place.theirs.items()}
    check_fitting(expected, found, where, allow_missing)
    result: dict[str, StoredTensor] = {}
    for place in placed:
        if all(name in found for name in place.theirs):
            ours = place.layout.read([found[name] for name in place.theirs], place)
            for name, tensor in zip(place.ours, ours, strict=True):
                result[name] = tensor.renamed(name)
    return result


def write_tensors(
    config: DecoderConfig,
    layouts: Iterable[Layout],
    tensors: Iterable[TensorToWrite],
    where: str,
) -> list[TensorToWrite]:
    """The tensors of a file out of ours, which are all the configuration's parameters.

    In the order of ours, so that who makes these one after the other is asked for them so.
    Raises CheckpointError for a parameter that no layout has.
    """
    given = {tensor.name: tensor for tensor in tensors}
    number = {name: index for index, name in enumerate(given)}
    placed = places(config, layouts, where)
    result: list[TensorToWrite] = []
    for place in sorted(placed, key=lambda place: min(number[name] for name in place.ours)):
        theirs = place.layout.write([given[name] for name in place.ours], place)
        for (name, shape), tensor in zip(place.theirs.items(), theirs, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: shape {tensor.shape}, {shape} needed")
            result.append(tensor._replace(name=name))
    return result
