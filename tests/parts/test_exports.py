"""`armillary.parts` offers its parts by name, and they can be put together without a decoder."""

import importlib
import inspect
import pkgutil

import torch

from armillary import parts
from armillary.rope_scaling import AnyRopeScaling


def test_every_part_and_every_rule_is_offered() -> None:
    """A class of a file in parts is left out only where it is that file's own affair."""
    internal = {"Block", "Step", "SavedCache", "SlotStore", "SlotVisibility"}
    files = [module.name for module in pkgutil.iter_modules(parts.__path__)]
    assert "attention" in files
    modules = [importlib.import_module(f"armillary.parts.{name}") for name in files]
    defined = {
        name
        for module in modules
        for name, entry in vars(module).items()
        if inspect.isclass(entry) and entry.__module__ == module.__name__
    }
    rules = {rule.__name__ for rule in AnyRopeScaling.__args__}
    assert len(rules) == 7
    assert defined | rules <= set(parts.__all__) | internal
    assert all(hasattr(parts, name) for name in parts.__all__)


def test_a_block_can_be_put_together_from_parts_alone() -> None:
    """Attention with a cache of its own, step by step, gives what it gives on the whole."""
    from armillary.parts import (
        Attention,
        AttentionConfig,
        LayerStore,
        RMSNorm,
        RotaryConfig,
        Visibility,
        YaRN,
        rotation,
    )

    turning = RotaryConfig(d_rotary=6, scaling=YaRN(factor=4.0, original_window=16))
    config = AttentionConfig(n_heads=6, n_kv_heads=2, d_head=10, rotary=turning)
    torch.manual_seed(0)
    norm, attention = RMSNorm(40).double(), Attention(40, config).double()
    x = torch.randn(2, 5, 40, dtype=torch.float64)

    def turn(*positions: int) -> parts.Rotation:
        return rotation(turning, torch.tensor(positions), dtype=x.dtype)

    whole = attention(norm(x), Visibility(5, 5), turn(0, 1, 2, 3, 4))
    store = LayerStore(capacity=5, window=None)
    with torch.no_grad():
        steps = [
            attention(norm(x[:, t : t + 1]), Visibility(1, t + 1), turn(t), store) for t in range(5)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-12)
