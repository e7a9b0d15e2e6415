"""What is said of a family of models: its names, keys and conventions in each file format.

A family is data, read both ways. The readers and writers of the formats (huggingface.py, gguf.py,
gguf_write.py) know the formats and no family; nothing is guessed from shapes.

How a decoder is read. The family's `template` holds what no file says: kinds and places of norms,
the feed-forward's kind, offsets. It has the entries of a `DecoderConfig`, but one layer for all
under `layers`. On it come, in this order:

1. each `Key` of the format's table: an entry of the file, brought to our value by its `Form`, set
   at its paths (`d_model`, `layers.*.attention.n_heads`, …);
2. each `Derived`: what follows from other entries (a head's width, Gemma's embedding scale);
3. in GGUF, each flag of `present`: whether a tensor is there, which that format says no other way;
4. the `LayerTable`'s patches, one mapping a layer: where layers differ (windows, no rotation, a
   feed-forward of another kind);
5. the rotary settings, which rotary_keys.py reads by the table's `RotaryKeys`.

`DecoderConfig` then validates the whole. How it is written: each key takes the value at its first
path back through its form, the layer table and the rotary settings write theirs, and the result
is read again and compared. So a table need not say what it cannot express: whatever does not come
back is refused, by name.

Tensors are one to one (`tensors`), or share and split by a `Layout` (checkpoints/layouts.py), which
is also data: `Rows("…qkv_proj.weight", (q, k, v))`. A layout applies where its parameters are.

To add a family: a file with a `Family`, its line in `families/__init__.py`, its rows in
`tests/support/peer_families.py` (parity, round trip and mutations run over them).
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from armillary.checkpoints.layouts import Layout, Same
from armillary.config import DecoderConfig
from armillary.errors import ConfigError
from armillary.strict_dict import REQUIRED

MAX_LAYERS = 1000
_MAX_HEAD_WIDTH = 1 << 16
_EACH_LAYER = "layers.*."
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as Hugging Face's files call them."""

Entries = dict[str, Any]
Patch = Mapping[str, Any]
"""Paths within a layer → values. `attention.rotary` names the kind of layer under which the
rotary settings are said (`full_attention`), or is None for a layer that does not rotate."""


