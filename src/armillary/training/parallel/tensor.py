"""Tensor parallelism: each process has some heads and some channels of every layer.

A plan says of each parameter how it is shared out (a DTensor placement) and what its gradient is
on one process. What computes sees plain tensors: attention and feed-forward run on this process's
share as if it were all, and the sum of what they give is taken over the group. Between them
activations are whole and the same everywhere.

Source: Shoeybi et al. 2019, §3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from armillary.config import DecoderConfig
from armillary.errors import ConfigError
from armillary.training.lora import LoraLinear
from armillary.training.objective import Objective
from armillary.training.parallel.config import shares_vocabulary
from armillary.training.parallel.vocabulary import share_vocabulary, spread, summed


@dataclass(frozen=True)
class Share:
    """How a parameter is shared out over the group, and what one process's gradient is of.

    `once`: used by the first process alone, since the group's results are summed.
    """

    placement: Placement
    gradient: Placement
    once: bool = False

    def local(self, parameter: DTensor) -> Tensor:
        """What this process computes with."""
        tensor = parameter.to_local(grad_placements=[self.gradient])
        return tensor * 0 if self.once and parameter.device_mesh.get_local_rank() else tensor


_OUTPUTS = Share(Shard(0), Shard(0))
_INPUTS = Share(Shard(1), Shard(1))
_WHOLE = Share(Replicate(), Replicate())
_WHOLE_ON_A_PART = Share(Replicate(), Partial())
_ONCE = Share(Replicate(), Partial(), once=True)

# Heads and channels of d_ff are rows of the first group and columns of the
# second. Of q_norm and k_norm every process sees its own heads.
PLAN = (
    ("layers.*.attention.[qkv].*", _OUTPUTS),
    ("layers.*.attention.sinks", _OUTPUTS),
    ("layers.*.attention.out.weight", _INPUTS),
    ("layers.*.attention.out.bias", _ONCE),
    ("layers.*.attention.[qk]_norm.*", _WHOLE_ON_A_PART),
    ("layers.*.feedforward.gate.*", _OUTPUTS),
    ("layers.*.feedforward.up.*", _OUTPUTS),
    ("layers.*.feedforward.down.weight", _INPUTS),
    ("layers.*.feedforward.down.bias", _ONCE),
    ("*", _WHOLE),
)


# Before it, where the vocabulary divides: its ids are rows.
VOCABULARY_PLAN = (
    ("embedding.weight", _OUTPUTS),
    ("head.*", _OUTPUTS),
)


def plan_of(config: DecoderConfig, tensor: int) -> tuple[tuple[str, Share], ...]:
    """Patterns over a decoder's parameters, for `tensor` processes; the first that fits counts."""
    return (*VOCABULARY_PLAN, *PLAN) if shares_vocabulary(config, tensor) else PLAN


def share_of(name: str, config: DecoderConfig, tensor: int) -> Share:
    """A parameter's place in the plan, by its name in the decoder."""
    plan = plan_of(config, tensor)
    return next(share for pattern, share in plan if fnmatchcase(name, pattern))


def split_tensors(objective: Objective, mesh: DeviceMesh) -> None:
    """Turn each parameter into a DTensor by the plan, in place, and let the parts use their shares.

    `mesh` is the group's, of one dimension; every process of it has the same weights before.
    Raises ConfigError for a decoder with adapters.
    """
    decoder = objective.decoder
    if any(isinstance(module, LoraLinear) for module in decoder.modules()):
        raise ConfigError(
            f"parallel.tensor is {mesh.size()}, but the decoder has adapters, which are not shared "
            "out by heads; set tensor to 1 (shard takes its place)"
        )
    places: dict[nn.Module, list[_Place]] = {}
    for path, module in decoder.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            share = share_of(f"{path}.{name}", decoder.config, mesh.size())
            split = distribute_tensor(parameter.data, mesh, [share.placement], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )
            places.setdefault(module, []).append(_Place(module, name, share))
    # A checkpointed layer runs its parts again, and not itself; so it is they that are hooked into.
    for layer in decoder.layers:
        for part in layer.children():
            _Shares(_within(part, places)).attach(part)
        for name in ("attention", "feedforward"):
            _sum_over(layer.get_submodule(name), mesh)
    if shares_vocabulary(decoder.config, mesh.size()):
        objective.share = share_vocabulary(decoder, mesh)
    # The loss reads the head's weights directly, so these are there for the whole pass.
    outside = [child for child in decoder.children() if child is not decoder.layers]
    _Shares([place for child in outside for place in _within(child, places)]).attach(objective)


@dataclass(frozen=True)
class _Place:
    """One parameter of one module."""

    module: nn.Module
    name: str
    share: Share


def _within(part: nn.Module, places: dict[nn.Module, list[_Place]]) -> list[_Place]:
    return [place for module in part.modules() for place in places.get(module, [])]


@dataclass
class _Shares:
    """While a module runs, its parameters are this process's plain tensors; then DTensors again."""

    places: Sequence[_Place]
    kept: list[nn.Parameter] = field(default_factory=list)

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before)
        # Computing a layer again ends in the middle, by an exception, when all is there again.
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, _module: nn.Module, _arguments: Any) -> None:
        for place in self.places:
            parameter = place.module._parameters[place.name]
            assert isinstance(parameter, DTensor)
            self.kept.append(parameter)
            place.module._parameters[place.name] = place.share.local(parameter)

    def _after(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        for place, parameter in zip(self.places, self.kept, strict=True):
            place.module._parameters[place.name] = parameter
        self.kept.clear()


def _sum_over(part: nn.Module, mesh: DeviceMesh) -> None:
    """Sum what a part gives over the group, and backward the gradients of what it was given."""

    def before(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return spread(arguments[0], mesh), *arguments[1:]

    def after(_module: nn.Module, _arguments: Any, result: Tensor) -> Tensor:
        return summed(result, mesh)

    part.register_forward_pre_hook(before)
    part.register_forward_hook(after)
