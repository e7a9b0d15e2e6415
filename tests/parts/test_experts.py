"""The mixture of experts: which are chosen, what they count, and that no other is computed."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from armillary import reference
from armillary.config import ConfigError, MixtureConfig, RouterConfig
from armillary.parts import experts
from armillary.parts.experts import MixtureOfExperts, Router, Routing
from support.models import MIXTURES, mixture

D = 40


def config_of(**entries: Any) -> MixtureConfig:
    router = RouterConfig(**entries.pop("router", {}))
    return MixtureConfig.model_validate(
        {**mixture(), "expert": MIXTURES["experts"].layers[0].feedforward.expert}
        | {"router": router}
        | entries
    )


def router_of(
    weight: Tensor, k: int = 2, dtype: torch.dtype = torch.float64, **entries: Any
) -> Router:
    """A router of which the logits are the input's coordinates in the rows of `weight`."""
    count, d = weight.shape
    made = Router(d, config_of(n_experts=count, top_k=k, router=entries)).to(dtype)
    made.weight.data = weight.to(dtype)
    return made


def logits_of(router: Router, *logits: float) -> Routing:
    """Route one token with these logits."""
    return router(torch.tensor([logits], dtype=router.weight.dtype))


def built(
    config: MixtureConfig, dtype: torch.dtype = torch.float64, seed: int = 0
) -> MixtureOfExperts:
    module = MixtureOfExperts(D, config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(0.3 * noise)
    return module


def inputs(*shape: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, D, generator=generator, dtype=torch.float64)


# Routing


@pytest.mark.parametrize(
    ("normalise", "expected"), [(False, [0.6439, 0.2369]), (True, [0.7311, 0.2689])]
)
def test_weights_are_probabilities_or_their_shares_and_never_logits(normalise, expected) -> None:
    """cases.md 86: logits [2, 1, 0, −1], two chosen."""
    router = router_of(torch.eye(4), normalise=normalise)
    routing = logits_of(router, 2.0, 1.0, 0.0, -1.0)
    assert routing.chosen.tolist() == [[0, 1]]
    assert_close(routing.weights[0], torch.tensor(expected).double(), atol=5e-5, rtol=0)
    if normalise:
        assert_close(routing.weights[0], torch.tensor([2.0, 1.0]).double().softmax(-1))


def test_the_softmax_is_taken_once() -> None:
    """cases.md 84: of logits [5, 0, …] over 8 experts; taken twice it would be 0.269."""
    routing = logits_of(router_of(torch.eye(8), normalise=False), 5.0, *[0.0] * 7)
    assert routing.scores[0, 0].item() == pytest.approx(0.9550, abs=5e-5)
    assert routing.scores[0].softmax(-1)[0].item() == pytest.approx(0.269, abs=5e-4)
    assert routing.weights[0, 0] == routing.scores[0, 0]


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_float32_where_bfloat16_would_make_ties(autocast: bool) -> None:
    """cases.md 88: 3.000 and 3.007 are one number in bfloat16, and the second is the larger.

    They are sums of numbers that bfloat16 holds, so that only the product can make them equal.
    """
    router = router_of(torch.tensor([[3.0, 0.0], [3.0, 0.007]]), k=1, dtype=torch.bfloat16)
    x = torch.tensor([[1.0, 1.0]]).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = router(x)
    assert routing.scores.dtype == routing.weights.dtype == torch.float32
    assert routing.chosen.tolist() == [[1]]
    assert F.linear(x, router.weight).diff().item() == 0.0


def test_of_equal_scores_the_lower_numbers_win() -> None:
    """With 64 experts, since sorting a few is stable by itself."""
    router = router_of(torch.eye(64), k=5)
    assert logits_of(router, *[1.0] * 64).chosen.tolist() == [[0, 1, 2, 3, 4]]
    tied = [0.0] * 64
    for place in (60, 9, 33, 21, 50, 47):
        tied[place] = 2.0
    assert logits_of(router, *tied).chosen.tolist() == [[9, 21, 33, 47, 50]]
    assert logits_of(router, 0.0, 0.0, 0.0, *[-0.0] * 61).chosen.tolist() == [[0, 1, 2, 3, 4]]


def test_sigmoid_scores_do_not_compete() -> None:
    routing = logits_of(router_of(torch.eye(3), score="sigmoid", normalise=False), 0.0, 2.0, 1.0)
    assert routing.chosen.tolist() == [[1, 2]]
    assert_close(routing.weights[0], torch.tensor([2.0, 1.0]).double().sigmoid())


def test_a_selection_bias_chooses_and_does_not_count() -> None:
    router = router_of(torch.eye(3), score="sigmoid", selection_bias=True, scale=2.5)
    assert router.selection_bias is not None
    assert not router.selection_bias.requires_grad
    router.selection_bias.data = torch.tensor([0.9, 0.0, 0.0]).double()
    routing = logits_of(router, -2.0, 2.0, 1.0)
    assert routing.chosen.tolist() == [[0, 1]]
    own = torch.tensor([-2.0, 2.0]).double().sigmoid()
    assert_close(routing.weights[0], 2.5 * own / own.sum())


def test_groups_go_by_the_sum_of_their_two_best() -> None:
    """The best expert stands in a group that is not taken."""
    router = router_of(torch.eye(6), score="sigmoid", n_groups=2, top_groups=1)
    assert logits_of(router, 3.0, -9.0, -9.0, 1.0, 0.5, 2.0).chosen.tolist() == [[5, 3]]
    assert logits_of(router, 3.0, 1.0, -9.0, 1.0, 0.5, -1.0).chosen.tolist() == [[0, 1]]
    tied = logits_of(router, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    assert tied.chosen.tolist() == [[0, 1]]


# Computing


@pytest.mark.parametrize("name", [name for name in MIXTURES if "experts" in name])
def test_it_is_the_plain_sum_and_so_are_its_gradients(name: str) -> None:
    """Against the specification, whose gradients are finite differences along a direction."""
    config = MIXTURES[name].layers[1].feedforward
    assert isinstance(config, MixtureConfig)
    module, x = built(config), inputs(2, 7)
    out = module(x)
    plain = MIXTURES[name].to_dict()["layers"][-1]["feedforward"]

    def specified(at: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        return reference.feed_forward(plain, {f"f.{key}": a for key, a in at.items()}, "f", x)

    here = {key: value.detach().numpy() for key, value in module.named_parameters()}
    np.testing.assert_allclose(out.detach().numpy(), specified(here, x.numpy()), atol=1e-12)

    along, step = inputs(2, 7, seed=8), 1e-6
    (out * along).sum().backward()
    generator = np.random.default_rng(3)
    way = {
        key: generator.standard_normal(p.shape) * p.requires_grad
        for key, p in module.named_parameters()
    }
    ahead, behind = (
        specified({key: here[key] + sign * step * way[key] for key in here}, x.numpy())
        for sign in (1, -1)
    )
    slope = float(((ahead - behind) / (2 * step) * along.numpy()).sum())
    ours = sum(
        float((p.grad * torch.from_numpy(way[key])).sum())
        for key, p in module.named_parameters()
        if p.grad is not None
    )
    assert ours == pytest.approx(slope, rel=1e-6)


def test_only_chosen_experts_are_multiplied() -> None:
    """Products are counted by their rows: k a token for each matrix, and none that is empty."""
    module, x = built(config_of(n_experts=16)), inputs(1, 3)
    rows = []

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append(len(x))
        return F.linear(x, weight, bias)

    with mock.patch.object(experts, "F", mock.Mock(linear=counting)):
        module(x)
    assert rows.pop(0) == 3  # the router's
    assert sum(rows) == 3 * 3 * 2
    assert min(rows) > 0
    assert len(rows) < 3 * 16


def test_experts_that_nothing_chose_may_be_nan_and_get_no_gradient() -> None:
    config = config_of(router={"bias": True})
    module = built(config)
    module.router.weight.data.zero_()
    module.router.bias.data = torch.tensor([0.0, 9.0, 0.0, 8.0, 0.0, 0.0]).double()
    for stack in (module.experts.gate, module.experts.up, module.experts.down):
        stack.weight.data[[0, 2, 4, 5]] = torch.nan
    out = module(inputs(2, 3))
    assert torch.isfinite(out).all()
    out.sum().backward()
    gradient = module.experts.up.weight.grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert not gradient[[0, 2, 4, 5]].any()
    assert gradient[1].any()


def test_no_tokens_are_no_error() -> None:
    assert built(config_of())(inputs(0, 4)).shape == (0, 4, D)


def test_a_token_gets_the_same_alone_and_in_company() -> None:
    module, x = built(config_of()), inputs(2, 9)
    together = module(x)
    alone = torch.stack([torch.stack([module(token) for token in row]) for row in x])
    assert_close(together, alone, atol=1e-12, rtol=0)


def test_the_sum_is_taken_in_float32_of_bfloat16_results() -> None:
    module = built(config_of(shared=None), torch.bfloat16)
    x = inputs(1, 50).bfloat16()
    out, exact = module(x), module.double()(x.double())
    assert out.dtype == torch.bfloat16
    error = (out.double() - exact).abs() / exact.abs().max()
    assert error.max() < 2**-7


def test_a_pass_is_the_same_bits_twice() -> None:
    module, x = built(config_of(top_k=5), torch.float32), inputs(4, 50).float()
    assert torch.equal(module(x), module(x))


def test_routing_is_kept_only_on_request() -> None:
    module, x = built(config_of()), inputs(2, 3)
    module(x)
    assert module.routing is None
    module.keeps_routing = True
    module(x)
    assert module.routing is not None
    assert module.routing.chosen.shape == (6, 2)
    assert module.routing.scores.requires_grad


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"top_k": 7}, "top_k 7 of 6 n_experts"),
        ({"router": {"n_groups": 4, "top_groups": 2}}, "6 do not make 4 equal groups"),
        ({"router": {"n_groups": 6, "top_groups": 2}}, "6 do not make 6 equal groups"),
        ({"router": {"n_groups": 3}, "top_k": 3}, "more than the 2 experts of 1 top_groups"),
        ({"shared_gate": True}, "no shared feed-forward to gate"),
        ({"router": {"n_groups": 1, "top_groups": 2}}, "top_groups 2 of 1 n_groups"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_configured(entries, told) -> None:
    with pytest.raises((ValueError, ConfigError), match=told):
        config_of(**entries)
