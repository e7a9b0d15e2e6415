"""A real model: the engine beside the torch decoder, in float32 and with rounded activations."""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from armillary.checkpoints import Checkpoint, open_checkpoint
from armillary.decoder import Decoder
from armillary.engine.decoder import EngineDecoder
from armillary.weights import build_filled
from support.downloads import smollm2_gguf
from support.quantised import meant

pytestmark = pytest.mark.download

EXACT = 1e-4  # where logits reach 38
LICENSE = Path(__file__).parents[2] / "LICENSE"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived",
    "The three laws of motion are",
    "Water boils at",
]
N_TOKENS = 128


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(smollm2_gguf())


@pytest.fixture(scope="module")
def peer(checkpoint: Checkpoint) -> Decoder:
    """Torch, on the dequantised weights in float32."""
    return build_filled(checkpoint.config, checkpoint.tensors)


@pytest.fixture(scope="module")
def ids(checkpoint: Checkpoint) -> list[int]:
    return checkpoint.tokenizer.encode(LICENSE.read_text(encoding="utf-8"))[:64]


@torch.no_grad()
def logits(decoder: Decoder, ids: list[int]) -> np.ndarray:
    return decoder(torch.tensor([ids]))[0].numpy()


@pytest.fixture(scope="module")
def exact(peer: Decoder, ids: list[int]) -> np.ndarray:
    """Torch's in float64: in float32 it is 1e-4 off itself, on some machines more."""
    return logits(copy.deepcopy(peer).double(), ids)


def all_logits(decoder: EngineDecoder, ids: list[int], most: int = 16) -> np.ndarray:
    """Of a text that is taken in so many tokens at a time: by 16 in passes of few rows."""
    cache = decoder.new_cache()
    parts = [ids[at : at + most] for at in range(0, len(ids), most)]
    return np.concatenate([decoder.take([cache], [part], every=True)[0] for part in parts])


@pytest.fixture(scope="module")
def float32(checkpoint: Checkpoint) -> EngineDecoder:
    return EngineDecoder(checkpoint.config, checkpoint.tensors, width="float32")


def test_logits_in_float32_are_those_of_torch(
    float32: EngineDecoder, ids: list[int], exact: np.ndarray
) -> None:
    for most in (16, 64):
        assert np.abs(all_logits(float32, ids, most) - exact).max() <= EXACT


def test_greedy_tokens_are_those_of_torch(
    float32: EngineDecoder, peer: Decoder, checkpoint: Checkpoint
) -> None:
    """Each token is the likeliest after those before it, in one pass of torch over the text."""
    texts = [list(checkpoint.tokenizer.encode(prompt)) for prompt in PROMPTS]
    starts = [len(text) for text in texts]
    caches, new = [float32.new_cache() for _ in texts], texts
    for _ in range(N_TOKENS):
        new = [[int(each[0].argmax())] for each in float32.take(caches, new)]
        texts = [[*text, *token] for text, token in zip(texts, new, strict=True)]
    for text, start in zip(texts, starts, strict=True):
        theirs = logits(peer, text)[start - 1 : -1].argmax(-1)
        assert theirs.tolist() == text[start:]
    assert checkpoint.tokenizer.decode(texts[0][starts[0] :]).startswith(" Paris")


def test_logits_in_bfloat16_are_those_of_rounded_weights(
    checkpoint: Checkpoint, peer: Decoder, ids: list[int]
) -> None:
    rounded = copy.deepcopy(peer)
    for parameter in rounded.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.bfloat16().float()
    decoder = EngineDecoder(checkpoint.config, checkpoint.tensors, width="bfloat16", cache="F32")
    assert np.abs(all_logits(decoder, ids) - logits(rounded, ids)).max() <= 2 * EXACT


def rms(differences: np.ndarray) -> np.ndarray:
    return np.sqrt((differences.astype(np.float64) ** 2).mean(-1))


def test_quantised_logits_are_those_of_rounded_activations(
    checkpoint: Checkpoint, peer: Decoder, ids: list[int]
) -> None:
    """Torch on the same weights, with what each product takes rounded to int8 in groups of 32.

    Many texts of one token: where the two round a number apart, all that follows differs by
    roundings. Some have none such and agree; the others do in how far they are from the truth.
    """
    decoder = EngineDecoder(checkpoint.config, checkpoint.tensors, cache="F32")
    texts = [[token] for token in ids]
    ours = np.concatenate(decoder.take([decoder.new_cache() for _ in texts], texts))
    rounded = copy.deepcopy(peer)

    def rounding(_: object, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *more = given
        rows = meant(x.reshape(-1, x.shape[-1]).numpy())
        return torch.from_numpy(rows).float().reshape(x.shape), *more

    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear) or module is rounded.head:
            module.register_forward_pre_hook(rounding)
    with torch.no_grad():
        exact, theirs = (each(torch.tensor(texts))[:, 0].numpy() for each in (peer, rounded))
    apart = rms(theirs - exact)
    assert rms(ours - theirs).min() <= 1e-4
    assert np.median(rms(ours - theirs)) <= 0.5 * np.median(apart)
    assert 0.8 <= rms(ours - exact).mean() / apart.mean() <= 1.25
