"""The tensors of a module and its optimiser by name, and whether those of a file fit them.

Names are an `Objective`'s: `decoder.` and our parameter name; `optimizer.state.`, that name and the
entry's. What optimises which parameter is recorded beside them, so that freezing, adapters and
another optimiser are noticed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.errors import CheckpointError
from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerUnion
from armillary.weights import ENCODINGS

_DECODER = "decoder."
_ENTRY = "optimizer.state.{name}.{key}"

# The optimiser's class and the names of its entries, for each parameter that trains.
Record = dict[str, dict[str, Any]]
Shape = tuple[int, ...]


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, once each, as the module holds them (DTensors too).

    Raises ValueError for what cannot be stored.
    """
    prefix = "" if isinstance(module, Objective) else _DECODER
    tensors: dict[str, Tensor] = {}
    known: set[int] = set()
    # Asked for as a state_dict, sharded modules first take back what they had gathered.
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in known:
            known.add(id(value))
            tensors[prefix + name] = _storable(prefix + name, value)
    return tensors


def optimizer_tensors(
    parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> tuple[Record, dict[str, Tensor]]:
    """Who optimises what, and the tensors of the state.

    Raises ValueError for a parameter that is not among `parameters`, or a state that cannot be
    stored.
    """
    record: Record = {}
    tensors = {}
    for name, parameter, kind, _ in _trained(parameters, optimizer):
        entries = optimizer.state.get(parameter, {})
        record[name] = {"kind": kind, "state": list(entries)}
        for key, value in entries.items():
            entry = _ENTRY.format(name=name, key=key)
            tensors[entry] = _storable(entry, value)
    return record, tensors


def check_module(
    where: str,
    parameters: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    record: Record,
) -> None:
    """Hold the tensors of a file against a module: every one is wanted, and fits.

    Raises CheckpointError in one line.
    """
    entries = {_ENTRY.format(name=n, key=key) for n, r in record.items() for key in r["state"]}
    saved = [name for name in shapes if name not in entries]
    _refuse(
        f"{where}: the decoder has tensors that were not saved",
        [name for name in parameters if name not in shapes],
        "resume with the model and the adapters of the saved run",
    )
    _refuse(
        f"{where}: tensors were saved that the decoder does not have",
        [name for name in saved if name not in parameters],
        "resume with the model and the adapters of the saved run",
    )
    _refuse(
        f"{where}: the optimizer's state is not complete",
        sorted(entries - set(shapes)),
        "take another checkpoint",
    )
    for name, parameter in parameters.items():
        for what, there, here in (
            ("shape", list(shapes[name]), list(parameter.shape)),
            ("type", _short(dtypes[name]), _short(parameter.dtype)),
        ):
            if there != here:
                raise CheckpointError(f"{where}: {name} has {what} {there}, the decoder's {here}")


def check_optimizer(
    where: str, parameters: Mapping[str, Tensor], optimizer: Optimizer, record: Record
) -> None:
    """Hold who optimised what against an optimiser. Raises CheckpointError in one line."""
    trained = {name: kind for name, _, kind, _ in _trained(parameters, optimizer)}
    _refuse(
        f"{where}: parameters train now that did not when it was saved",
        [name for name in trained if name not in record],
        "freeze what was frozen",
    )
    _refuse(
        f"{where}: parameters were trained that are frozen now",
        [name for name in record if name not in trained],
        "let train what trained",
    )
    _refuse(
        f"{where}: parameters were trained by another optimizer than now",
        [
            f"{n} ({record[n]['kind']}, now {k})"
            for n, k in trained.items()
            if record[n]["kind"] != k
        ],
        "choose the optimizer of the saved run",
    )


def new_entries(
    where: str,
    parameters: Mapping[str, Tensor],
    optimizer: Optimizer,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    record: Record,
) -> tuple[dict[Tensor, dict[str, Tensor]], dict[str, Tensor]]:
    """A state as the record says, unfilled: by parameter for the optimiser, by name for a reader.

    An entry is of its parameter's shape, and lies as that does, or a single number.
    Raises CheckpointError for any other.
    """
    state: dict[Tensor, dict[str, Tensor]] = {}
    by_name = {}
    for name, parameter, _, group in _trained(parameters, optimizer):
        entries: dict[str, Tensor] = {}
        for key in record[name]["state"]:
            entry = _ENTRY.format(name=name, key=key)
            if shapes[entry] == tuple(parameter.shape):
                entries[key] = torch.empty_like(parameter, dtype=dtypes[entry], requires_grad=False)
            elif shapes[entry] == ():
                # Torch counts steps on the device only where the kernel reads them there.
                counted_there = group.get("fused") or group.get("capturable")
                device = parameter.device if counted_there else torch.device("cpu")
                entries[key] = torch.empty((), dtype=dtypes[entry], device=device)
            else:
                raise CheckpointError(
                    f"{where}: {entry} has shape {list(shapes[entry])}, "
                    f"its parameter {list(parameter.shape)}"
                )
            by_name[entry] = entries[key]
        if entries:
            state[parameter] = entries
    return state, by_name


def _trained(
    parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> Iterator[tuple[str, Tensor, str, dict[str, Any]]]:
    """Name, parameter, class of the optimiser and group of every parameter that it has."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    members = optimizer.members if isinstance(optimizer, OptimizerUnion) else [optimizer]
    for member in members:
        for group in member.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {list(parameter.shape)} that the "
                        "module has not; build it after the module was sharded and moved"
                    )
                yield names[id(parameter)], parameter, type(member).__name__, group


def _storable(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in ENCODINGS:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {kind}; what is saved are tensors of floating-point numbers")
    return value


def _refuse(fault: str, names: list[str], remedy: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(f"{fault}: {names[0]:.200}{more}; {remedy}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
