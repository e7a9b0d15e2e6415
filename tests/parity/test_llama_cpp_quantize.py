"""GGUF files that we write, against llama.cpp: it reads them as we do, and would write the same.

A small model with SmolLM2's tokenizer: 6 query heads on 2, and a feed-forward whose width is no
multiple of a block's 32, so that a matrix falls back to F16 on both sides.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from armillary.checkpoints import Checkpoint, open_checkpoint, save_armillary
from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.checkpoints.k_types import K_TYPES
from armillary.checkpoints.quantize import TARGETS, choose_encodings, write_encoded
from armillary.checkpoints.tensors import to_write as encoded_to_write
from armillary.config import DecoderConfig
from armillary.rope_scaling import (
    NTK,
    AnyRopeScaling,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    YaRN,
)
from armillary.tokenizer import Tokenizer
from armillary.weights import build_filled, to_write
from support.downloads import llama_cpp_vocabularies, smollm2_gguf
from support.llama_cpp_peer import llama_cpp_peer, requantise
from support.models import build

pytestmark = [pytest.mark.llamacpp, pytest.mark.download]

WINDOW = 128
TEXT = "Grüße! It's 12345 o'clock,\n\n\tdef f(x): return x  # 中文 🙂"
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
K_FILE_TYPES = {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18}
# Of the largest logit's size, from float32 sums in another order.
FLOAT32 = 1e-4
# Of the logits' root mean square, from activations that llama.cpp rounds to 8 bits (bf16: to 8).
ROUNDED = 5e-2
# Of K types: there 256 activations share the scale that 32 do elsewhere.
ROUNDED_FOR_K = 7e-2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf_file(smollm2_gguf()).metadata)


def model(
    directory: Path,
    tokenizer: Tokenizer,
    scaling: AnyRopeScaling | None = None,
    tie_head: bool = False,
    d_model: int = 96,
) -> Checkpoint:
    config = DecoderConfig.uniform(
        vocab_size=tokenizer.vocab_size + 8,  # more embeddings than tokens
        d_model=d_model,
        n_layers=2,
        n_heads=6,
        n_kv_heads=2,
        d_head=16,
        d_ff=176,
        max_positions=WINDOW,
        rope_base=1000.0,
        rope_scaling=scaling,
        tie_head=tie_head,
    )
    std = 0.2 * (96 / d_model) ** 0.5  # so that sums over wider rows are as large
    save_armillary(directory, config, to_write(build(config, std=std).float()), tokenizer)
    return open_checkpoint(directory)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Checkpoint:
    return model(tmp_path_factory.mktemp("source") / "m", tokenizer)


def ids_of(length: int = 100) -> list[int]:
    return np.random.default_rng(0).integers(0, 49_000, length).tolist()


def ours(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return build_filled(checkpoint.config, checkpoint.tensors)(torch.tensor([ids]))[0].numpy()


def theirs(opened: Any, ids: list[int]) -> np.ndarray:
    opened.reset()
    opened.eval(ids)
    return np.array(opened.scores[: len(ids)])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target", FILE_TYPES)
def test_the_file_has_the_bytes_that_llama_cpp_gives_each_tensor(tmp_path, tokenizer, target, tied):
    before = model(tmp_path / "m", tokenizer, tie_head=tied)
    write_encoded(tmp_path / "f32.gguf", before, dict.fromkeys(before.tensors, "F32"))
    write_encoded(tmp_path / "ours.gguf", before, choose_encodings(before, TARGETS[target])[0])
    choices: dict[str, object] = {"pure": True}
    if target in ("q4_0", "q4_1"):  # the one choice that differs from llama.cpp's own
        which = "token_embedding_type" if tied else "output_tensor_type"
        choices[which] = int(gguf.GGMLQuantizationType.Q8_0)
    requantise(tmp_path / "f32.gguf", tmp_path / "theirs.gguf", FILE_TYPES[target], **choices)
    found, expected = (read_gguf_file(tmp_path / f"{name}.gguf") for name in ("ours", "theirs"))
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].encoding == tensor.encoding, name
        np.testing.assert_array_equal(found.tensors[name].data, tensor.data)
    for key in ("general.file_type", "general.quantization_version"):
        assert found.metadata[key] == expected.metadata[key]


SHORT = (1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 3.0, 4.0)
LONG = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
RULES = {
    "unscaled": None,
    "linear": PositionInterpolation(2.0),
    "ntk": NTK(2.0),
    "yarn": YaRN(factor=2.0, original_window=64),
    "yarn, attention factor": YaRN(factor=2.0, original_window=64, explicit_attention_factor=0.9),
    "llama3": Llama3(factor=8.0, original_window=64),
    "divisors": LongRoPE(SHORT, SHORT, factor=1.0, original_window=WINDOW),
    # llama.cpp takes the long list where its context is longer than the window; so is this text.
    "longrope": LongRoPE(SHORT, LONG, factor=2.0, original_window=64),
}


@pytest.mark.parametrize("rule", RULES)
def test_llama_cpp_computes_what_we_do_under_each_rule(tmp_path, tokenizer, rule):
    before = model(tmp_path / "m", tokenizer, RULES[rule])
    write_encoded(tmp_path / "m.gguf", before, dict.fromkeys(before.tensors, "F32"))
    ids = ids_of()
    expected = ours(before, ids)
    with llama_cpp_peer(tmp_path / "m.gguf", WINDOW) as opened:
        found = theirs(opened, ids)
    assert np.abs(found - expected).max() <= FLOAT32 * np.abs(expected).max()
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.fixture(scope="module")
def smollm2_part(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers of SmolLM2 in float32, and fewer tokens: real weights, in rows of 576 and 1536."""
    whole = open_checkpoint(smollm2_gguf())
    assert whole.tokenizer is not None
    config = whole.config.model_copy(update={"layers": whole.config.layers[:2]})
    path = tmp_path_factory.mktemp("part") / "m"
    kept = [
        tensor
        for name, tensor in whole.tensors.items()
        if not name.startswith("layers.") or int(name.split(".")[1]) < 2
    ]
    tensors = [encoded_to_write(tensor, "F32") for tensor in kept]
    save_armillary(path, config, tensors, whole.tokenizer)
    return open_checkpoint(path)


