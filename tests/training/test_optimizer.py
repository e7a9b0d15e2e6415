"""Groups, the two optimisers behind one call, clipping."""

import copy
import math

import pytest
import torch
from torch.optim import AdamW, Muon

from armillary.errors import ConfigError, UserError
from armillary.training.optimizer import (
    OptimizerConfig,
    OptimizerUnion,
    build_optimizer,
    clip_gradients,
    parameter_groups,
)
from support.models import build, config, layer, tokens

WITH_EVERYTHING = config(
    layer(attention={"rotary": None, "qkv_bias": True}), position_table="learned", head_bias=True
)


def names(groups):
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def test_matrices_decay_and_vectors_do_not():
    decoder = build(WITH_EVERYTHING)
    groups = parameter_groups(decoder, OptimizerConfig(weight_decay=0.2))
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    found = names(groups)
    assert found["decay"] == [
        "embedding.weight",
        "position_table.weight",
        *[f"layers.0.attention.{part}.weight" for part in ("q", "k", "v", "out")],
        *[f"layers.0.feedforward.{part}.weight" for part in ("gate", "up", "down")],
        "head.weight",
    ]
    assert found["no_decay"] == [
        "layers.0.norm1.weight",
        *[f"layers.0.attention.{part}.bias" for part in ("q", "k", "v")],
        "layers.0.norm2.weight",
        "final_norm.weight",
        "head.bias",
    ]


def test_embeddings_can_be_left_out_of_decay():
    found = names(parameter_groups(build(WITH_EVERYTHING), OptimizerConfig(decay_embeddings=False)))
    assert "head.weight" in found["decay"]
    assert found["no_decay"][:2] == ["embedding.weight", "position_table.weight"]


def test_muon_takes_the_layers_matrices_alone():
    found = names(parameter_groups(build(WITH_EVERYTHING), OptimizerConfig(kind="muon")))
    assert len(found["muon"]) == 7
    assert all(name.startswith("layers.0.") for name in found["muon"])
    assert found["decay"] == ["embedding.weight", "position_table.weight", "head.weight"]


def test_a_tied_matrix_and_frozen_ones_come_once_and_never():
    decoder = build(config(layer(), tie_head=True))
    decoder.layers[0].attention.requires_grad_(False)
    found = names(parameter_groups(decoder, OptimizerConfig()))
    together = [name for members in found.values() for name in members]
    assert together.count("embedding.weight") == 1
    assert not [name for name in together if "attention" in name]
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter trains"):
        build_optimizer(decoder, OptimizerConfig())


def give_gradients(decoder, seed=1):
    """A gradient of the decoder's own kind, the same for decoders with the same weights."""
    decoder.zero_grad()
    decoder(tokens(2, 5, seed)).square().mean().backward()


def test_adamw_is_adamw():
    """Two steps after Loshchilov and Hutter 2019, algorithm 2, on a matrix and on a norm."""
    decoder = build(config())
    settings = OptimizerConfig(lr=0.01, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3)
    optimizer = build_optimizer(decoder, settings)
    assert isinstance(optimizer, AdamW)
    chosen = {"layers.1.attention.k.weight": 0.3, "final_norm.weight": 0.0}
    expected = {name: decoder.get_parameter(name).detach().clone() for name in chosen}
    m = dict.fromkeys(chosen, 0.0)
    v = dict.fromkeys(chosen, 0.0)
    for step in (1, 2):
        give_gradients(decoder, step)
        for name, decay in chosen.items():
            gradient = decoder.get_parameter(name).grad
            m[name] = 0.8 * m[name] + 0.2 * gradient
            v[name] = 0.9 * v[name] + 0.1 * gradient**2
            update = m[name] / (1 - 0.8**step) / ((v[name] / (1 - 0.9**step)).sqrt() + 1e-3)
            expected[name] = expected[name] * (1 - 0.01 * decay) - 0.01 * update
        optimizer.step()
    for name, value in expected.items():
        torch.testing.assert_close(decoder.get_parameter(name).detach(), value)


def test_muon_updates_are_orthogonal_and_as_large_as_adamws():
    """Liu et al. 2025, §2.2: 0.2·√max(m, n) times a matrix whose singular values are near 1.

    torch's coefficients bring them into 0.7 … 1.2 and compute in bfloat16.
    """
    decoder = build(config(), dtype=torch.float32)
    settings = OptimizerConfig(kind="muon", lr=0.5, muon_lr=0.01, weight_decay=0.0, momentum=0.0)
    optimizer = build_optimizer(decoder, settings)
    weight = decoder.layers[0].attention.out.weight
    head = decoder.head.weight
    before = weight.detach().clone(), head.detach().clone()
    generator = torch.Generator().manual_seed(2)
    for parameter in (weight, head):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    rows, columns = weight.shape
    change = (before[0] - weight.detach()) / (0.01 * 0.2 * max(rows, columns) ** 0.5)
    values = torch.linalg.svdvals(change)
    assert values.min() > 0.4
    assert 0.9 < values.max() < 1.3
    # AdamW's first step is lr times the sign of the gradient.
    torch.testing.assert_close((before[1] - head.detach()).abs().max(), torch.tensor(0.5))


