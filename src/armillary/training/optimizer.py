"""Parameter groups, AdamW and Muon behind one `build_optimizer`, and clipping.

Both optimisers are torch's own. What is settled here is which parameter goes to which and which
of them decay.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from armillary.errors import UserError
from armillary.training.checks import check_choice, check_flag, check_number

# The names of a decoder's tables of vectors; the head is a product and no table.
_TABLES = ("embedding.weight", "position_table.weight")


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimiser, and its settings.

    kind              adamw; or muon for the layers' matrices and adamw for all else, stacks of
                      experts among them
    lr                learning rate at the schedule's top
    weight_decay      decoupled, on matrices only: norms and biases never decay
    decay_embeddings  whether the embedding and a learned position table count as matrices. GPT-3's
                      recipe and most libraries say yes; OLMo 2 (2024, §3.2) says no, for stability
    beta1, beta2      adamw's averages of gradients and of their squares
    eps               adamw's addition to the denominator
    momentum          muon's average of gradients (Nesterov)
    muon_lr           learning rate of the matrices under muon; None takes lr, which fits since
                      updates are scaled to adamw's usual size (Liu et al. 2025, §2.2)
    low_precision     refuse or warn about parameters in bfloat16 or float16, in which an update
                      of less than 1/256 (1/2048) of a weight rounds to nothing

    Raises ConfigError naming the setting, its value and what is right.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    decay_embeddings: bool = True
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    muon_lr: float | None = None
    low_precision: Literal["refuse", "warn"] = "refuse"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("adamw", "muon"))
        check_number("lr", self.lr, 0.0, above=True)
        check_number("weight_decay", self.weight_decay, 0.0)
        check_flag("decay_embeddings", self.decay_embeddings)
        for name in ("beta1", "beta2", "momentum"):
            check_number(name, getattr(self, name), 0.0, 1.0, below=True)
        check_number("eps", self.eps, 0.0, above=True)
        if self.muon_lr is not None:
            check_number("muon_lr", self.muon_lr, 0.0, above=True)
        check_choice("low_precision", self.low_precision, ("refuse", "warn"))


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The parameters that train, once each, in groups as torch's optimisers take them.

    Each has `name` (muon, decay or no_decay), `params` as (name, parameter), `lr`, `initial_lr`
    for the schedule and `weight_decay`. Groups without parameters are left out.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {"muon": [], "decay": [], "no_decay": []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            members[_group_of(name, parameter, config)].append((name, parameter))
    lr_of = {"muon": config.lr if config.muon_lr is None else config.muon_lr}
    return [
        {
            "name": group,
            "params": named,
            "lr": lr_of.get(group, config.lr),
            "initial_lr": lr_of.get(group, config.lr),
            "weight_decay": 0.0 if group == "no_decay" else config.weight_decay,
        }
        for group, named in members.items()
        if named
    ]


def _group_of(name: str, parameter: Tensor, config: OptimizerConfig) -> str:
    if parameter.dim() < 2:
        return "no_decay"
    if name.endswith(_TABLES):
        return "decay" if config.decay_embeddings else "no_decay"
    hidden = "layers." in name and parameter.dim() == 2
    return "muon" if config.kind == "muon" and hidden else "decay"


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimiser for all parameters that train.

    Build it after parameters were moved, frozen or given adapters.
    Raises UserError when nothing trains, or (unless they are to be warned about) for parameters
    in a type too narrow to train in.
    """
    groups = parameter_groups(module, config)
    if not groups:
        raise UserError("no parameter trains: every one has requires_grad false")
    _check_precision(groups, config)
    matrices = [group for group in groups if group["name"] == "muon"]
    others = [group for group in groups if group["name"] != "muon"]
    members: list[Optimizer] = []
    if matrices:
        members.append(Muon(matrices, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
    if others:
        devices = {parameter.device.type for group in others for _, parameter in group["params"]}
        members.append(
            AdamW(
                others,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                # One pass over each parameter instead of a dozen.
                fused=devices <= {"cpu", "cuda"},
            )
        )
    return members[0] if len(members) == 1 else OptimizerUnion(members)


def _check_precision(groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
    narrow = [
        (name, parameter.dtype)
        for group in groups
        for name, parameter in group["params"]
        if torch.finfo(parameter.dtype).bits < 32
    ]
    if not narrow:
        return
    name, dtype = narrow[0]
    text = (
        f"{name} and {len(narrow) - 1} more parameters are {str(dtype).removeprefix('torch.')}, "
        "in which small updates round to nothing; hold them in float32 and compute under "
        "autocast (decoder.float(), see armillary.training.precision)"
    )
    if config.low_precision == "refuse":
        raise UserError(f"{text}, or set low_precision to 'warn'")
    warnings.warn(text, stacklevel=3)


class OptimizerUnion(Optimizer):
    """Several optimisers of different parameters, used, saved and loaded as one.

    Groups and state are shared with the members, so that a change through either is seen by both.
    """

    def __init__(self, members: Iterable[Optimizer]) -> None:
        self.members = list(members)
        groups = [group for member in self.members for group in member.param_groups]
        for group in groups:
            # As they were given: the constructor wants names with their parameters.
            if "param_names" in group:
                named = zip(group.pop("param_names"), group["params"], strict=True)
                group["params"] = list(named)
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        start = 0
        for member in self.members:
            stop = start + len(member.param_groups)
            member.param_groups = self.param_groups[start:stop]
            self.state.update(member.state)
            member.state = self.state
            start = stop

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each member."""
        if closure is not None:
            raise TypeError("a closure is not taken; compute the gradients before the step")
        for member in self.members:
            member.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, into the members too."""
        super().load_state_dict(state_dict)
        for member in self.members:
            member.state.clear()
        self._share()


@dataclass(frozen=True)
class GradientNorm:
    """The norm of all gradients together, before clipping; `scale` is what they were scaled by."""

    norm: float
    scale: float

    @property
    def is_finite(self) -> bool:
        """Whether every gradient is a number; otherwise the step is better skipped."""
        return math.isfinite(self.norm)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None = None) -> GradientNorm:
    """Scale all gradients so that together they are no longer than `max_norm`, in place.

    The norm is Euclidean, over all gradients as one vector (Pascanu et al. 2013, §3.2). With
    None it is only measured. Gradients that are not finite are left as they are and reported.
    Raises ValueError for a `max_norm` that is not above 0.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0, or None not to clip")
    gradients = list(_gradients(parameters))
    norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
    scale = 1.0
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        scale = max_norm / norm
        torch._foreach_mul_(gradients, scale)
    return GradientNorm(norm, scale)


def _gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad
