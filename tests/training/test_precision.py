"""Autocast over float32 weights, and float16 with its scaler."""

import pytest
import torch

from armillary.errors import ConfigError
from armillary.training.loss import next_token_labels, next_token_loss
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.precision import Precision
from support.models import build, config, layer, tokens


def loss_of(decoder, precision):
    ids = tokens(2, 9)
    with precision.autocast():
        loss = next_token_loss(decoder, decoder.hidden(ids), next_token_labels(ids))
    return loss.total / loss.count


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_weights_gradients_and_loss_stay_in_float32(compute):
    decoder = build(config(layer(attention={"qk_norm": config().layers[0].norm})), std=0.1).float()
    precision = Precision(compute)
    exact = loss_of(decoder, Precision())
    loss = loss_of(decoder, precision)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)
    assert torch.equal(loss, exact) == (compute == "float32")
    precision.backward(loss)
    assert {parameter.grad.dtype for parameter in decoder.parameters()} == {torch.float32}


def test_products_are_in_the_type():
    a = torch.ones(2, 2)
    for compute in ("float32", "bfloat16", "float16"):
        with Precision(compute).autocast():
            assert (a @ a).dtype == getattr(torch, compute)


def test_float16_always_has_its_scaler_and_nothing_else_has():
    """cases.md 95."""
    assert Precision("float16").scaler.is_enabled()
    assert not Precision("bfloat16").scaler.is_enabled()
    assert Precision().state_dict() == {}
    with pytest.raises(ConfigError, match="compute is 'fp16'"):
        Precision("fp16")


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_gradients_are_unscaled_before_they_are_clipped(compute):
    """cases.md 95: clipped while scaled by 65,536, a gradient of 5 would come out as 1/65,536."""
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision = Precision(compute)
    precision.backward((weight * torch.tensor([3.0, 4.0])).sum())
    norm = precision.step(optimizer, max_norm=1.0)
    assert norm.norm == pytest.approx(5.0)
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    assert weight.grad is None


def test_small_gradients_survive_float16():
    """2⁻²⁶ is nothing in float16, and a normal number when scaled."""
    assert float(torch.tensor(2.0**-26, dtype=torch.float16)) == 0
    weight = torch.zeros(1, requires_grad=True)
    precision = Precision("float16")
    precision.backward((weight.half() * 2.0**-13).float().sum() * 2.0**-13)
    precision.step(torch.optim.SGD([weight], lr=1.0))
    assert weight.tolist() == [-(2.0**-26)]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_in_a_narrow_type_learn_what_float32_learns(kind):
    lost = {}
    for compute in ("float32", "bfloat16", "float16"):
        decoder = build(config(layer()), std=0.1).float()
        precision = Precision(compute)
        optimizer = build_optimizer(decoder, OptimizerConfig(kind=kind, lr=0.01))
        losses = []
        for _ in range(8):
            loss = loss_of(decoder, precision)
            precision.backward(loss)
            assert precision.step(optimizer, max_norm=1.0).is_finite
            losses.append(loss.detach())
        lost[compute] = torch.stack(losses)
    assert lost["float32"][-1] < lost["float32"][0] - 0.5
    for compute in ("bfloat16", "float16"):
        torch.testing.assert_close(lost[compute], lost["float32"], rtol=0.02, atol=0)


@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(compute, kind):
    decoder = build(config(layer())).float()
    optimizer = build_optimizer(decoder, OptimizerConfig(kind=kind))
    precision = Precision(compute)
    before = [parameter.detach().clone() for parameter in decoder.parameters()]
    decoder.final_norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    precision.backward(loss_of(decoder, precision))
    assert not precision.step(optimizer, max_norm=1.0).is_finite
    assert all(map(torch.equal, before, decoder.parameters()))
    assert optimizer.state_dict()["state"] == {}
    if compute == "float16":
        assert precision.scaler.get_scale() == 2**15


def test_the_scale_is_saved_and_loaded():
    precision, other = Precision("float16"), Precision("float16")
    weight = torch.zeros(1, requires_grad=True)
    precision.backward(weight.sum() * float("inf"))
    precision.step(torch.optim.SGD([weight], lr=1.0))
    other.load_state_dict(precision.state_dict())
    assert other.scaler.get_scale() == precision.scaler.get_scale() == 2**15