@pytest.mark.parametrize("kind", K_TYPES)
def test_k_types_are_as_near_to_real_weights_as_those_of_llama_cpp(tmp_path, smollm2_part, kind):
    """Rows of no whole super-blocks have the type that llama.cpp falls back to, to the bit."""
    before = smollm2_part
    write_encoded(tmp_path / "f32.gguf", before, dict.fromkeys(before.tensors, "F32"))
    write_encoded(tmp_path / "ours.gguf", before, choose_encodings(before, kind)[0])
    choices = {"pure": True, "token_embedding_type": int(gguf.GGMLQuantizationType.Q8_0)}
    requantise(tmp_path / "f32.gguf", tmp_path / "theirs.gguf", K_FILE_TYPES[kind], **choices)
    f32, found, expected = (
        read_gguf_file(tmp_path / f"{name}.gguf").tensors for name in ("f32", "ours", "theirs")
    )
    kinds = set()
    for name, tensor in expected.items():
        assert found[name].encoding == tensor.encoding, name
        kinds.add(tensor.encoding)
        if tensor.encoding != kind:
            np.testing.assert_array_equal(found[name].data, tensor.data)
            continue
        meant = f32[name].to_float32()
        off, their_off = (
            float(np.sqrt(np.mean((each.to_float32() - meant) ** 2)))
            for each in (found[name], tensor)
        )
        assert off <= 1.05 * their_off, name
    assert kind in kinds


@pytest.mark.parametrize("target", TARGETS)
def test_llama_cpp_reads_each_type_as_our_decoder_reads_it(tmp_path, tokenizer, target):
    path = tmp_path / "m.gguf"
    source = model(tmp_path / "m", tokenizer, d_model=256 if TARGETS[target] in K_TYPES else 96)
    encodings, _ = choose_encodings(source, TARGETS[target])
    assert encodings["layers.0.attention.q.weight"] == TARGETS[target]
    write_encoded(path, source, encodings)
    ids = ids_of()
    expected = ours(open_checkpoint(path), ids)
    with llama_cpp_peer(path, WINDOW) as opened:
        found = theirs(opened, ids)
    size = np.sqrt(np.mean(expected**2))
    rounded = ROUNDED_FOR_K if TARGETS[target] in K_TYPES else ROUNDED
    assert np.sqrt(np.mean((found - expected) ** 2)) <= rounded * size
    for position in np.flatnonzero(found.argmax(-1) != expected.argmax(-1)):
        second, best = np.sort(expected[position])[-2:]
        assert best - second <= 4 * rounded * size


def test_greedy_tokens_of_the_written_file_are_ours(tmp_path, source):
    path = tmp_path / "m.gguf"
    write_encoded(path, source, dict.fromkeys(source.tensors, "F32"))
    decoder = build_filled(source.config, source.tensors)
    ids = ids_of(5)
    with llama_cpp_peer(path, WINDOW) as opened:
        for _ in range(24):
            with torch.no_grad():
                token = int(decoder(torch.tensor([ids]))[0, -1].argmax())
            assert int(theirs(opened, ids)[-1].argmax()) == token
            ids.append(token)


@pytest.mark.parametrize("vocabulary", ["smollm2", "llama-spm"])
def test_llama_cpp_makes_our_tokens_of_a_vocabulary_that_was_a_tokenizer_json(
    tmp_path, tokenizer, vocabulary
):
    """Written out of a directory, where nothing of a GGUF file is left but what it meant."""
    if vocabulary != "smollm2":
        path = llama_cpp_vocabularies() / f"ggml-vocab-{vocabulary}.gguf"
        tokenizer = Tokenizer.from_gguf(read_gguf_file(path).metadata)
    before = model(tmp_path / "m", tokenizer)
    assert before.tokenizer is not None
    write_encoded(tmp_path / "m.gguf", before, choose_encodings(before, "Q8_0")[0])
    with llama_cpp_peer(tmp_path / "m.gguf", WINDOW) as opened:
        for special in (False, True):
            text = TEXT + ("<|im_end|> x" if vocabulary == "smollm2" else "</s>")
            found = opened.tokenize(text.encode(), add_bos=False, special=special)
            assert found == before.tokenizer.encode(text, bos=False, specials=special)
        assert opened.token_bos() == before.tokenizer.bos_id
        assert opened.token_eos() == before.tokenizer.eos_ids[0]
