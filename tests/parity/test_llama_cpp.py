"""SmolLM2 against llama.cpp, on the same file.

llama.cpp rounds activations to 8 bits before it multiplies them with quantised weights. A number
near the edge of a step falls on either side by the order of a sum, and over 30 layers that is more
than a unit in a logit: so far is llama.cpp, with a text at once, from itself with its tokens one
by one. Nothing that sums in another order is nearer to it. On a file in which llama.cpp itself has
written these weights out as float32 it computes in float32, and there every logit is compared, and
every token of greedy texts: our reading of the blocks against its own.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import armillary
from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.language_model import LanguageModel
from support.downloads import smollm2_gguf
from support.llama_cpp_peer import llama_cpp_peer, requantise

pytestmark = [pytest.mark.llamacpp, pytest.mark.download]

N_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived",
    "The three laws of motion are",
    "Water boils at",
]
TEXT = Path(__file__).parents[2] / "LICENSE"
CODE = Path(statistics.__file__)
# Of logits that reach 43; rounding gives 1.5e-4.
FLOAT32 = 1e-3
# Shares of the logits' root mean square, from 8-bit activations.
QUANTISED = 5e-2
ALL_FLOAT32 = 0  # LLAMA_FTYPE_ALL_F32
NEAR_TIE = 0.5  # of logits whose root mean square is 7.4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return armillary.load(smollm2_gguf(), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def text(lm: LanguageModel) -> list[int]:
    return lm.encode(TEXT.read_text(encoding="utf-8"))[:256]


@pytest.fixture(scope="module")
def ours(lm: LanguageModel, text: list[int]) -> np.ndarray:
    """Our logits of the text, (T, V)."""
    return logits_of(lm, text)


@pytest.fixture(scope="module")
def completions(lm: LanguageModel) -> list[tuple[list[int], list[int]]]:
    """Each prompt with 64 greedy tokens of ours."""
    return [
        (
            lm.encode(prompt),
            list(
                lm.generate(prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True).token_ids
            ),
        )
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def float32_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """llama.cpp on the same weights, which it has read from the blocks and written as float32."""
    path = tmp_path_factory.mktemp("float32") / "smollm2.gguf"
    requantise(smollm2_gguf(), path, ALL_FLOAT32)
    with llama_cpp_peer(path, 256) as peer:
        yield peer
    path.unlink()  # half a gigabyte


@pytest.fixture(scope="module")
def quantised_peer() -> Iterator[Any]:
    """llama.cpp on the file as it is."""
    with llama_cpp_peer(smollm2_gguf(), 256) as peer:
        yield peer


def logits_of(lm: LanguageModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return lm.decoder(torch.tensor([ids]))[0].numpy()


def peer_logits(peer: Any, ids: list[int]) -> np.ndarray:
    peer.reset()
    peer.eval(ids)
    return np.array(peer.scores[: len(ids)])


def test_the_weights_are_those_that_the_gguf_library_reads():
    """Bit for bit."""
    ours = read_gguf_file(smollm2_gguf()).tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf()).tensors}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours[name].to_float32(), expected)


def test_logits_of_the_weights_as_float32(ours, text, float32_peer):
    assert np.abs(ours - peer_logits(float32_peer, text)).max() <= FLOAT32


def test_logits_of_code_with_the_weights_as_float32(lm, float32_peer):
    ids = lm.encode(CODE.read_text(encoding="utf-8"))[:256]
    assert np.abs(logits_of(lm, ids) - peer_logits(float32_peer, ids)).max() <= FLOAT32


def test_greedy_tokens_of_the_weights_as_float32(lm, completions, float32_peer):
    """A text is the greedy one when each of its tokens is the likeliest after those before it."""
    for prompt, continuation in completions:
        assert len(continuation) == N_TOKENS
        logits = peer_logits(float32_peer, prompt + continuation)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == continuation
        assert np.abs(logits_of(lm, prompt + continuation) - logits).max() <= FLOAT32


def test_a_step_through_the_cache_of_llama_cpp_is_ours(lm, completions, float32_peer):
    """The tokens of a completion one by one, after the prompt at once."""
    prompt, continuation = completions[0]
    float32_peer.reset()
    float32_peer.eval(prompt)
    for token in continuation[:8]:
        float32_peer.eval([token])
    n_tokens = len(prompt) + 8
    theirs = np.array(float32_peer.scores[:n_tokens])
    assert np.abs(logits_of(lm, prompt + continuation[:8]) - theirs).max() <= FLOAT32


def test_logits_of_the_quantised_file(ours, text, quantised_peer):
    difference = ours - peer_logits(quantised_peer, text)
    assert np.sqrt(np.mean(difference**2)) <= QUANTISED * np.sqrt(np.mean(ours**2))


def test_llama_cpp_is_as_far_from_itself_on_the_quantised_file_as_from_us(
    ours, text, quantised_peer
):
    """Why its single logits are not bounded here."""
    at_once = peer_logits(quantised_peer, text)
    quantised_peer.reset()
    for token in text:
        quantised_peer.eval([token])
    one_by_one = np.array(quantised_peer.scores[: len(text)])
    itself, from_us = at_once - one_by_one, ours - at_once
    assert np.abs(itself).max() > 500 * FLOAT32
    assert np.sqrt(np.mean(from_us**2)) <= 2 * np.sqrt(np.mean(itself**2))


def test_greedy_tokens_of_the_quantised_file_differ_at_near_ties_only(
    lm, completions, quantised_peer
):
    for prompt, continuation in completions:
        theirs = peer_logits(quantised_peer, prompt + continuation)[len(prompt) - 1 : -1]
        own = logits_of(lm, prompt + continuation)[len(prompt) - 1 : -1]
        for position in np.flatnonzero(theirs.argmax(-1) != np.array(continuation)):
            second, best = np.sort(own[position])[-2:]
            assert best - second <= NEAR_TIE


def test_the_tokens_of_the_text_are_those_of_llama_cpp(lm, quantised_peer):
    raw = TEXT.read_bytes()
    assert quantised_peer.tokenize(raw, add_bos=False, special=False) == lm.encode(raw.decode())
