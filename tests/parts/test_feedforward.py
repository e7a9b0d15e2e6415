import math

import pytest
import torch
from torch.testing import assert_close

from armillary.config import FeedForwardConfig, gated_width
from armillary.parts.feedforward import ACTIVATIONS, GLU, MLP, build_feedforward


def glu(d: int, d_ff: int, **options: object) -> GLU:
    module = build_feedforward(d, FeedForwardConfig(d_ff=d_ff, **options)).double()
    assert isinstance(module, GLU)
    return module


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(0.3 * noise)


def worked() -> GLU:
    module = glu(2, 2)
    module.gate.weight.data = torch.tensor([[1, -1], [0, 0]]).double().T
    module.up.weight.data = torch.tensor([[2, 1], [0, 1]]).double().T
    module.down.weight.data = torch.eye(2).double()
    return module


def test_the_worked_values() -> None:
    x = torch.tensor([1.0, 2.0]).double()
    module = worked()
    gates = ACTIVATIONS["silu"](module.gate(x))
    assert_close(gates, torch.tensor([0.731059, -0.268941]).double(), atol=5e-7, rtol=0)
    assert_close(module.up(x), torch.tensor([2.0, 3.0]).double())
    assert_close(module(x), torch.tensor([1.462117, -0.806824]).double(), atol=5e-7, rtol=0)


def test_a_gate_may_be_negative_or_exceed_one() -> None:
    gates = ACTIVATIONS["silu"](torch.tensor([-1.0, 3.0]))
    assert gates[0] < 0
    assert gates[1] > 1


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("silu", lambda z: z / (1 + math.exp(-z))),
        ("sigmoid", lambda z: 1 / (1 + math.exp(-z))),
        ("relu", lambda z: max(z, 0.0)),
        ("identity", lambda z: z),
        ("gelu", lambda z: z * 0.5 * (1 + math.erf(z / math.sqrt(2)))),
        (
            "gelu_tanh",
            lambda z: z * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        ),
    ],
)
def test_the_family_differs_by_the_gates_activation(name: str, formula: object) -> None:
    """GLU, Bilinear, ReGLU, GEGLU (both forms), SwiGLU."""
    module = glu(3, 5, activation=name)
    fill(module)
    x = torch.tensor([2.0, -1.5, 0.7]).double()
    gates = torch.tensor([formula(z) for z in module.gate(x).tolist()], dtype=torch.float64)
    expected = module.down.weight @ (gates * (module.up.weight @ x))
    assert_close(module(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_one_matrix_holds_the_gate_half_first(bias: bool) -> None:
    split, fused = glu(3, 5, bias=bias), glu(3, 5, bias=bias, fused=True)
    fill(split)
    fused.gate_up.weight.data = torch.cat([split.gate.weight, split.up.weight])
    fused.down.load_state_dict(split.down.state_dict())
    if bias:
        fused.gate_up.bias.data = torch.cat([split.gate.bias, split.up.bias])
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)).double()
    assert_close(fused(x), split(x), atol=1e-12, rtol=0)


def test_a_plain_mlp_has_two_matrices() -> None:
    module = build_feedforward(3, FeedForwardConfig(kind="mlp", d_ff=5, activation="relu"))
    assert isinstance(module, MLP)
    assert [name for name, _ in module.named_parameters()] == ["up.weight", "down.weight"]
    x = torch.randn(2, 3)
    assert_close(module(x), (x @ module.up.weight.T).clamp(min=0) @ module.down.weight.T)


def test_equal_budgets() -> None:
    """d = 8: a plain MLP with d_ff = 24 and a gated one with f = 16 both have 384 weights."""
    assert gated_width(24) == 16
    plain = build_feedforward(8, FeedForwardConfig(kind="mlp", d_ff=24))
    gated = build_feedforward(8, FeedForwardConfig(d_ff=16))
    for module in (plain, gated):
        assert sum(parameter.numel() for parameter in module.parameters()) == 384


def test_biases_are_where_they_are_asked_for() -> None:
    names = {name for name, _ in glu(3, 5, bias=True).named_parameters() if "bias" in name}
    assert names == {"gate.bias", "up.bias", "down.bias"}
    assert not [name for name, _ in glu(3, 5).named_parameters() if "bias" in name]


@pytest.mark.parametrize("kind", ["mlp", "glu"])
def test_each_vector_is_worked_on_alone(kind: str) -> None:
    module = build_feedforward(4, FeedForwardConfig(kind=kind, d_ff=7)).double()
    fill(module)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2)).double()
    assert_close(module(x)[1, 2], module(x[1, 2]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["mlp", "glu"])
def test_dropout_falls_on_the_inner_vector_in_training_only(kind: str) -> None:
    module = build_feedforward(4, FeedForwardConfig(kind=kind, d_ff=200, dropout=0.25)).double()
    module.down = torch.nn.Identity()
    x = torch.ones(4).double()
    whole = module.eval()(x)
    torch.manual_seed(0)
    dropped = module.train()(x)
    kept = dropped != 0
    assert_close(dropped[kept], (whole / 0.75)[kept])
    assert 0.15 < 1 - float(kept.double().mean()) < 0.35
