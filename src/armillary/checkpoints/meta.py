"""Meta's own directories of Llama: params.json, consolidated.NN.pth, tokenizer.model.

Large models are cut into files for as many processes; each matrix is joined along the dimension
that it was cut. Queries and keys are stored for interleaved rotation and brought to half_split.
Source: llama's and llama3's model.py; fairscale's parallel layers, for the dimensions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families.family import MAX_LAYERS
from armillary.checkpoints.layouts import Interleaved, Layout, Same, read_tensors
from armillary.checkpoints.parameters import template_of
from armillary.checkpoints.rotary_keys import check_frequencies
from armillary.checkpoints.tensors import StoredTensor
from armillary.checkpoints.torch_file import read_torch_file
from armillary.checkpoints.views import JoinedTensor
from armillary.config import DecoderConfig
from armillary.errors import CheckpointError, ConfigError
from armillary.files import read_json
from armillary.rope_scaling import Llama3
from armillary.strict_dict import StrictDict

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer

PARAMS = "params.json"
_WEIGHTS = "consolidated.{:02}.pth"
_FREQUENCIES = "rope.freqs"

_ROWS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
_COLUMNS = ("attention.wo", "feed_forward.w2")
_NORMS = ("attention_norm", "ffn_norm")
# Along which dimension a tensor was cut; None where every file has all of it.
_CUT: Mapping[str, int | None] = {
    **{f"layers.{{i}}.{name}.weight": 0 for name in _ROWS},
    **{f"layers.{{i}}.{name}.weight": 1 for name in _COLUMNS},
    **{f"layers.{{i}}.{name}.weight": None for name in _NORMS},
    "output.weight": 0,
    "norm.weight": None,
}
_EMBEDDING = "tok_embeddings.weight"
_LAYOUTS: tuple[Layout, ...] = (
    Same(_EMBEDDING, ("embedding.weight",)),
    *(
        of(f"layers.{{i}}.{theirs}.weight", (f"layers.{{i}}.{ours}.weight",))
        for of, ours, theirs in (
            (Same, "norm1", "attention_norm"),
            (Interleaved, "attention.q", "attention.wq"),
            (Interleaved, "attention.k", "attention.wk"),
            (Same, "attention.v", "attention.wv"),
            (Same, "attention.out", "attention.wo"),
            (Same, "norm2", "ffn_norm"),
            (Same, "feedforward.gate", "feed_forward.w1"),
            (Same, "feedforward.up", "feed_forward.w3"),
            (Same, "feedforward.down", "feed_forward.w2"),
        )
    ),
    Same("norm.weight", ("final_norm.weight",)),
    Same("output.weight", ("head.weight",)),
)
# params.json does not say these: the window by the generation, the rule that came with Llama 3.1.
_WINDOWS = ((1_000_000.0, 16_384), (500_000.0, 8192))
_SCALED = {"factor": 8.0, "original_window": 8192}
_SCALED_WINDOW = 131_072


def is_meta(directory: Path) -> bool:
    """Whether a directory is one of Meta's."""
    return (directory / PARAMS).is_file() and (directory / _WEIGHTS.format(0)).is_file()


def read_meta(
    directory: Path, *, ignore_keys: Iterable[str] = (), allow_missing: bool = False
) -> Checkpoint:
    """Read a directory. Raises CheckpointError and ConfigError for what cannot be honoured."""
    entries = StrictDict(read_json(directory / PARAMS), str(directory / PARAMS))
    entries.ignore(*ignore_keys)
    notices: list[str] = []
    found = _joined(directory, entries.take("dim", int))
    config = _config(entries, found, notices)
    entries.finish(
        remedy="a key without bearing on the model can be passed over: --ignore-key NAME"
    )
    _check_frequencies(found, config)
    tensors = read_tensors(config, _LAYOUTS, found, str(directory), allow_missing)
    tokenizer = _tokenizer(directory, config, notices)
    generation: dict[str, Any] = {}
    if tokenizer is not None:
        generation = {"eos_token_id": tokenizer.eos_ids}
        if tokenizer.bos_id is not None:
            generation["bos_token_id"] = tokenizer.bos_id
    return Checkpoint(config, tensors, tokenizer, generation, directory, "meta", notices, "llama")


def _config(
    entries: StrictDict, found: Mapping[str, StoredTensor], notices: list[str]
) -> DecoderConfig:
    d_model = entries.take("dim", int)
    n_layers = entries.take("n_layers", int)
    if not 1 <= n_layers <= MAX_LAYERS or d_model < 1:
        raise ConfigError(f"{entries.where}: dim {d_model} and n_layers {n_layers} make no decoder")
    n_heads = entries.take("n_heads", int)
    base = entries.take("rope_theta", float, 10_000.0)
    scaling = None
    if entries.take("use_scaled_rope", bool, False):
        factor = entries.take_optional("rope_scaling_factor", float)
        if factor is None:
            notices.append(
                "params.json does not say by how much the window is scaled; it is 8 in Llama 3.1; "
                'for Llama 3.2 (1B and 3B) add "rope_scaling_factor": 32'
            )
        scaling = Llama3(**(_SCALED | ({} if factor is None else {"factor": factor})))  # type: ignore[arg-type]
    vocab_size = entries.take("vocab_size", int, -1)
    if vocab_size < 1:  # what Llama 1 and 2 say, whose tokenizer has it
        vocab_size = found[_EMBEDDING].shape[0] if _EMBEDDING in found else 1
    return DecoderConfig.uniform(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=entries.take("n_kv_heads", int, n_heads),
        d_ff=_d_ff(entries, d_model),
        max_positions=_window(entries, base, scaling is not None, notices),
        rope_base=base,
        rope_scaling=scaling,
        eps=entries.take("norm_eps", float),
        tie_head="output.weight" not in found,
    )


