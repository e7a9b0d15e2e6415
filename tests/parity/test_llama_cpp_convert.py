"""What `convert` writes as GGUF, run by llama.cpp: our logits, past the original window too.

In float32, where llama.cpp computes in float32: a difference is a fault and no rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armillary.checkpoints import Checkpoint, open_checkpoint, save_armillary
from armillary.config import DecoderConfig
from armillary.conversion.convert import convert
from armillary.rope_scaling import AnyRopeScaling, Llama3, PositionInterpolation, YaRN
from armillary.weights import build_filled, to_write
from support.downloads import smollm2_gguf
from support.models import build
from support.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.llamacpp

CLOSE = 2e-3
WINDOW, ORIGINAL = 128, 64
GREEDY = 32


@contextmanager
def peer(path: Path, window: int) -> Iterator[Any]:
    """llama.cpp with a float32 cache and plain attention, so that nothing is rounded to float16."""
    import llama_cpp

    opened = llama_cpp.Llama(
        str(path),
        n_ctx=window,
        n_batch=window,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )
    try:
        yield opened
    finally:
        opened.close()


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


def compare(checkpoint: Checkpoint, path: Path, ids: list[int], at: list[int]) -> None:
    """Logits at some positions, and 32 greedy tokens after the first few ids."""
    decoder = build_filled(checkpoint.config, checkpoint.tensors)
    prompt = ids[:5]
    with torch.no_grad(), peer(path, len(ids) + GREEDY) as opened:
        ours = decoder(torch.tensor([ids]))[0].numpy()
        found = theirs(opened, ids)
        assert np.abs(found[at] - ours[at]).max() <= CLOSE
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