def trained(decoder, optimizer, seeds):
    for seed in seeds:
        give_gradients(decoder, seed)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in decoder.parameters()])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_saved_and_loaded_state_goes_on_with_the_same_bits(kind):
    decoder, settings = build(config(), dtype=torch.float32), OptimizerConfig(kind=kind)
    optimizer = build_optimizer(decoder, settings)
    trained(decoder, optimizer, [1, 2])
    other = copy.deepcopy(decoder)
    fresh = build_optimizer(other, settings)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(trained(other, fresh, [3, 4]), trained(decoder, optimizer, [3, 4]))
    forgetful = build_optimizer(copy.deepcopy(decoder), settings)
    assert forgetful.state_dict()["state"] == {}
    assert "layers.0.attention.q.weight" in optimizer.state_dict()["param_groups"][0]["param_names"]


def test_a_unions_rates_reach_its_members_before_and_after_loading():
    decoder = build(config(), dtype=torch.float32)
    optimizer = build_optimizer(decoder, OptimizerConfig(kind="muon", weight_decay=0.0))
    assert isinstance(optimizer, OptimizerUnion)
    assert [type(member) for member in optimizer.members] == [Muon, AdamW]
    trained(decoder, optimizer, [1])
    for _ in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = trained(decoder, optimizer, [])
        assert torch.equal(trained(decoder, optimizer, [2]), before)
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        assert not torch.equal(trained(decoder, optimizer, [3]), before)
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_bfloat16_weights_stop_moving_and_are_refused():
    """cases.md 93: 1 − 1.9e-3 rounds back to 1, so a thousand steps of 1e-3 leave it there."""
    weight = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        weight -= 1e-3
    assert float(weight) == 1.0
    decoder = build(config(layer()), dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"embedding.weight and \d+ more .* bfloat16.*float32"):
        build_optimizer(decoder, OptimizerConfig())
    with pytest.warns(UserWarning, match="bfloat16"):
        build_optimizer(decoder, OptimizerConfig(low_precision="warn"))
    # Frozen ones may be narrow: nothing is added to them.
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    decoder.final_norm.float().requires_grad_(True)
    build_optimizer(decoder, OptimizerConfig())


def with_gradients(*values):
    parameters = [torch.zeros(len(value), requires_grad=True) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_clipping_is_by_the_norm_of_all_gradients_and_reports_it():
    parameters = with_gradients([3.0, 0.0], [4.0])
    parameters.append(torch.zeros(2, requires_grad=True))
    found = clip_gradients(parameters, 1.0)
    assert found.norm == pytest.approx(5.0)
    assert found.scale == pytest.approx(0.2)
    assert found.is_finite
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.0])
    assert parameters[1].grad.tolist() == pytest.approx([0.8])


@pytest.mark.parametrize("max_norm", [5.1, None])
def test_short_gradients_and_those_only_measured_stay_as_they_are(max_norm):
    parameters = with_gradients([3.0], [4.0])
    assert clip_gradients(parameters, max_norm).norm == pytest.approx(5.0)
    assert [float(p.grad) for p in parameters] == [3.0, 4.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_are_found_and_left(value):
    parameters = with_gradients([3.0, value], [4.0])
    assert not clip_gradients(parameters, 1.0).is_finite
    assert float(parameters[1].grad) == 4.0


def test_no_gradients_have_the_norm_zero():
    assert clip_gradients([torch.zeros(2, requires_grad=True)], 1.0).norm == 0.0


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ValueError, match="max_norm is 0"):
        clip_gradients([], 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "adam"}, "kind is 'adam' (did you mean 'adamw'?); known are adamw, muon"),
        ({"lr": 0.0}, "lr is 0.0; it must be a number above 0"),
        ({"lr": "3e-4"}, "lr is '3e-4'; it must be a number above 0"),
        ({"lr": math.nan}, "lr is nan; it must be a number above 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be a number at least 0"),
        ({"beta2": 1.0}, "beta2 is 1.0; it must be a number at least 0 and below 1"),
        ({"decay_embeddings": 1}, "decay_embeddings is 1; it must be true or false"),
        ({"muon_lr": True}, "muon_lr is True; it must be a number above 0"),
        ({"low_precision": "no"}, "low_precision is 'no'; known are refuse, warn"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**settings)
    assert str(caught.value) == message
