"""Low-rank adapters: y = x·Wᵀ + (α/r)·dropout(x)·Aᵀ·Bᵀ with W frozen (Hu et al. 2021, §4.1).

An adapted projection keeps the names of its weight and bias and gains `lora_a` (r, in) and
`lora_b` (out, r). A is drawn, B is 0, so that training begins where the model stands.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from armillary.checkpoints.safetensors import read_safetensors, write_safetensors
from armillary.checkpoints.tensors import StoredTensor, TensorToWrite
from armillary.decoder import Decoder
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.files import read_json, verify_manifest, write_directory_atomically, write_json
from armillary.strict_dict import StrictDict, nearest
from armillary.training.checks import check_number, check_whole
from armillary.weights import ENCODINGS, read

CONFIG = "adapter.json"
TENSORS = "adapter.safetensors"
_FORMAT = "armillary-lora"
_VERSION = 1


@dataclass(frozen=True)
class LoraConfig:
    """Which projections get adapters, and of what kind.

    targets   patterns over projections' names, with * for anything (dots too) and ? for one
              letter: "layers.*.attention.q", "layers.*.feedforward.*", "layers.0.*"
    rank      r, the inner width
    alpha     α; an adapter is added α/r times
    dropout   probability with which an adapter's inputs are dropped in training

    Raises ConfigError naming the setting, its value and what is right.
    """

    targets: tuple[str, ...] = ("layers.*.attention.*", "layers.*.feedforward.*")
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not all(isinstance(t, str) for t in self.targets):
            raise ConfigError(f"targets is {self.targets!r}; it must be a list of patterns")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets:
            raise ConfigError("targets is empty; name the projections that get adapters")
        check_whole("rank", self.rank, 1)
        check_number("alpha", self.alpha, 0.0, above=True)
        check_number("dropout", self.dropout, 0.0, 1.0, below=True)


class LoraLinear(nn.Linear):
    """A projection whose own weight and bias are frozen, with an adapter beside it.

    Shapes: x (..., in) → (..., out). The weight and bias are those of `base`, not copies; the
    adapter is in float32 at least, so that it can train beside a frozen weight in bfloat16.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        # On the meta device nothing is allocated or drawn for what `base` has already.
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.weight, self.bias = base.weight, base.bias
        self.config = config
        self.scale = config.alpha / config.rank
        self.dropout = nn.Dropout(config.dropout)
        self.train(base.training)
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        weight = base.weight
        self.lora_a = nn.Parameter(weight.new_empty(config.rank, base.in_features, dtype=wide))
        self.lora_b = nn.Parameter(weight.new_zeros(base.out_features, config.rank, dtype=wide))
        bound = base.in_features**-0.5
        nn.init.uniform_(self.lora_a, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) → (..., out)."""
        low = F.linear(self.dropout(x), self.lora_a.to(x.dtype))
        return super().forward(x) + F.linear(low, self.lora_b.to(x.dtype)) * self.scale

    @torch.no_grad()
    def without_adapter(self, merged: bool) -> nn.Linear:
        """A plain projection: with the adapter in its weight, rounded once, or without it."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.bias, plain.weight = self.bias, self.weight
        plain.train(self.training)
        if merged:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            change = self.scale * (self.lora_b.to(wide) @ self.lora_a.to(wide))
            total = (self.weight.to(wide) + change).to(self.weight.dtype)
            plain.weight = nn.Parameter(total, requires_grad=self.weight.requires_grad)
        return plain


def add_lora(decoder: Decoder, config: LoraConfig) -> list[str]:
    """Give the projections that the patterns match adapters, and freeze all else.

    Returns their names. Build the optimiser afterwards: only the adapters' parameters train.
    Raises UserError for a pattern that matches nothing, naming the nearest, and for a decoder
    that has adapters.
    """
    _refuse_adapted(decoder)
    projections = _projections(decoder)
    chosen = _matching(list(projections), config.targets)
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    for name in chosen:
        decoder.set_submodule(name, LoraLinear(projections[name], config))
    return chosen


def _projections(decoder: Decoder) -> dict[str, nn.Linear]:
    return {name: m for name, m in decoder.named_modules() if isinstance(m, nn.Linear)}


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    chosen = set()
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern.removesuffix(".weight"))]
        if not found:
            # Numbers tell layers apart, not kinds of projection.
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            hint = nearest(pattern, [*kinds, *names])
            raise UserError(
                f"targets: {pattern!r} matches no projection{hint}; there are {', '.join(kinds)}"
            )
        chosen.update(found)
    return [name for name in names if name in chosen]


def _adapted(decoder: Decoder) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in decoder.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def _refuse_adapted(decoder: Decoder) -> None:
    if any(_adapted(decoder)):
        raise UserError("the decoder has adapters already; merge or remove them first")


