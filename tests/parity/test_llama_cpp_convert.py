"""What `convert` writes as GGUF, run by llama.cpp: our logits, past the original window too.

In float32, where llama.cpp computes in float32: a difference is a fault and no rounding.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from armillary.checkpoints import Checkpoint, open_checkpoint, save_armillary
from armillary.checkpoints.families.family import put
from armillary.config import DecoderConfig
from armillary.conversion.convert import convert
from armillary.errors import UserError
from armillary.parts.feedforward import ACTIVATIONS
from armillary.parts.rotary import varies_with_length
from armillary.rope_scaling import AnyRopeScaling, Llama3, PositionInterpolation, YaRN
from armillary.weights import build_filled, to_write
from support.downloads import smollm2_gguf
from support.llama_cpp_peer import llama_cpp_peer, logits_of
from support.models import build
from support.mxfp4_files import published
from support.peer_families import CASES, LENGTH, SLIDING, YARN, as_gguf_can_say, build_peer
from support.peer_families import WINDOW as WINDOW_OF_RULES
from support.peer_llama import save_peer
from support.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.llamacpp

CLOSE = 2e-3
ROUNDED = 0.1
WINDOW, ORIGINAL = 128, 64
GREEDY = 32


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
        found = logits_of(opened, ids)
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
    "mixtral": ("plain", "yarn"),
    "qwen3-moe": ("as published", "as published, yarn"),
    "olmoe": ("as many kv heads", "as many kv heads, yarn"),
    "gpt-oss": ("plain", "rounded", "bounds within"),
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
    if (name, variant) == ("gpt-oss", "bounds within"):  # which llama.cpp rounds
        before = changed(before, "layers.*.attention.rotary.scaling.truncate", True)
    at = [0, SLIDING - 1] if passed_over else [0, WINDOW_OF_RULES - 1, LENGTH - 1]
    compare(before, path, ids, at, text=not passed_over and not varies)


def converted(directory: Path, peer: Any) -> tuple[Checkpoint, Path]:
    """A tiny model of transformers with a tokenizer, as we read it and as a GGUF file."""
    before = open_checkpoint(save_peer(peer, directory / "m"))
    tokenizer = tiny_tokenizer(directory / "t")
    before = replace(before, tokenizer=tokenizer)
    return before, convert(before, directory / "m.gguf", "gguf").path


def built(directory: Path, name: str, variant: str, **entries: Any) -> Any:
    """A tiny model with as many tokens as the tokenizer, in numbers that GGUF can say."""
    size = tiny_tokenizer(directory / "t").vocab_size
    return build_peer(name, variant, vocab_size=size, **as_gguf_can_say(name, variant) | entries)


def changed(checkpoint: Checkpoint, path: str, value: object) -> Checkpoint:
    """Another entry in the configuration."""
    entries = checkpoint.config.to_dict()
    put(entries, (path,), value)
    return replace(checkpoint, config=DecoderConfig.from_dict(entries))


def text_of(checkpoint: Checkpoint) -> list[int]:
    size = checkpoint.config.vocab_size
    return [int(each) for each in np.random.default_rng(0).integers(3, size, LENGTH)]


ENDS = [0, WINDOW_OF_RULES - 1, LENGTH - 1]


@pytest.mark.peer
def test_gates_of_gpt_oss_are_bounded_where_llama_cpp_bounds_them(tmp_path):
    """With weights so large that the bounds matter."""
    peer = built(tmp_path, "gpt-oss", "plain")
    for name, parameter in peer.named_parameters():
        if name.endswith("gate_up_proj"):
            parameter.data *= 6
    before, path = converted(tmp_path, peer)
    compare(before, path, text_of(before), ENDS)
    unbounded = changed(before, "layers.*.feedforward.expert.limit", None)
    with pytest.raises(AssertionError):
        compare(unbounded, path, text_of(before), ENDS)


@pytest.mark.peer
def test_llama_cpp_rounds_the_bounds_of_yarn_in_gpt_oss(tmp_path):
    """`ggml_rope_yarn_corr_dims` does it whatever the model; a notice of convert says so."""
    before, path = converted(tmp_path, built(tmp_path, "gpt-oss", "bounds within"))
    with pytest.raises(AssertionError):
        compare(before, path, text_of(before), ENDS)


@pytest.mark.peer
@pytest.mark.parametrize(
    "entries",
    [
        {"rope_parameters": {**YARN, "beta_fast": 32.0}},
        {"rope_parameters": {**YARN, "beta_fast": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        {"first_k_dense_replace": 0, "n_shared_experts": 2},
    ],
)
def test_deepseek_runs_as_ours_whatever_its_factors_and_experts(tmp_path, entries):
    before, path = converted(tmp_path, built(tmp_path, "deepseek-v3", "plain", **entries))
    compare(before, path, text_of(before), ENDS)


@pytest.mark.peer
def test_deepseek_with_a_softmax_runs_as_ours(tmp_path):
    """As version 2 is: no biases of selection, probabilities as they are."""
    peer = built(tmp_path, "deepseek-v3", "plain", norm_topk_prob=False, first_k_dense_replace=0)
    third = open_checkpoint(save_peer(peer, tmp_path / "three"))
    second = changed(third, "layers.*.feedforward.router.score", "softmax")
    second = changed(second, "layers.*.feedforward.router.selection_bias", False)
    kept = {name: each for name, each in third.tensors.items() if "selection" not in name}
    before = replace(second, tensors=kept, tokenizer=tiny_tokenizer(tmp_path / "t"))
    path = convert(before, tmp_path / "m.gguf", "gguf").path
    compare(before, path, text_of(before), ENDS)


MIXTURES = [("mixtral", "plain"), ("qwen3-moe", "as published"), ("olmoe", "as many kv heads")]
FEW_OFF, WRONG = 0.15, 0.5


def off_at_each(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """By position, in parts of our logits."""
    return np.linalg.norm(theirs - ours, axis=-1) / np.linalg.norm(ours, axis=-1)


@pytest.mark.peer
@pytest.mark.parametrize("dtype", ["q8_0", "q4_1", "q4_0"])
@pytest.mark.parametrize(("name", "variant"), MIXTURES)
def test_quantised_experts_run_in_llama_cpp(tmp_path, name, variant, dtype):
    """It rounds what meets blocks to 8 bits, which here and there picks another expert.

    So the same weights in float32 must give our logits, and as blocks what is near them at most
    positions, which no wrong order of experts is.
    """
    width = "moe_intermediate_size" if name == "qwen3-moe" else "intermediate_size"
    peer = built(tmp_path, name, variant, **{"hidden_size": 96, width: 32})
    before, _ = converted(tmp_path, peer)
    blocks = convert(before, tmp_path / "blocks.gguf", "gguf", dtype=dtype).path
    after = open_checkpoint(blocks)
    experts = [f"layers.{i}.feedforward.experts.gate.weight" for i in range(after.config.n_layers)]
    assert {after.tensors[each].encoding for each in experts} == {dtype.upper()}
    plain = convert(after, tmp_path / "plain.gguf", "gguf", dtype="float32").path
    ids = text_of(before)
    compare(after, plain, ids, ENDS)
    with torch.no_grad(), llama_cpp_peer(blocks, LENGTH) as opened:
        theirs = logits_of(opened, ids)
        decoder = build_filled(after.config, after.tensors)
        assert np.median(off_at_each(decoder(torch.tensor([ids]))[0].numpy(), theirs)) < FEW_OFF
        for layer in decoder.layers:
            stack = layer.feedforward.experts.gate.weight
            stack.copy_(stack.roll(1, dims=0))
        assert np.median(off_at_each(decoder(torch.tensor([ids]))[0].numpy(), theirs)) > WRONG


@pytest.fixture
def in_mxfp4(tmp_path):
    """A tiny gpt-oss as published, with a tokenizer."""
    tokenizer = tiny_tokenizer(tmp_path / "t")
    directory, _ = published(tmp_path / "m", swiglu_limit=7.0, vocab_size=tokenizer.vocab_size)
    return replace(open_checkpoint(directory), tokenizer=tokenizer)


@pytest.mark.peer
def test_gpt_oss_out_of_mxfp4_runs_as_ours(tmp_path, in_mxfp4):
    path = convert(in_mxfp4, tmp_path / "m.gguf", "gguf", dtype="float32").path
    compare(in_mxfp4, path, text_of(in_mxfp4), ENDS)


@pytest.mark.peer
def test_blocks_of_mxfp4_are_copied_and_llama_cpp_reads_them(tmp_path, in_mxfp4):
    """It rounds what meets them to 8 bits, so its logits are near ours and no nearer."""
    path = convert(in_mxfp4, tmp_path / "m.gguf", "gguf").path
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for which in ("gate", "up", "down"):
        each = stored[f"blk.1.ffn_{which}_exps.weight"]
        assert each.tensor_type == gguf.GGMLQuantizationType.MXFP4
        numbers = in_mxfp4.tensors[f"layers.1.feedforward.experts.{which}.weight"].to_float32()
        np.testing.assert_array_equal(gguf.dequantize(each.data, each.tensor_type), numbers)
    ids = text_of(in_mxfp4)
    decoder = build_filled(in_mxfp4.config, in_mxfp4.tensors)
    with torch.no_grad(), llama_cpp_peer(path, LENGTH) as opened:
        ours = decoder(torch.tensor([ids]))[0].numpy()
        difference = np.linalg.norm(logits_of(opened, ids) - ours) / np.linalg.norm(ours)
    assert 1e-4 < difference < ROUNDED


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
