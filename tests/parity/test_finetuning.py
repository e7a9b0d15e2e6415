"""SmolLM2 goes on on real speeches, stopped and gone on once, and is a model to transformers."""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import armillary
from armillary.data import TokenDataset
from armillary.language_model import LanguageModel
from armillary.training.events import StepDone, Validated
from armillary.training.run import train
from armillary.training.run_config import RunConfig
from support.downloads import smollm2_gguf, state_of_the_union
from support.peer_llama import load_peer, whole_pass

pytestmark = [pytest.mark.peer, pytest.mark.download]

TOLERANCE = 2e-4  # float32, where logits reach 43
SPEECHES = ["1790_george_washington_n", "1800_john_adams_f", "1932_herbert_hoover_r"]
STEPS = 2
KINDS: dict[str, dict[str, Any]] = {
    "all weights": {"train": {"lr": 1e-4}},
    "adapters": {"train": {"lr": 2e-3}, "lora": {"targets": ["layers.*.attention.[qv]"]}},
}


@dataclass(frozen=True)
class Tuned:
    """A finished run: its parts' events, what it wrote and we read, the held-out documents."""

    kind: str
    parts: list[list[Any]]
    directory: Path
    model: LanguageModel
    held_out: TokenDataset


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steps this small are not worth sharing, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def original() -> LanguageModel:
    return armillary.load(smollm2_gguf(), dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=list(KINDS))
def tuned(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """A step, a signal, and the last one; in a directory of its own."""
    directory = tmp_path_factory.mktemp("tuned")
    (directory / "speeches").mkdir()
    for name in SPEECHES:
        shutil.copy(state_of_the_union() / f"{name}.txt", directory / "speeches")
    config = settings(directory, KINDS[request.param])
    first: list[Any] = []
    second: list[Any] = []
    assert train(config, listeners=[first.append, stop_after(STEPS - 1)]).reason == "SIGTERM"
    ended = train(config, resume=True, listeners=[second.append])
    assert ended.model is not None
    yield Tuned(
        request.param,
        [first, second],
        Path(ended.model),
        armillary.load(ended.model, dtype="float32", device="cpu"),
        TokenDataset(directory / "out/data", "validation"),
    )
    shutil.rmtree(directory)  # gigabytes


def settings(directory: Path, changes: dict[str, Any]) -> RunConfig:
    entries: dict[str, Any] = {
        "out": str(directory / "out"),
        "seed": 3,  # holds the first speech out
        "model": {"checkpoint": str(smollm2_gguf())},
        "data": {
            "sources": [str(directory / "speeches")],
            "length": 48,
            "validation": 0.3,
            "workers": 1,
        },
        "train": {
            "steps": STEPS,
            "batch_size": 2,
            "micro_batch_size": 1,
            "precision": "float32",
            "device": "cpu",
        },
        "validation": {"every": 0, "rows": 4, "batch_size": 4, "compressors": False},
        "checkpoints": {"every": 0, "keep_last": 1},
        "log": {"every": 1},
    }
    return RunConfig.from_dict(
        entries | changes | {"train": entries["train"] | changes.get("train", {})}
    )


def stop_after(step: int) -> Any:
    def listen(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return listen


def test_the_held_out_loss_falls_over_a_run_that_was_stopped(tuned):
    first, second = tuned.parts
    steps = [[e.step for e in part if isinstance(e, StepDone)] for part in tuned.parts]
    assert steps == [[1], [2]]
    (before,) = (event for event in first if isinstance(event, Validated))
    (after,) = (event for event in second if isinstance(event, Validated))
    assert (before.step, after.step) == (0, STEPS)
    assert before.targets == after.targets > 150
    assert after.loss < before.loss - 0.01


def test_transformers_computes_the_same_logits(tuned, original):
    ids = torch.from_numpy(tuned.held_out[0][:128].astype("int64"))[None]
    with torch.no_grad():
        logits, untuned = tuned.model.decoder(ids), original.decoder(ids)
    theirs = whole_pass(load_peer(tuned.directory, torch.float32), ids)
    assert float((theirs - logits).abs().max()) <= TOLERANCE
    assert float((untuned - logits).abs().max()) > 100 * TOLERANCE


def test_the_weights_that_were_to_change_did(tuned, original):
    old = dict(original.decoder.named_parameters())
    new = dict(tuned.model.decoder.named_parameters())
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    adapted = {name for name in old if name.endswith(("attention.q.weight", "attention.v.weight"))}
    assert changed == (adapted if tuned.kind == "adapters" else set(old))


def test_tokenizer_chat_template_and_end_tokens_are_the_originals(tuned, original):
    from transformers import AutoTokenizer, GenerationConfig

    theirs = AutoTokenizer.from_pretrained(tuned.directory)
    messages = [{"role": "user", "content": "How is the state of the union?"}]
    expected = original.chat_template.encode(messages)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True).input_ids == expected
    assert tuned.model.chat_template.encode(messages) == expected
    assert GenerationConfig.from_pretrained(tuned.directory).eos_token_id == list(original.eos_ids)
