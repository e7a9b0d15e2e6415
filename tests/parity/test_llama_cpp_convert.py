"""What `convert` writes as GGUF, run by llama.cpp: our logits, past the original window too.

In float32, where llama.cpp computes in float32: a difference is a fault and no rounding.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armillary.checkpoints import Checkpoint, open_checkpoint, save_armillary
from armillary.config import DecoderConfig
from armillary.conversion.convert import convert
from armillary.errors import UserError
from armillary.parts.feedforward import ACTIVATIONS
from armillary.parts.rotary import varies_with_length
from armillary.rope_scaling import AnyRopeScaling, Llama3, PositionInterpolation, YaRN
from armillary.weights import build_filled, to_write
from support.downloads import smollm2_gguf
from support.llama_cpp_peer import llama_cpp_peer
from support.models import build
from support.peer_families import CASES, LENGTH, SLIDING, as_gguf_can_say, build_peer
from support.peer_families import WINDOW as WINDOW_OF_RULES
from support.peer_llama import save_peer
from support.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.llamacpp

CLOSE = 2e-3
WINDOW, ORIGINAL = 128, 64
GREEDY = 32


def theirs(opened: Any, ids: list[int]) -> np.ndarray:
    opened.reset()
    opened.eval(ids)
    return np.array(opened.scores[: len(ids)])


def greedy(opened: Any, ids: list[int]) -> list[int]:
    """Tokens one by one through llama.cpp's cache."""
    opened.reset()
    opened.eval(ids)
    found: list[int] = []
    for _ in range(GREEDY):
        found.append(int(opened.scores[opened.n_tokens - 1].argmax()))
        opened.eval(found[-1:])
    return found


def compare(
    checkpoint: Checkpoint, path: Path, ids: list[int], at: list[int], *, text: bool = True
) -> None:
    """Logits at some positions, and 32 greedy tokens after the first few ids."""
    decoder = build_filled(checkpoint.config, checkpoint.tensors)
    prompt = ids[:5]
    with torch.no_grad(), llama_cpp_peer(path, len(ids) + GREEDY) as opened:
        ours = decoder(torch.tensor([ids]))[0].numpy()
        found = theirs(opened, ids)
        assert np.abs(found[at] - ours[at]).max() <= CLOSE
        if text:
            continued = list(prompt)
            for _ in range(GREEDY):
                continued.append(int(decoder(torch.tensor([continued]), logits="last").argmax()))
            assert greedy(opened, prompt) == continued[len(prompt) :]


RULES: dict[str, AnyRopeScaling | None] = {
    "unscaled": None,
    "linear": PositionInterpolation(2.0),
    "yarn": YaRN(factor=2.0, original_window=ORIGINAL),
    "llama3": Llama3(factor=8.0, original_window=ORIGINAL),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_tiny_llama_runs_as_ours_past_its_original_window(tmp_path, rule, tied):
    """Three positions, one of them past the window that the rule extends."""
    tokenizer = tiny_tokenizer(tmp_path / "t")
    config = DecoderConfig.uniform(
        vocab_size=tokenizer.vocab_size,
        d_model=40,
        n_layers=2,
        n_heads=6,
        n_kv_heads=2,
        d_head=10,
        d_ff=24,
        max_positions=WINDOW,
        rope_base=1000.0,
        rope_scaling=RULES[rule],
        tie_head=tied,
    )
    save_armillary(tmp_path / "m", config, to_write(build(config, std=0.2).float()), tokenizer)
    before = open_checkpoint(tmp_path / "m")
    path = convert(before, tmp_path / "m.gguf", "gguf").path
    ids = np.random.default_rng(0).integers(3, tokenizer.vocab_size, 110).tolist()
    compare(before, path, ids, [0, ORIGINAL - 1, 100])


# What GGUF can say, of each family; the other variants are refused.
RUNS = {
    "llama": ("llama3",),
    "mistral": ("no window", "yarn"),
    "qwen2": ("plain", "yarn", "tied head"),
    "qwen3": ("plain", "yarn", "tied head"),
    "gemma": ("plain",),
    "gemma2": ("plain",),
    "gemma3": ("plain", "linear"),
    "phi3": ("plain", "window", "longrope", "partial longrope", "tied head"),
    "olmo2": ("plain", "yarn"),
    "smollm3": ("plain", "yarn"),
    "granite": ("plain", "yarn", "biases", "tied head"),
    "stablelm": ("plain", "biases", "parallel"),
    "gpt2": ("plain", "own head"),
    "gpt_neox": ("plain", "sequential"),
    "falcon": (
        "one kv head, one norm",
        "groups, two norms",
        "groups, one norm",
        "all kv heads",
        "own head",
    ),
    "gpt-oss": ("plain", "rounded"),
    "deepseek-v3": ("plain", "scaled softmax"),
}


def gelu_of_a_table(z: torch.Tensor) -> torch.Tensor:
    """As llama.cpp has it, of either kind: a table of float16 by numbers of float16, up to 10."""
    rounded = torch.nn.functional.gelu(z.half().float(), approximate="tanh").half().float()
    return torch.where(z.abs() < 10, rounded, z.relu())


@pytest.mark.peer
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_tiny_model_of_each_family_runs_as_ours_or_is_refused(
    tmp_path, name, variant, monkeypatch
):
    """Texts longer than windows and than the original window of scaled rules."""
    for name_of_ours in ("gelu", "gelu_tanh"):
        monkeypatch.setitem(ACTIVATIONS, name_of_ours, gelu_of_a_table)
    tokenizer = tiny_tokenizer(tmp_path / "t")
    entries = as_gguf_can_say(name, variant)
    peer_model = build_peer(name, variant, vocab_size=tokenizer.vocab_size, **entries)
    (tmp_path / "m").mkdir()
    directory = save_peer(peer_model, tmp_path / "m")
    tokenizer.save(directory)
    before = open_checkpoint(directory)
    if variant not in RUNS.get(name, ()):
        with pytest.raises(UserError, match="--to armillary has"):
            convert(before, tmp_path / "m.gguf", "gguf")
        return
    path = convert(before, tmp_path / "m.gguf", "gguf").path
    ids = np.random.default_rng(0).integers(3, tokenizer.vocab_size, LENGTH).tolist()
    # llama.cpp passes over the windows of this architecture, so what lies in one is compared; and
    # of two lists of divisors it takes the long one in short texts too, when its context is long.
    passed_over = (name, variant) == ("phi3", "window")
    varies = before.config.layers[0].attention.rotary and varies_with_length(
        before.config.layers[0].attention.rotary.scaling
    )
    at = [0, SLIDING - 1] if passed_over else [0, WINDOW_OF_RULES - 1, LENGTH - 1]
    compare(before, path, ids, at, text=not passed_over and not varies)


@pytest.mark.download
def test_smollm2_runs_as_ours(tmp_path):
    """Out of the packaged file, over a Hugging Face directory, as float32."""
    before = open_checkpoint(smollm2_gguf())
    middle = convert(before, tmp_path / "m", "huggingface", dtype="float32")
    path = convert(open_checkpoint(middle.path), tmp_path / "m.gguf", "gguf").path
    text = "Once upon a time, in a small village by the sea, there lived a fisherman who had never "
    ids = before.tokenizer.encode(text * 6)[:100]
    compare(before, path, ids, [0, 50, 99])
    path.unlink()  # half a gigabyte
