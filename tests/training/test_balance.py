"""What keeps experts equally busy: the loss's convention, where it acts, and biases that move."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from armillary.decoder import Decoder
from armillary.parts.experts import Routing
from armillary.training.balance import Balance, balance_loss
from armillary.training.checkpointing import checkpoint_layers
from armillary.training.loss import IGNORED
from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerConfig, build_optimizer, parameter_groups
from support import models

EXPERTS = 6


def routing(scores: Tensor, k: int) -> Routing:
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return Routing(chosen, scores.gather(-1, chosen), scores)


def decoder_of(dtype: torch.dtype = torch.float64, **entries: object) -> Decoder:
    layer = models.layer(feedforward=models.mixture(**entries))
    return models.build(models.config(layer, models.layer(), layer), dtype=dtype).train()


def labelled(
    decoder: Decoder, rows: int = 3, length: int = 11, seed: int = 4
) -> tuple[Tensor, Tensor]:
    ids = models.tokens(rows, length + 1, seed=seed)
    return ids[:, :-1], ids[:, 1:].clone()


# The loss


@pytest.mark.parametrize("k", [1, 2, 3])
def test_even_routing_is_one_whatever_k(k: int) -> None:
    """cases.md 85: the normalised convention; without it, k = 2 would say 2."""
    even = torch.full((EXPERTS, EXPERTS), 1 / EXPERTS)
    chosen = (torch.arange(EXPERTS)[:, None] + torch.arange(k)) % EXPERTS
    assert balance_loss(Routing(chosen, even[:, :k], even)).item() == pytest.approx(1.0)


def test_all_on_one_expert_is_the_number_of_experts() -> None:
    scores = torch.zeros(5, EXPERTS)
    scores[:, 2] = 1.0
    assert balance_loss(routing(scores, 1)).item() == pytest.approx(EXPERTS)


def test_it_is_the_formula_of_scores_as_they_are() -> None:
    """cases.md 84: another softmax of the scores would nearly level them."""
    scores = torch.tensor([[5.0, 0, 0, 0], [5.0, 1, 0, 0], [0, 0, 0, 3.0]]).double().softmax(-1)
    expected = 4 * (torch.tensor([3, 2, 0, 1]).double() / 6 * scores.mean(0)).sum()
    found = Routing(torch.tensor([[0, 1], [0, 1], [3, 0]]), scores[:, :2], scores)
    assert_close(balance_loss(found), expected)
    twice = Routing(found.chosen, found.weights, scores.softmax(-1))
    assert abs(balance_loss(twice) - expected) > 0.1


def test_sigmoid_scores_count_as_shares() -> None:
    scores = torch.tensor([[0.9, 0.3, 0.6]]).double()
    assert_close(balance_loss(routing(scores, 2)), 3 * (0.5 * scores[0, [0, 2]] / 1.8).sum())


def test_only_counted_tokens_count() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(7, EXPERTS, generator=generator)
    counted = torch.tensor([True, False, True, True, False, False, True])
    assert_close(
        balance_loss(routing(scores, 2), counted), balance_loss(routing(scores[counted], 2))
    )
    assert balance_loss(routing(scores, 2), torch.zeros(7, dtype=torch.bool)).item() == 0.0


# In training


def test_it_adds_to_the_loss_by_its_weight_and_is_told() -> None:
    """Of two layers with experts among three, the mean; of each token with a label."""
    decoder = decoder_of()
    ids, labels = labelled(decoder)
    labels[0, 3:] = IGNORED
    without = Objective(decoder)(ids, labels)
    with_it = Objective(decoder, balance_loss=0.3).train()(ids, labels)
    assert with_it.balance is not None
    assert_close(with_it.cross_entropy, without.cross_entropy)
    assert_close(with_it.total, without.total + 0.3 * with_it.balance)
    assert not with_it.balance.requires_grad

    watch = Balance(decoder)
    with watch.watched():
        decoder.hidden(ids)
    routings = [mixture.routing for mixture in watch.mixtures]
    assert len(routings) == 2
    each = [balance_loss(found, (labels != IGNORED).flatten()) for found in routings]
    assert_close(with_it.balance, without.count * torch.stack(each).mean())


def test_its_gradient_reaches_the_routers_only_through_scores() -> None:
    decoder = decoder_of()
    ids, labels = labelled(decoder)
    gradients = []
    for weight in (0.0, 0.3, 0.6):
        decoder.zero_grad()
        Objective(decoder, balance_loss=weight).train()(ids, labels).total.backward()
        gradients.append({n: p.grad.clone() for n, p in decoder.named_parameters()})
    none, once, twice = gradients
    router = "layers.2.feedforward.router.weight"
    assert (once[router] - none[router]).abs().max() > 1e-3
    for name in none:
        assert_close(twice[name] - none[name], 2 * (once[name] - none[name]), atol=1e-9, rtol=1e-9)
    last = "layers.2.feedforward.experts.down.weight"
    assert torch.equal(once[last], none[last])


def test_layers_that_are_computed_again_give_the_same_bits_and_keep_nothing() -> None:
    results = []
    for again in (False, True):
        decoder = decoder_of(torch.float32)
        checkpoint_layers(decoder, again)
        ids, labels = labelled(decoder)
        objective = Objective(decoder, balance_loss=0.1).train()
        loss = objective(ids, labels)
        loss.total.backward()
        assert objective.balance is not None
        assert all(mixture.routing is None for mixture in objective.balance.mixtures)
        results.append([loss.total, *(p.grad for p in decoder.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_evaluation_is_not_watched() -> None:
    decoder = decoder_of().eval()
    objective = Objective(decoder, balance_loss=0.1, balance_rate=0.1).eval()
    with torch.no_grad():
        loss = objective(*labelled(decoder))
    assert loss.balance is None
    assert torch.equal(loss.total, loss.cross_entropy)


def train(objective: Objective, steps: int, lr: float = 3e-3) -> list[float]:
    """The balance at each step on texts that are all alike, so that one expert is the easy way."""
    optimizer = build_optimizer(objective, OptimizerConfig(lr=lr, weight_decay=0.0))
    told = []
    for step in range(steps):
        ids, labels = labelled(objective.decoder, rows=4, length=24, seed=step)
        loss = objective(ids, labels)
        (loss.total / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert objective.balance is not None
        objective.balance.move_biases(lambda numbers: numbers)
        assert loss.balance is not None
        told.append(float(loss.balance / loss.count))
    return told


def test_the_loss_makes_the_load_even() -> None:
    """From routers that prefer two experts strongly; without the loss they go on to."""

    def preferring() -> Decoder:
        decoder = decoder_of(torch.float32, router={"bias": True})
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if name.endswith("router.bias"):
                    parameter.copy_(torch.tensor([3.0, 3.0, 0, 0, 0, 0]))
        return decoder

    left = train(Objective(preferring()).train(), 40, lr=1e-2)
    pressed = train(Objective(preferring(), balance_loss=1.0).train(), 40, lr=1e-2)
    assert left[0] == pressed[0] > 1.7
    assert pressed[-1] < 1.3
    assert left[-1] > 2.0


def test_biases_move_against_the_load_without_a_gradient() -> None:
    decoder = decoder_of(torch.float32, router={"selection_bias": True})
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("selection_bias"):
                parameter.copy_(torch.tensor([0.5, 0.5, 0, 0, 0, 0]))
    objective = Objective(decoder, balance_rate=0.02).train()
    assert objective.balance is not None

    def load() -> Tensor:
        with objective.balance.watched():
            decoder.hidden(labelled(decoder, rows=4, length=24)[0])
        found = objective.balance.mixtures[0].routing
        return found.chosen.flatten().bincount(minlength=EXPERTS)

    before = load()
    ids, labels = labelled(decoder)
    objective(ids, labels).total.backward()
    bias = objective.balance.mixtures[0].router.selection_bias
    assert bias is not None
    was = bias.clone()
    own = [float(n) for n in objective.balance._loads[0]]
    objective.balance.move_biases(lambda numbers: numbers)
    mean = sum(own) / EXPERTS
    signs = [(mean > n) - (mean < n) for n in own]
    assert_close(bias - was, 0.02 * torch.tensor(signs, dtype=torch.float32))
    train(objective, 40, lr=1e-5)
    after = load()
    assert before.max() > 2 * before.float().mean()
    assert after.max() < 0.7 * before.max()


def test_the_loads_of_all_micro_batches_and_processes_move_a_bias_once() -> None:
    decoder = decoder_of(router={"selection_bias": True})
    objective = Objective(decoder, balance_rate=0.1).train()
    assert objective.balance is not None
    for seed in (1, 2):
        objective(*labelled(decoder, seed=seed))
    asked = []

    def total(numbers: list[float]) -> list[float]:
        asked.append(sum(numbers))
        return [0.0, 9.0, 9.0, 9.0, 9.0, 9.0]

    bias = objective.balance.mixtures[0].router.selection_bias
    assert bias is not None
    before = bias.clone()
    objective.balance.move_biases(total)
    assert asked == [2 * 3 * 11 * 2.0] * 2
    assert_close(bias - before, torch.tensor([0.1] + [-0.1] * 5).double())
    objective.balance.move_biases(total)  # of a step that computed nothing
    assert len(asked) == 2


def test_selection_biases_never_train_and_stacks_go_to_adamw() -> None:
    decoder = decoder_of(router={"selection_bias": True})
    groups = {
        group["name"]: [name for name, _ in group["params"]]
        for group in parameter_groups(decoder, OptimizerConfig(kind="muon"))
    }
    assert not any("selection_bias" in name for names in groups.values() for name in names)
    assert "layers.0.feedforward.experts.up.weight" in groups["decay"]
    assert "layers.0.feedforward.router.weight" in groups["muon"]
