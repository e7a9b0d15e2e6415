"""A plan is what a run takes: measured on real steps and real ranks, and computed by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from armillary import Decoder
from armillary.errors import ConfigError
from armillary.training.checkpointing import checkpoint_layers
from armillary.training.memory import (
    ITEMS,
    MOMENTS,
    MemoryPlan,
    least_ranks,
    plan,
    sizes_of,
    to_fit,
)
from armillary.training.objective import Objective
from armillary.training.optimizer import build_optimizer
from armillary.training.parallel.ranks import start_ranks
from armillary.training.parallel.sharding import parallelise
from armillary.training.precision import Precision
from armillary.training.run_config import RunConfig
from armillary.training.setup import open_model
from support.ranks import on_ranks
from support.tensor_memory import TensorMemory

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"d_model": 40, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "d_head": 10, "d_ff": 24}
LARGER = {"d_model": 120, "n_layers": 4, "n_heads": 6, "n_kv_heads": 2, "d_head": 20, "d_ff": 320}


def run_of(uniform: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """A run of a uniform decoder in float32, one document a row; entries of sections replace."""
    made = {
        "out": "out",
        "model": {"uniform": uniform or TINY},
        "data": {"sources": ["text"], "vocab_size": 61, "length": 16, "mode": "cropped"},
        "train": {"steps": 1, "batch_size": 8, "precision": "float32"},
    }
    for name, changes in sections.items():
        made[name] = {**made.get(name, {}), **changes}
    return RunConfig.from_dict(made)


def planned(config: RunConfig, ranks: int = 1) -> MemoryPlan:
    return plan(config, open_model(config).decoder, ranks)


def bytes_of(made: MemoryPlan, item: str, name: str) -> dict[str, int]:
    (term,) = (t for t in made.terms if (t.item, t.name) == (item, name))
    return {moment: term.at(moment) for moment in MOMENTS if term.at(moment)}


# Against what is measured


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"recompute": True},
        {"micro_batch_size": 2},
        {"precision": "bfloat16"},
        {"precision": "bfloat16", "recompute": True, "micro_batch_size": 2},
        {"optimizer": "muon", "precision": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({}, {"length": 200, "vocab_size": 500}),
        ({"tie_head": True}, {"length": 200, "mode": "packed", "vocab_size": 3000}),
        ({}, {"length": 600, "mode": "packed", "vocab_size": 300}),
        # Weights outweigh activations.
        ({"d_model": 480, "d_ff": 1280}, {"length": 4, "vocab_size": 100}),
    ],
    ids=["short", "tied", "long", "wide"],
)
def test_the_peak_of_a_step_is_the_planned_one(model, data, train):
    config = run_of(LARGER | model, data=data, train={"batch_size": 4} | train)
    made = planned(config)
    measured = measured_step(config)
    assert measured["weights"] == at_rest(made, "weights")
    assert measured["optimiser"] == at_rest(made, "optimiser")
    assert measured["gradients"] == sum(
        term.update
        for term in made.terms
        if term.item == "gradients" and term.name in ("layers", "embedding and head")
    )
    # What a batch takes is there before the measurement begins.
    peak = made.peak - made.at("loss", "batch")
    assert peak == pytest.approx(measured["peak"], rel=0.1)


def at_rest(made: MemoryPlan, item: str) -> int:
    """What is there all the time."""
    return sum(min(term.at(m) for m in MOMENTS) for term in made.terms if term.item == item)


def measured_step(config: RunConfig) -> dict[str, int]:
    """Bytes of tensors over a second step, when the optimiser's state is there."""
    own = config.train
    objective = Objective(Decoder(open_model(config).decoder).train())
    if own.recompute:
        checkpoint_layers(objective.decoder)
    optimizer = build_optimizer(objective, config.optimizer())
    rows, length = own.micro_batch_size or own.batch_size, config.data.length
    tokens = torch.arange(rows * length).reshape(rows, length) % config.data.vocab_size
    documents = None
    if config.data.mode == "packed":
        documents = (torch.arange(length) // 9).expand(rows, length).contiguous()
    precision = Precision(own.precision)
    weights = sum(weight.untyped_storage().nbytes() for weight in objective.parameters())
    found = {"weights": weights}
    memory = TensorMemory()
    memory.know(objective.parameters())
    with memory:
        for _ in range(2):
            memory.peak = 0
            for _ in range(own.batch_size // rows):
                with precision.autocast():
                    loss = objective(tokens, tokens, documents)
                precision.backward(loss.total / 1000)
                del loss
            found["gradients"] = sum(p.grad.nbytes for p in objective.parameters())
            precision.step(optimizer, max_norm=1.0)
            found["peak"] = memory.peak + weights
    found["optimiser"] = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values()
    )
    return found


def local_bytes(uniform: dict[str, Any], parallel: dict[str, int], ranks: int) -> dict[str, int]:
    """On each rank of a group: what it holds after a step."""
    config = run_of(uniform, parallel=parallel)
    decoder = open_model(config).decoder
    with start_ranks(sizes_of(config, decoder, ranks)) as here:
        objective = Objective(Decoder(decoder).train())
        parallelise(objective, here)
        optimizer = build_optimizer(objective, config.optimizer())
        tokens = torch.arange(16).reshape(1, 16)
        objective(tokens, tokens).total.backward()
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return {
            "weights": sum(_local(p) for p in objective.parameters()),
            "gradients": sum(_local(p.grad) for p in objective.parameters()),
            "optimiser": sum(map(_local, states)),
        }


def _local(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


@pytest.mark.parametrize("parallel", [{"shard": 2}])
def test_a_rank_holds_the_planned_share(parallel):
    """61 rows of the vocabulary are 31 of the first rank and 30 of the second."""
    made = planned(run_of(TINY, parallel=parallel), 2)
    first, second = on_ranks(2, local_bytes, TINY, parallel, 2)
    for item in ("weights", "gradients", "optimiser"):
        ours = sum(
            term.update
            for term in made.terms
            if term.item == item and not term.name.endswith(("gathered", "summed"))
        )
        assert ours == first[item] >= second[item]


# By hand


def test_one_process_by_hand():
    """V 61, d 40, 6 heads of 10 on 2, f 24, N 2; 8 rows of 16 tokens, float32."""
    made = planned(run_of())
    layer = 40 * 60 * 2 + 40 * 20 * 2 + 3 * 40 * 24 + 2 * 40
    around = 2 * 61 * 40 + 40
    assert made.parameters == made.trained_parameters == 2 * layer + around
    always = dict.fromkeys(MOMENTS, 4 * 2 * layer)
    assert bytes_of(made, "weights", "layers") == always
    assert bytes_of(made, "gradients", "layers") == {
        "first_layer": 4 * 2 * layer,
        "update": 4 * 2 * layer,
    }
    # 18 tensors of layers and 3 others have a count of steps.
    assert made.at("loss", "optimiser") == 8 * (2 * layer + around) + 4 * (18 + 3)
    assert bytes_of(made, "logits", "logits of 128 tokens") == {"loss": 128 * 61 * (4 + 4)}
    assert bytes_of(made, "logits", "head's gradient") == {"loss": 61 * 40 * 4}
    assert made.at("loss", "batch") == 2 * 8 * 8 * 16
    assert made.tokens_per_step == 8 * 16
    # 2 × matrices + 4·h·d_h·n in 2 layers, at the 8th of 16 places; three times.
    matrices = 2 * (layer - 80) + 61 * 40
    assert made.flops_per_token == 3 * (2 * matrices + 2 * 4 * 60 * 8)


def test_sixteen_processes_by_hand():
    """Shard 2 × context 2 deal out rows of weights, tensor 2 heads and channels; 2 copies."""
    sizes = {"shard": 2, "context": 2, "tensor": 2, "replicate": 2}
    config = run_of(parallel=sizes, train={"batch_size": 8, "micro_batch_size": 1})
    made = planned(config, 16)
    assert least_ranks(config) == made.sizes.world == 16
    # Of each matrix half; then a quarter of its rows, rounded up: q 30, k and v 10, out 40,
    # gate and up 12, down 40 rows, two norms of 40.
    rows = 8 * 40 + 3 * 40 * 2 + 10 * 30 + 3 * 40 * 2 + 10 * 12 + 2 * 10
    assert bytes_of(made, "weights", "layers")["loss"] == 4 * 2 * rows
    assert bytes_of(made, "weights", "embedding and head")["loss"] == 4 * (2 * 16 * 40 + 10)
    whole = 30 * 40 + 2 * 10 * 40 + 40 * 30 + 3 * 12 * 40 + 2 * 40
    assert bytes_of(made, "weights", "two layers, gathered") == {
        "last_layer": 2 * 4 * whole,
        "first_layer": 2 * 4 * whole,
    }
    assert (made.rows, made.micro_batches, made.tokens_per_step) == (1, 2, 8 * 16)
    # Half of each row's tokens is computed here.
    assert bytes_of(made, "activations", "input of the final norm")["loss"] == 4 * 8 * 40
    # There are gradients from the micro-batch before.
    assert bytes_of(made, "gradients", "layers")["loss"] == 4 * 2 * rows


def test_seventy_billion_on_sixty_four():
    config = RunConfig.load(EXAMPLES / "llama-70b.yaml")
    memory = TensorMemory()
    with memory:
        made = planned(config, 64)
    assert memory.peak == 0  # nothing is built
    assert made.parameters == 70_553_706_496
    share = made.parameters / 64
    assert at_rest(made, "optimiser") == pytest.approx(8 * share, rel=1e-3)
    layers = 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert bytes_of(made, "weights", "two layers, gathered")["last_layer"] == pytest.approx(
        2 * layers, rel=1e-3
    )
    inputs = bytes_of(made, "activations", "inputs of layers")
    assert inputs["loss"] == 80 * 8192 * 8192 * 4
    assert made.flops_per_token == pytest.approx(8 * 70.5e9, rel=0.1)
    assert 40e9 < made.peak < 80e9
    alone = planned(config, 1)
    assert alone.peak > 16 * made.parameters


# What it counts


def test_items_are_those_of_all_terms_and_sum_to_the_peak():
    made = planned(run_of(train={"precision": "bfloat16"}))
    assert {term.item for term in made.terms} == set(ITEMS)
    assert made.peak == max(made.at(moment) for moment in MOMENTS)
    assert made.at(made.moment) == sum(made.at(made.moment, item) for item in ITEMS)


def test_frozen_weights_have_neither_gradients_nor_averages():
    full = run_of()
    decoder = open_model(full).decoder
    entries = full.to_dict() | {"lora": {"targets": ["layers.0.attention.q"], "rank": 3}}
    entries["model"] = {"checkpoint": "there"}
    entries["data"]["vocab_size"] = None
    made = plan(RunConfig.from_dict(entries), decoder, 1)
    adapter = 3 * 40 + 60 * 3
    assert made.trained_parameters == adapter
    assert made.parameters == planned(full).parameters + adapter
    assert made.at("update", "gradients") == 4 * adapter
    assert made.at("update", "optimiser") == 8 * adapter + 2 * 4
    assert made.at("loss", "logits") < planned(full).at("loss", "logits")
    assert made.flops_per_token == planned(full).flops_per_token * 2 / 3


def test_auto_precision_is_bfloat16():
    made = planned(run_of(train={"precision": "auto"}))
    assert made.precision == "bfloat16"
    assert made.terms == planned(run_of(train={"precision": "bfloat16"})).terms
    assert made.at("loss", "activations") < planned(run_of()).at("loss", "activations")


def test_muon_keeps_one_average_of_matrices():
    adamw, muon = planned(run_of()), planned(run_of(train={"optimizer": "muon"}))
    matrices = 2 * (2 * 40 * 60 + 2 * 40 * 20 + 3 * 40 * 24)
    saved = adamw.at("loss", "optimiser") - muon.at("loss", "optimiser")
    assert saved == 4 * matrices + 4 * 2 * 7  # and no count of steps


def test_sizes_that_do_not_divide_are_refused_with_the_numbers():
    config = run_of(parallel={"tensor": 4})
    with pytest.raises(ConfigError, match=r"tensor is 4, but layer 0 has n_heads 6"):
        planned(config, 4)
    with pytest.raises(ConfigError, match=r"8 rows a step do not divide by the 3"):
        planned(run_of(), 3)


# What would make it fit


def settings(config: RunConfig, ranks: int, memory: int) -> list[tuple[tuple[str, ...], int]]:
    decoder = open_model(config).decoder
    found = to_fit(config, decoder, ranks, memory)
    return [(change.settings, change.plan.peak) for change in found]


def test_every_change_that_is_enough_is_named_most_saving_first():
    config = run_of(LARGER, data={"length": 200}, train={"batch_size": 8})
    peak = planned(config).peak
    recomputed = planned(run_of(LARGER, data={"length": 200}, train={"recompute": True})).peak
    halved = planned(run_of(LARGER, data={"length": 200}, train={"micro_batch_size": 4})).peak
    assert recomputed < halved < peak
    assert settings(config, 1, peak - 1) == [
        (("train.recompute=true",), recomputed),
        (("train.micro_batch_size=4",), halved),
    ]
    # A smaller micro-batch only where it must be.
    between = settings(config, 1, halved - 1)
    assert [change for change, _ in between] == [
        ("train.micro_batch_size=2",),
        ("train.recompute=true",),
    ]


def test_changes_are_put_together_where_none_is_enough():
    config = run_of(LARGER, data={"length": 200}, train={"batch_size": 8})
    both = run_of(LARGER, data={"length": 200}, train={"recompute": True, "micro_batch_size": 1})
    least = planned(both).peak
    ((change, peak),) = settings(config, 1, least)
    assert set(change) == {"train.recompute=true", "train.micro_batch_size=1"}
    assert peak == least
    assert settings(config, 1, least - 1)[0][0][-1] in {f"--ranks {2**n}" for n in range(1, 7)}
    assert settings(config, 1, 1000) == []


def test_copies_and_tensor_parallelism_are_tried_too():
    config = run_of(
        LARGER | {"d_model": 480, "d_ff": 1280},
        train={"batch_size": 4, "micro_batch_size": 1, "recompute": True},
        parallel={"replicate": 4},
    )
    peak = planned(config, 4).peak
    found = dict(settings(config, 4, peak - 1))
    assert ("parallel.replicate=1",) in found
    assert found["parallel.replicate=1",] < peak
    assert ("parallel.tensor=2",) in dict(
        settings(
            run_of(LARGER, train={"micro_batch_size": 1, "recompute": True}),
            2,
            planned(run_of(LARGER, train={"micro_batch_size": 1, "recompute": True}), 2).peak - 1,
        )
    )