def _of(decoder: Decoder) -> dict[str, LoraLinear]:
    adapted = dict(_adapted(decoder))
    if not adapted:
        raise UserError("the decoder has no adapters; add_lora or load_lora gives it some")
    return adapted


def merge_lora(decoder: Decoder) -> Callable[[], None]:
    """Put the adapters into the weights, so that the decoder is a plain one; give the way back.

    The sum is taken in float32 at least and rounded once to the weight's type. Calling what is
    returned puts adapters and weights back, the same objects with the same bits; dropping it
    frees them. Weights stay frozen.
    Raises UserError when there are no adapters.
    """
    adapted = _of(decoder)
    for name, module in adapted.items():
        decoder.set_submodule(name, module.without_adapter(merged=True))

    def unmerge() -> None:
        for name, module in adapted.items():
            module.train(decoder.training)
            decoder.set_submodule(name, module)

    return unmerge


def remove_lora(decoder: Decoder) -> None:
    """Take the adapters off and leave the weights that they were added to, frozen as they were.

    Raises UserError when there are no adapters.
    """
    for name, module in _of(decoder).items():
        decoder.set_submodule(name, module.without_adapter(merged=False))


def save_lora(directory: Path, decoder: Decoder) -> None:
    """Write the adapters alone, atomically: adapter.json, adapter.safetensors and a manifest.

    Tensors go by our names: layers.0.attention.q.lora_a.
    Raises UserError when there are no adapters or the directory cannot be written.
    """
    adapted = _of(decoder)
    config = next(iter(adapted.values())).config
    tensors = [
        TensorToWrite(
            f"{name}.{part}", ENCODINGS[parameter.dtype], tuple(parameter.shape), _bytes(parameter)
        )
        for name, module in adapted.items()
        for part, parameter in (("lora_a", module.lora_a), ("lora_b", module.lora_b))
    ]
    with write_directory_atomically(directory) as partial:
        entries = asdict(config) | {"targets": list(config.targets)}
        write_json(partial / CONFIG, {"format": _FORMAT, "format_version": _VERSION} | entries)
        write_safetensors(partial / TENSORS, tensors)


def _bytes(parameter: Tensor) -> Iterator[NDArray[np.uint8]]:
    data = parameter.detach().cpu().contiguous()
    yield data.reshape(-1).view(torch.uint8).numpy()


def load_lora(directory: Path, decoder: Decoder) -> LoraConfig:
    """Give a decoder the adapters that `save_lora` wrote, as `add_lora` would make them.

    Every tensor of the file fills one adapter and every adapter is filled.
    Raises CheckpointError for a directory that is damaged or does not fit the decoder, UserError
    for a decoder that has adapters.
    """
    _refuse_adapted(decoder)
    verify_manifest(directory)
    config = _read_config(directory / CONFIG)
    tensors = read_safetensors(directory / TENSORS)
    _check_fit(tensors, _wanted(decoder, config, directory / CONFIG), directory / TENSORS)
    add_lora(decoder, config)
    for name, module in _adapted(decoder):
        for part, parameter in (("lora_a", module.lora_a), ("lora_b", module.lora_b)):
            parameter.data = read(tensors[f"{name}.{part}"], parameter.dtype, parameter.device)
    return config


def _wanted(decoder: Decoder, config: LoraConfig, path: Path) -> dict[str, tuple[int, int]]:
    """The shapes of the adapters that a decoder would be given."""
    projections = _projections(decoder)
    try:
        chosen = _matching(list(projections), config.targets)
    except UserError as error:
        raise CheckpointError(f"{path}: {error}") from error
    shapes = {}
    for name in chosen:
        shapes[f"{name}.lora_a"] = (config.rank, projections[name].in_features)
        shapes[f"{name}.lora_b"] = (projections[name].out_features, config.rank)
    return shapes


def _check_fit(
    tensors: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, int]], path: Path
) -> None:
    differing = sorted(set(wanted) ^ set(tensors))
    if differing:
        fault = "is missing" if differing[0] in wanted else "has no place in this decoder"
        raise CheckpointError(f"{path}: {differing[0]} {fault}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tensors[name].shape}, the decoder needs {shape}"
            )


def _read_config(path: Path) -> LoraConfig:
    entries = StrictDict(read_json(path), str(path))
    if entries.take("format", str) != _FORMAT or entries.take("format_version", int) != _VERSION:
        raise CheckpointError(f"{path}: is no adapter of armillary, version {_VERSION}")
    targets = tuple(entries.take_list("targets", str))
    rank = entries.take("rank", int)
    alpha, dropout = entries.take("alpha", float), entries.take("dropout", float)
    entries.finish()
    try:
        return LoraConfig(targets, rank, alpha, dropout)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