class Values(dict[str, Any]):
    """The entries of a file that were read so far, by their keys there.

    `where` names the file, for messages; `shapes` has the shapes of its tensors, where the format's
    reader knows them (GGUF).
    """

    def __init__(self, where: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        super().__init__()
        self.where = where
        self.shapes = shapes or {}


def head_width(d_model: int, n_heads: int, where: str) -> int:
    """The width of heads that are not said to have another: d_model / n_heads.

    Raises ConfigError where that does not divide, or is no width to make a table of.
    """
    if n_heads < 1 or d_model % n_heads:
        raise ConfigError(
            f"{where}: the head's width is not given, and d_model {d_model} is no multiple of "
            f"{n_heads} heads"
        )
    try:
        return _possible_width(d_model // n_heads)
    except ConfigError as error:
        raise ConfigError(f"{where}: d_model {d_model} of {n_heads} heads {error}") from error


def _possible_width(width: int) -> int:
    if not 1 <= width <= _MAX_HEAD_WIDTH:
        raise ConfigError(
            f"means a head of width {width}; it must be between 1 and {_MAX_HEAD_WIDTH}"
        )
    return width


@dataclass(frozen=True)
class Form:
    """How a value of ours is written in a file.

    `read` and `write` undo each other; `read` may raise ConfigError, which the reader completes
    with the file and the key. `write` returns None for what has no form there.
    """

    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


AS_IT_IS = Form()
WIDTH = Form(read=_possible_width)
"""A head's width; not one of which no table of frequencies should be made."""


def choice(names: Mapping[Any, Any]) -> Form:
    """The file's names for our values; of several for one, the first is written."""

    def read(name: Any) -> Any:
        if name not in names:
            raise ConfigError(f"{name!r} is not supported; supported: {', '.join(map(str, names))}")
        return names[name]

    def write(value: Any) -> Any:
        return next((name for name, ours in names.items() if ours == value), None)

    return Form(read, write)


def _inverse(of: Callable[[float], float], back: Callable[[float], float]) -> Form:
    """A function and its inverse; a whole number comes back as that, whatever rounding made."""

    def write(value: float | None) -> float | int | None:
        if value is None:
            return None
        try:
            exact = back(value)
            whole = round(exact)
        except OverflowError as error:
            raise ConfigError(f"the inverse of {value} is too large for a number") from error
        return whole if whole and of(whole) == value else exact

    def read(value: float) -> float:
        if value <= 0:
            raise ConfigError(f"{value} must be a positive number")
        return of(value)

    return Form(read, write)


RECIPROCAL = _inverse(lambda x: 1 / x, lambda x: 1 / x)
"""What a file divides by and we multiply by."""
INVERSE_ROOT = _inverse(lambda x: float(x) ** -0.5, lambda x: x**-2)
"""A scale of scores, of which a file has the width that it comes from."""

ACTIVATION = choice(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
        "sigmoid": "sigmoid",
    }
)
"""Hugging Face's names of activations."""


@dataclass(frozen=True)
class Key:
    """An entry of a file.

    name      its key there
    kind      its type, or several
    to        the paths that it sets; the first is what it is written from. None: values only
    default   what absence means to the format's own readers: a value, or what gives it from the
              entries read before; REQUIRED is an error
    form      how our value is written there
    loud      whether absence is worth a notice
    nullable  whether null says something (None) that absence does not
    elided    whether it is written as null where it says its default, which others give
    """

    name: str
    kind: type | tuple[type, ...]
    to: tuple[str, ...] = ()
    default: Any = REQUIRED
    form: Form = AS_IT_IS
    loud: bool = False
    nullable: bool = False
    elided: bool = False


@dataclass(frozen=True)
class Derived:
    """What follows from entries that were read, and is not written."""

    to: tuple[str, ...]
    of: Callable[[Values], Any]


@dataclass(frozen=True)
class LayerTable:
    """The entries of a file that tell layers apart, both ways.

    `read` takes the file's entries (a StrictDict; it must read all that it knows), the values and
    the count of layers, and gives a patch for each. `write` gives the entries.
    """

    read: Callable[[Any, Values, int], Sequence[Patch]]
    write: Callable[[DecoderConfig], Entries]


@dataclass(frozen=True)
class RotaryKeys:
    """Where a config.json says the rotary settings, beside `rope_scaling` and `rope_parameters`.

    default_base    what an absent base means, None where it must be there
    base, portion   the old schema's keys of the base and of the part of a head that rotates
    default_portion what an absent part means
    partial         whether a part of a head's channels may be rotated
    local_base      the old schema's key of the base of sliding layers, where it is theirs alone
    default_local   what its absence means
    window_beside   whether readers take the window before extension from beside `rope_scaling`
    """

    default_base: float | None = 10000.0
    base: str = "rope_theta"
    portion: str = "partial_rotary_factor"
    default_portion: float = 1.0
    partial: bool = False
    local_base: str | None = None
    default_local: float = 10000.0
    window_beside: bool = False


@dataclass(frozen=True)
class HuggingFaceTable:
    """A family in Hugging Face directories.

    architecture, model_type  its names in config.json
    keys, derived, layers     see above
    n_layers    the key of the count of layers
    rotary      None where nothing rotates
    fixed       keys that may be there as long as they say this
    ignored     keys without bearing on what is computed
    tensors     our parameter template → its, for those that are one to one
    layouts     the others
    passes_over_later_layers  whether tensors of layers after the last (DeepSeek's for predicting
                more than one token) are dropped
    redundant   templates of tensors that repeat what the configuration says; frequencies are held
                against it, all are dropped
    aliases     other names that files have for a tensor → its name in `tensors`
    prefix      what names begin with, but for the head's, unless none does: files of the model
                without its head
    """

    architecture: str
    model_type: str
    keys: tuple[Key, ...]
    tensors: Mapping[str, str]
    layouts: tuple[Layout, ...] = ()
    derived: tuple[Derived, ...] = ()
    layers: LayerTable | None = None
    n_layers: str = "num_hidden_layers"
    rotary: RotaryKeys | None = RotaryKeys()
    fixed: Mapping[str, object] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    redundant: tuple[str, ...] = ()
    passes_over_later_layers: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def all_layouts(self) -> tuple[Layout, ...]:
        """How each tensor of a directory holds ours."""
        return (*(Same(theirs, (ours,)) for ours, theirs in self.tensors.items()), *self.layouts)

    def key(self, path: str) -> str:
        """The name of the key that sets a path first; raises KeyError when none does."""
        for key in self.keys:
            if key.to and key.to[0] == path:
                return key.name
        raise KeyError(path)


@dataclass(frozen=True)
class GGUFTable:
    """A family in GGUF files; keys stand under the architecture's prefix.

    told_by     the key, not 0, that tells it from others of the same architecture
    present     our parameter template → the path that is true when the first layer has its tensor
    local_base  the base of rotation in sliding layers, where it is theirs alone
    rotates     whether anything does
    divisors    tensors of divisors of frequencies that llama.cpp reads in this architecture
    needs_head  whether it reads no file without a head of its own
    passed_over paths that files say and llama.cpp passes over
    yarn_scales_scores  whether YaRN's keys say the scale of scores too (`yarn_log_multiplier`)
    rounds_yarn whether the models round YaRN's bounds; llama.cpp always does
    tensors, layouts, fixed, ignored, keys, derived, layers  as in `HuggingFaceTable`
    """

    architecture: str
    keys: tuple[Key, ...]
    tensors: Mapping[str, str]
    layouts: tuple[Layout, ...] = ()
    derived: tuple[Derived, ...] = ()
    layers: LayerTable | None = None
    told_by: str | None = None
    present: Mapping[str, str] = field(default_factory=dict)
    rotates: bool = True
    local_base: float | None = None
    divisors: frozenset[str] = frozenset()
    needs_head: bool = False
    passed_over: tuple[str, ...] = ()
    yarn_scales_scores: bool = False
    rounds_yarn: bool = True
    fixed: Mapping[str, object] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def all_layouts(self) -> tuple[Layout, ...]:
        """How each tensor of a file holds ours."""
        return (*(Same(theirs, (ours,)) for ours, theirs in self.tensors.items()), *self.layouts)


@dataclass(frozen=True)
class Family:
    """A family: the conventions that no file says, and its tables.

    `gguf` is None for a family that llama.cpp does not have.
    """

    name: str
    template: Mapping[str, Any]
    huggingface: HuggingFaceTable
    gguf: GGUFTable | None = None


# --- Entries of a DecoderConfig by path ---------------------------------------------------------


def from_template(template: Mapping[str, Any], n_layers: int) -> Entries:
    """The entries of a decoder of so many layers, all alike."""
    entries = copy.deepcopy(dict(template))
    layer = entries["layers"]
    entries["layers"] = [copy.deepcopy(layer) for _ in range(n_layers)]
    return entries


def entries_of(config: DecoderConfig) -> Entries:
    """The entries of a decoder, with the scale of its scores also where it is the usual one."""
    entries: Entries = config.model_dump(mode="json")
    for layer, of in zip(entries["layers"], config.layers, strict=True):
        layer["attention"]["scale"] = of.attention.score_scale
    return entries


def put(decoder: Entries, paths: Iterable[str], value: Any) -> None:
    """Set paths. For `layers.*` a list has an entry for each layer.

    A part that is None in the decoder (no q/k norm) has no entries, and is passed over.
    """
    for path in paths:
        if not path.startswith(_EACH_LAYER):
            _put(decoder, path, value)
            continue
        layers = decoder["layers"]
        values = value if isinstance(value, list) else [value] * len(layers)
        for layer, own in zip(layers, values, strict=True):
            _put(layer, path.removeprefix(_EACH_LAYER), own)


def patch(layer: Entries, changes: Patch) -> None:
    """Set paths within a layer."""
    for path, value in changes.items():
        _put(layer, path, value)


def _put(entries: Entries, path: str, value: Any) -> None:
    *parts, last = path.split(".")
    part: Any = entries
    for name in parts:
        part = part.get(name)
        if part is None:
            return
    part[last] = copy.deepcopy(value)


def taken(decoder: Mapping[str, Any], path: str) -> list[Any]:
    """What stands at a path: one value, or for `layers.*` one of each layer that has it."""
    parts = path.split(".")
    found: list[Any] = [decoder]
    for name in parts:
        if name == "*":
            found = [each for some in found for each in some]
        else:
            found = [part[name] for part in found if part is not None and name in part]
    return found


def first(decoder: Mapping[str, Any], path: str) -> Any:
    """The first value at a path that is not None."""
    return next((value for value in taken(decoder, path) if value is not None), None)