def _d_ff(entries: StrictDict, d_model: int) -> int:
    """Two thirds of 4d, times the multiplier, rounded up to a multiple (llama's model.py)."""
    width = int(2 * 4 * d_model / 3)
    multiplier = entries.take_optional("ffn_dim_multiplier", float)
    if multiplier is not None:
        width = int(multiplier * width)
    multiple = entries.take("multiple_of", int, 256)
    if multiple < 1 or width < 1:
        raise ConfigError(f"{entries.where}: multiple_of is {multiple}; it must be at least 1")
    return -(-width // multiple) * multiple


def _window(entries: StrictDict, base: float, scaled: bool, notices: list[str]) -> int:
    said = entries.take_optional("max_seq_len", int)
    if said is not None:
        return said
    small = 4096 if entries.take("norm_eps", float) > 1e-6 else 2048  # Llama 2's and 1's epsilon
    window = _SCALED_WINDOW if scaled else next((w for b, w in _WINDOWS if base >= b), small)
    notices.append(
        f"params.json does not say the window; {window:,} is taken, as in the models with these "
        "settings; to say another add max_seq_len to it"
    )
    return window


def _joined(directory: Path, d_model: int) -> dict[str, StoredTensor]:
    """The tensors of all files, each joined along the dimension that it was cut."""
    present = sorted(path.name for path in directory.glob("consolidated.*.pth"))
    wanted = [_WEIGHTS.format(number) for number in range(len(present))]
    if present != wanted:
        raise CheckpointError(
            f"{directory}: has {', '.join(present[:3])} …, and not all up to {wanted[-1]}; fetch "
            "the others"
        )
    files = [read_torch_file(directory / name) for name in present]
    for name, file in zip(present, files, strict=True):
        differing = sorted(file.keys() ^ files[0].keys())
        if differing:
            raise CheckpointError(
                f"{directory / name}: tensor {differing[0]!r:.80} is in this file or in "
                f"{present[0]}, not in both"
            )
    return {name: _join(name, [file[name] for file in files], d_model) for name in files[0]}


def _join(name: str, parts: Sequence[StoredTensor], d_model: int) -> StoredTensor:
    first = parts[0]
    for part in parts:
        if (part.shape, part.encoding) != (first.shape, first.encoding):
            raise CheckpointError(
                f"{part.where}: {name} is {list(part.shape)} in {part.encoding} here and "
                f"{list(first.shape)} in {first.encoding} in {first.where}"
            )
    template = template_of(name)
    if len(parts) == 1:
        return first
    if template == _EMBEDDING:
        # Llama 3 cut the vocabulary, those before it the width, which params.json says.
        axis: int | None = 0 if first.shape[-1] == d_model else 1
    else:
        axis = _CUT.get(template)
    if axis is None:
        for part in parts[1:]:
            if not np.array_equal(part.data, first.data):
                raise CheckpointError(
                    f"{part.where}: {name} is not what it is in {first.where}; files of one model "
                    "have it in common"
                )
        return first
    if axis == 0:
        rows = first.shape[0] * len(parts)
        return JoinedTensor.of(parts, (rows, *first.shape[1:]))
    return _SideBySide.of(parts)


@dataclass(frozen=True, eq=False)
class _SideBySide(StoredTensor):
    """Matrices of as many rows that are one, each row in as many parts."""

    parts: tuple[StoredTensor, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[StoredTensor]) -> "_SideBySide":
        head = parts[0]
        shape = (head.shape[0], sum(part.shape[1] for part in parts))
        nothing = np.empty(0, dtype=np.uint8)
        return cls(head.name, shape, head.encoding, nothing, head.where, None, tuple(parts))

    def __post_init__(self) -> None:
        """Its bytes are its parts'."""

    @property
    def in_place(self) -> bool:
        """No: its rows are in several files."""
        return False

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        return np.concatenate([part._in_file(rows) for part in self.parts], axis=1)

    def release(self) -> None:
        """Give back the memory of the parts' pages."""
        for part in self.parts:
            part.release()


def _check_frequencies(found: dict[str, StoredTensor], config: DecoderConfig) -> None:
    """Drop the frequencies that files of Llama 1 and 2 carry, after holding them against these."""
    tensor = found.pop(_FREQUENCIES, None)
    rotary = config.layers[0].attention.rotary
    assert rotary is not None
    if tensor is not None:
        check_frequencies(tensor, rotary)


def _tokenizer(directory: Path, config: DecoderConfig, notices: list[str]) -> "Tokenizer | None":
    from armillary.tokenizer import Tokenizer

    if (directory / "tokenizer.json").is_file():
        return Tokenizer.from_file(directory / "tokenizer.json")
    if not (directory / "tokenizer.model").is_file():
        notices.append("there is no tokenizer.model; only token ids can be given")
        return None
    rotary = config.layers[0].attention.rotary
    newer = rotary is not None and isinstance(rotary.scaling, Llama3)
    return Tokenizer.from_meta(directory / "tokenizer.model", newer=newer)
