"""A plan is what a run takes: measured on real steps and real ranks, and computed by hand."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from armillary import Decoder
from armillary.errors import ConfigError
from armillary.training.memory import (
    ITEMS,
    MOMENTS,
    MemoryPlan,
    least_ranks,
    plan,
    to_fit,
)
from armillary.training.objective import Objective
from armillary.training.optimizer import build_optimizer
from armillary.training.parallel.ranks import Ranks, start_ranks
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


SHORT = {"length": 200, "vocab_size": 500}
TIED = {"length": 200, "mode": "packed", "vocab_size": 3000}
LONG = {"length": 600, "mode": "packed", "vocab_size": 300}
FEW = {"length": 4, "vocab_size": 100}  # weights outweigh activations
NARROW = {"precision": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "data", "train"),
    [
        ({}, SHORT, {}),
        ({}, SHORT, {"recompute": True}),
        ({}, SHORT, NARROW | {"recompute": True, "micro_batch_size": 2}),
        ({"tie_head": True}, TIED, {"micro_batch_size": 2}),
        ({"tie_head": True}, TIED, NARROW),
        ({}, LONG, {"batch_size": 1}),
        ({}, LONG, NARROW | {"recompute": True, "batch_size": 1}),
        ({"d_model": 480, "d_ff": 1280}, FEW, {}),
        ({"d_model": 480, "d_ff": 1280}, FEW, NARROW | {"optimizer": "muon"}),
        ({"d_model": 480, "d_ff": 1280}, FEW, NARROW | {"recompute": True}),
    ],
    ids=str,
)
def test_a_step_takes_what_is_planned(model, data, train):
    config = run_of(LARGER | model, data=data, train={"batch_size": 4} | train)
    assert_as_planned(planned(config), measured_step(config))


def assert_as_planned(made: MemoryPlan, measured: dict[str, int]) -> None:
    """To the byte what stays; the peak to a tenth, without the batch, which is there before."""
    for item in ("weights", "gradients", "optimiser"):
        assert lasting(made, item) == measured[item], item
    peak = made.peak - made.at(made.moment, "batch")
    assert peak == pytest.approx(measured["peak"], rel=0.1)


def lasting(made: MemoryPlan, item: str) -> int:
    """Without what is there for a while."""
    parts = ("layers", "embedding and head", "averages, layers", "averages, embedding and head")
    return sum(term.update for term in made.terms if term.item == item and term.name in parts)


def measured_step(config: RunConfig, ranks: Ranks | None = None, **options: Any) -> dict[str, int]:
    """Bytes of tensors over the second step or a later one, when the optimiser's state is there.

    Ranks let go of what they sent when the other one has it, so that a step holds more now and then
    and never less: the least peak is the step's own.
    """
    own, here, precision = config.train, ranks or Ranks.single(), Precision(config.train.precision)
    objective = Objective(Decoder(open_model(config).decoder).train())
    options = {"compute": precision.dtype, "checkpoint": own.recompute} | options
    parallelise(objective, here, **options)
    optimizer = build_optimizer(objective, config.optimizer())
    share, length = own.batch_size // here.data_ranks, config.data.length
    rows = own.micro_batch_size or share
    tokens = torch.arange(rows * length).reshape(rows, length) % config.data.vocab_size
    documents = None
    if config.data.mode == "packed":
        documents = (torch.arange(length) // 9).expand(rows, length).contiguous()
    weights = _bytes(objective.parameters())
    found = {"weights": weights}
    memory = TensorMemory(objective.parameters())
    peaks = []
    with memory:
        for _ in range(2 if ranks is None else 6):
            memory.peak = 0
            for _ in range(share // rows):
                with precision.autocast():
                    loss = objective(tokens, tokens, documents)
                precision.backward(loss.total / 1000)
                del loss
            found["gradients"] = _bytes(p.grad for p in objective.parameters())
            precision.step(optimizer, max_norm=1.0)
            peaks.append(memory.peak + weights)
    found["peak"] = min(peaks[1:])
    states = optimizer.state.values()
    found["optimiser"] = _bytes(value for state in states for value in state.values())
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this process's part of each."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


SHARED = [
    ({"shard": 2}, {}),
    ({"shard": 2}, NARROW),
    ({"shard": 2}, NARROW | {"recompute": True, "micro_batch_size": 1}),
    ({"tensor": 2}, NARROW),
    ({"context": 2}, {}),
]


def shared_run(number: int) -> RunConfig:
    parallel, train = SHARED[number]
    # Tensor parallel processes share a vocabulary that divides.
    data = {"vocab_size": 1000 if "tensor" in parallel else 61}
    return run_of(LARGER, parallel=parallel, data=data, train={"batch_size": 4} | train)


def on_a_rank() -> dict[str, Any]:
    """Every case in one start of the processes, which takes long."""
    found: dict[str, Any] = {}
    for number in range(len(SHARED)):
        config = shared_run(number)
        with start_ranks(config.sizes(open_model(config).decoder, 2)) as ranks:
            found[str(number)] = measured_step(config, ranks)
            if number == 1:
                found["with copies"] = measured_step(config, ranks, compute=None)
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return on_ranks(2, on_a_rank)


@pytest.mark.parametrize("number", range(len(SHARED)), ids=lambda number: str(SHARED[number]))
def test_a_rank_takes_what_is_planned(number, two_ranks):
    """61 rows of the vocabulary are 31 of the first rank and 30 of the second."""
    first, second = (found[str(number)] for found in two_ranks)
    assert_as_planned(planned(shared_run(number), 2), first)
    assert second["weights"] <= first["weights"]


def test_layers_gathered_in_float32_would_take_more(two_ranks):
    """Otherwise the test above would not see copies of all layers in the type of products."""
    made, (first, _) = planned(shared_run(1), 2), two_ranks
    copies = 2 * 0.9 * (made.parameters - 2 * 61 * 120)
    assert first["with copies"]["peak"] > first["1"]["peak"] + copies


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
    # Twice as they are sent, and the head's from the beginning.
    assert bytes_of(made, "gradients", "embedding and head, to be summed") == {
        "last_layer": 4 * 61 * 40,
        "first_layer": 4 * 61 * 40,
        "update": 2 * 4 * (2 * 61 * 40 + 40),
    }
    assert (made.rows, made.micro_batches, made.tokens_per_step) == (1, 2, 8 * 16)
    # Half of each row's tokens is computed here.
    assert bytes_of(made, "activations", "input of the final norm")["loss"] == 4 * 8 * 40
    # There are gradients from the micro-batch before.
    assert bytes_of(made, "gradients", "layers")["loss"] == 4 * 2 * rows


def test_copies_and_embeddings_of_one_process_by_hand():
    """Autocast's copies stay until the pass is over, and then only where they are used again."""
    layer = 40 * 60 * 2 + 40 * 20 * 2 + 3 * 40 * 24
    narrow = planned(run_of(train=NARROW))
    assert bytes_of(narrow, "weights", "copies in bfloat16") == {
        "loss": 2 * 2 * layer,
        "last_layer": 2 * 2 * layer,
        "first_layer": 2 * layer,
    }
    again = planned(run_of(train=NARROW | {"recompute": True}))
    assert bytes_of(again, "weights", "copies in bfloat16") == {
        "loss": 2 * 2 * layer,
        "last_layer": 2 * layer,
        "first_layer": 2 * layer,
    }
    added = planned(run_of(train={"micro_batch_size": 4}))
    assert bytes_of(added, "gradients", "embedding, to be added") == {"update": 4 * 61 * 40}
    assert not any(term.name == "embedding, to be added" for term in narrow.terms)


def test_seventy_billion_on_sixty_four():
    config = RunConfig.load(EXAMPLES / "llama-70b.yaml")
    memory = TensorMemory()
    with memory:
        made = planned(config, 64)
    assert memory.peak == 0  # nothing is built
    assert made.parameters == 70_553_706_496
    share = made.parameters / 64
    assert lasting(made, "optimiser") == pytest.approx(8 * share, rel=1e-3)
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
    with pytest.raises(ConfigError, match=r"8 rows a step do not divide by the 6"):
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
    config = run_of(LARGER, train={"micro_batch_size": 1, "recompute": True})
    peak = planned(config, 2).peak
    assert ("parallel.tensor=2",) in dict(settings(config, 2, peak - 1))
