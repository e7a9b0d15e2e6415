"""What is said of a family of models: its names, keys and conventions in each file format.

A family is a table. The readers and writers of the formats (huggingface.py, gguf.py) work from
it; nothing is guessed from shapes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from armillary.config import DecoderConfig, FeedForwardConfig
from armillary.errors import ConfigError

MAX_LAYERS = 1000
_MAX_HEAD_WIDTH = 1 << 16


def head_width(given: int | None, d_model: int, n_heads: int, where: str) -> int:
    """The width of a head: as given, else d_model / n_heads, which must divide.

    Raises ConfigError, also for a width of which no table should be made.
    """
    if given is None and (n_heads < 1 or d_model % n_heads):
        raise ConfigError(
            f"{where}: the head's width is not given, and d_model {d_model} is no multiple of "
            f"{n_heads} heads"
        )
    width = d_model // n_heads if given is None else given
    if not 1 <= width <= _MAX_HEAD_WIDTH:
        raise ConfigError(
            f"{where}: a head of width {width}; it must be between 1 and {_MAX_HEAD_WIDTH}"
        )
    return width


@dataclass(frozen=True)
class Facts:
    """What a file says of a decoder, in our terms and before a family puts it together.

    `n_heads`, `n_kv_heads` and `d_ff` have an entry for each layer; `rotary` has the entries of a
    `RotaryConfig`. Nothing is validated before the `DecoderConfig` is made.
    """

    vocab_size: int
    d_model: int
    max_positions: int
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    d_head: int
    d_ff: tuple[int, ...]
    rotary: dict[str, Any] | None
    eps: float
    activation: str = "silu"
    tie_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0

    @classmethod
    def of(cls, config: DecoderConfig) -> "Facts":
        """Read the facts off a configuration, those that hold for all layers off the first.

        What they do not tell is lost; a writer puts the decoder together again and compares.
        """
        wide = [layer.feedforward for layer in config.layers]
        dense = [w for w in wide if isinstance(w, FeedForwardConfig)]
        if len(dense) < len(wide):
            raise ConfigError("the family cannot express a mixture of experts")
        first = config.layers[0]
        rotary = first.attention.rotary
        return cls(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            max_positions=config.max_positions,
            n_heads=tuple(layer.attention.n_heads for layer in config.layers),
            n_kv_heads=tuple(layer.attention.n_kv_heads for layer in config.layers),
            d_head=first.attention.d_head,
            d_ff=tuple(w.d_ff for w in dense),
            rotary=None if rotary is None else rotary.model_dump(mode="json"),
            eps=first.norm.eps,
            activation=dense[0].activation,
            tie_head=config.tie_head,
            qkv_bias=first.attention.qkv_bias,
            out_bias=first.attention.out_bias,
            mlp_bias=dense[0].bias,
            attention_dropout=first.attention.dropout,
        )


@dataclass(frozen=True)
class HuggingFaceTable:
    """A family in Hugging Face directories.

    keys       our name of a fact → its key in config.json
    defaults   our name of a fact → what an absent key means to transformers
    loud       the facts whose absence is worth a notice
    fixed      keys that may be there as long as they say this
    ignored    keys without bearing on what is computed
    tensors    our parameter template → its
    redundant  templates of tensors that repeat what the configuration says; they are dropped
    partial_rotation  whether a part of a head's channels may be rotated
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    loud: frozenset[str]
    fixed: Mapping[str, object]
    ignored: frozenset[str]
    tensors: Mapping[str, str]
    redundant: tuple[str, ...]
    partial_rotation: bool = False


@dataclass(frozen=True)
class GGUFTable:
    """A family in GGUF files.

    fixed        keys under the architecture's prefix that may be there as long as they say this
    ignored      keys under the prefix without bearing on what is computed
    tensors      our parameter template → its
    interleaved  our parameter templates whose rows are stored for interleaved rotation; they are
                 brought to half_split
    """

    architecture: str
    fixed: Mapping[str, object]
    ignored: frozenset[str]
    tensors: Mapping[str, str]
    interleaved: frozenset[str]


@dataclass(frozen=True)
class Family:
    """A family: how its facts make a decoder, and its tables.

    `decoder` gives the entries of a `DecoderConfig`, which validates them.
    """

    name: str
    decoder: Callable[[Facts], dict[str, Any]]
    huggingface: HuggingFaceTable
    gguf: GGUFTable
