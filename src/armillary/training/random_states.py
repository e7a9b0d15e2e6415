"""The states of all generators that a training step may draw from, as JSON and back.

Python's, NumPy's global one, torch's, and those of the accelerators of this process.
"""

import base64
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from armillary.errors import CheckpointError

_NUMPY_KEYS = 624


def random_states() -> dict[str, Any]:
    """The states as they are now: a JSON object. None of them moves."""
    version, internal, gauss = random.getstate()
    twister: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": [version, list(internal), gauss],
        "numpy": {
            "key": twister["state"]["key"].tolist(),
            "pos": int(twister["state"]["pos"]),
            "has_gauss": int(twister["has_gauss"]),
            "gauss": float(twister["gauss"]),
        },
        "torch": _encoded(torch.get_rng_state()),
        "accelerators": {name: _encoded(get()) for name, get, _ in _accelerators()},
    }


def restore_random_states(states: Mapping[str, Any], where: str) -> list[str]:
    """Bring every generator back to a state; return notices about those that have none.

    Raises CheckpointError, `where` in it, for what `random_states` would not have given.
    """
    notices = []
    try:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(_numpy_state(states["numpy"]))
        torch.set_rng_state(_decoded(states["torch"]))
        saved = dict(states["accelerators"])
        for name, _, set_state in _accelerators():
            if name in saved:
                set_state(_decoded(saved[name]))
            else:
                notices.append(f"{where}: has no random state of {name}; it is left as it is")
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{where}: holds no random states: {error}") from error
    return notices


def seed_random_states(seed: int, step: int) -> None:
    """Give every generator a state that is a function of seed and step."""
    words = np.random.SeedSequence([seed, step]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def _numpy_state(entries: Mapping[str, Any]) -> dict[str, Any]:
    key = np.array(entries["key"], dtype=np.uint32)
    # NumPy reads at this place without asking whether it is one.
    if key.shape != (_NUMPY_KEYS,) or not 0 <= int(entries["pos"]) <= _NUMPY_KEYS:
        raise ValueError(f"NumPy's has {key.size} words and stands at {entries['pos']}")
    return {
        "bit_generator": "MT19937",
        "state": {"key": key, "pos": int(entries["pos"])},
        "has_gauss": int(entries["has_gauss"]),
        "gauss": float(entries["gauss"]),
    }


def _accelerators() -> Iterator[
    tuple[str, Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]
]:
    """Name, reader and writer of the state of each accelerator that torch sees."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    module = torch.get_device_module(accelerator)
    if accelerator.type == "mps":
        # One device, and functions that take none.
        yield "mps", module.get_rng_state, module.set_rng_state
        return
    for index in range(torch.accelerator.device_count()):
        yield (
            f"{accelerator.type}:{index}",
            partial(module.get_rng_state, index),
            partial(module.set_rng_state, device=index),
        )


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
