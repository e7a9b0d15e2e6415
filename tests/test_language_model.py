"""A decoder with its tokenizer: loading and saving, asking for text, and what is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import armillary
from armillary.checkpoints import write_huggingface
from armillary.config import FeedForwardConfig
from armillary.engine import coverage
from armillary.engine.coverage import COMPUTED
from armillary.engine.library import library
from armillary.errors import UserError
from armillary.language_model import LanguageModel
from armillary.parts.kv_cache import KVCache
from armillary.rope_scaling import DynamicNTK, LongRoPE, Unscaled
from armillary.weights import to_write
from support.tiny_model import tiny_model

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPTS = ["Hello", "a much longer prompt than the first", "naïve 🦙"]
WINDOW = 256
LONGROPE = LongRoPE(
    short_factor=(1.0, 1.1, 1.2, 1.3, 1.4),
    long_factor=(1.0, 1.5, 2.0, 3.0, 4.0),
    factor=8.0,
    original_window=16,
)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=WINDOW)


@pytest.fixture(scope="module")
def saved(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    lm.save(directory)
    return directory


@pytest.fixture(scope="module", params=["torch", "numba"])
def model(request: pytest.FixtureRequest, saved: Path) -> LanguageModel:
    """The same model on either engine."""
    return loaded(saved, engine=request.param)


def loaded(source: Path, **options: Any) -> LanguageModel:
    return armillary.load(source, device="cpu", **options)


def huggingface(
    lm: LanguageModel, directory: Path, generation: dict[str, Any] | None = None
) -> Path:
    """The model as a Hugging Face directory, with this generation_config.json."""
    write_huggingface(directory, lm.config, list(to_write(lm.decoder)), lm.tokenizer)
    (directory / "generation_config.json").write_text(json.dumps(generation or {}))
    return directory


# --- Load and save -------------------------------------------------------------------------------


def test_what_is_saved_loads_bit_for_bit(lm, saved):
    again = loaded(saved, dtype="float32")
    assert again.config == lm.config
    assert again.eos_ids == lm.eos_ids
    expected = lm.decoder.state_dict()
    assert again.decoder.state_dict().keys() == expected.keys()
    for name, value in again.decoder.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert again.generate(PROMPTS[0], **GREEDY) == lm.generate(PROMPTS[0], **GREEDY)
    conversation = [{"role": "user", "content": "Hi"}]
    assert again.chat(conversation, **GREEDY) == lm.chat(conversation, **GREEDY)


def test_what_is_saved_again_is_the_same_file(saved, tmp_path):
    loaded(saved).save(tmp_path / "again")
    for path in saved.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", ["float64", "bfloat16", "float16"])
def test_a_model_is_saved_and_loaded_in_its_own_type(saved, tmp_path, name):
    lm = loaded(saved, dtype=name)
    lm.save(tmp_path / "model")
    again = loaded(tmp_path / "model", dtype=name)
    for (key, value), other in zip(
        again.decoder.state_dict().items(), lm.decoder.state_dict().values(), strict=True
    ):
        assert value.dtype == getattr(torch, name)
        assert torch.equal(value, other), key


def test_the_automatic_type_is_bfloat16_for_files_in_it_alone(saved, tmp_path):
    loaded(saved, dtype="bfloat16").save(tmp_path / "brain")
    loaded(saved, dtype="float16").save(tmp_path / "half")
    assert loaded(tmp_path / "brain").decoder.embedding.weight.dtype == torch.bfloat16
    assert loaded(tmp_path / "half").decoder.embedding.weight.dtype == torch.float32
    assert loaded(saved).decoder.embedding.weight.dtype == torch.float32


def test_a_path_may_be_a_string(saved):
    assert loaded(Path(saved)).config == armillary.load(str(saved), device="cpu").config


def test_progress_is_told(lm, saved):
    told: list[tuple[int, int]] = []
    loaded(saved, progress=lambda done, total: told.append((done, total)))
    count = len(list(lm.decoder.parameters()))
    assert told[-1] == (count, count)
    assert len(told) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is not known; known are auto, float32, float64"),
        ({"device": "abacus"}, "device 'abacus' cannot be used: "),
        ({"device": "meta"}, "device 'meta' cannot be used: "),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used: "),
    ],
)
def test_a_type_or_device_that_is_not_there_is_refused(saved, options, message):
    with pytest.raises(UserError) as caught:
        armillary.load(saved, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_tokenizer_is_refused(saved, tmp_path):
    directory = huggingface(loaded(saved), tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer; put tokenizer\.json beside it"):
        loaded(directory)


def test_a_model_that_is_nowhere_is_refused():
    with pytest.raises(UserError, match="smollm3"):
        armillary.load("smollm3")


def test_a_missing_tensor_is_refused_or_nan_where_that_is_allowed(saved, tmp_path):
    directory = huggingface(loaded(saved), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.input_layernorm.weight"]
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.1\.input_layernorm"):
        loaded(directory)
    lm = loaded(directory, allow_missing=True)
    assert [name for name, p in lm.decoder.named_parameters() if p.isnan().any()] == [
        "layers.1.norm1.weight"
    ]


def test_an_unknown_configuration_key_is_refused_or_passed_over(saved, tmp_path):
    directory = huggingface(loaded(saved), tmp_path / "model")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flux_capacitor": 88}))
    with pytest.raises(UserError, match="flux_capacitor"):
        loaded(directory)
    assert loaded(directory, ignore_keys=["flux_capacitor"]).config == loaded(saved).config


# --- Generate ------------------------------------------------------------------------------------


def test_a_text_and_its_ids_are_one_prompt(model):
    ids = model.encode(PROMPTS[1])
    by_text = model.generate(PROMPTS[1], **GREEDY)
    assert model.generate(ids, **GREEDY) == by_text
    assert model.generate(tuple(ids), **GREEDY) == by_text
    assert model.generate(list(np.array(ids)), **GREEDY) == by_text
    assert model.generate(torch.tensor(ids), **GREEDY) == by_text
    assert by_text.prompt_tokens == len(ids)
    assert len(by_text.token_ids) == GREEDY["max_tokens"]
    assert by_text.finish_reason == "length"


def test_the_tokens_are_the_likeliest_ones(lm, model):
    """Spelt out with whole passes."""
    ids = lm.encode(PROMPTS[0])
    expected: list[int] = []
    with torch.no_grad():
        for _ in range(GREEDY["max_tokens"]):
            expected.append(int(lm.decoder(torch.tensor([ids + expected]))[0, -1].argmax()))
    assert lm.generate(ids, **GREEDY).token_ids == tuple(expected)
    assert model.generate(ids, **GREEDY).token_ids == tuple(expected)


def test_a_batch_gives_each_prompt_what_it_gets_alone(model):
    alone = [model.generate(prompt, **GREEDY) for prompt in PROMPTS]
    assert model.generate(PROMPTS, **GREEDY) == alone
    assert model.generate([model.encode(prompt) for prompt in PROMPTS], **GREEDY) == alone
    assert model.generate(PROMPTS[:1], **GREEDY) == alone[:1]
    sampled = {"max_tokens": 12, "seed": 5}
    assert model.generate(PROMPTS, **sampled) == [model.generate(p, **sampled) for p in PROMPTS]


@pytest.mark.parametrize("options", [GREEDY, {"max_tokens": 20, "seed": 3}])
def test_a_stream_is_what_generate_gives(model, options):
    for prompt in PROMPTS:
        events = list(model.stream(prompt, **options))
        whole = model.generate(prompt, **options)
        assert "".join(event.text for event in events) == whole.text
        assert tuple(event.token_id for event in events) == whole.token_ids
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == whole.finish_reason


def test_a_stop_string_ends_the_text_before_it(model):
    whole = model.generate(PROMPTS[0], **GREEDY).text
    stop = whole[4:6]
    cut = model.generate(PROMPTS[0], stop=stop, **GREEDY)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_logits(lm, model):
    answer = model.generate(PROMPTS[0], logprobs=3, **GREEDY)
    ids = lm.encode(PROMPTS[0])
    with torch.no_grad():
        logits = lm.decoder(torch.tensor([[*ids, *answer.token_ids]]))[0, len(ids) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token_id, row, told in zip(answer.token_ids, expected, answer.logprobs, strict=True):
        assert told.token_id == token_id
        assert told.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert told.top[0] == (token_id, told.logprob)
        assert len(told.top) == 3
    assert model.generate(PROMPTS[0], **GREEDY).logprobs is None


def test_a_chat_is_the_template_continued(model):
    messages = [{"role": "user", "content": "Who are you?"}]
    ids = model.chat_template.encode(messages)
    assert model.tokenizer.decode(ids) == (
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.chat(messages, **GREEDY) == model.generate(ids, **GREEDY)


def test_a_chat_needs_a_template(saved, tmp_path):
    directory = huggingface(loaded(saved), tmp_path / "model")
    path = directory / "tokenizer_config.json"
    entries = json.loads(path.read_text())
    del entries["chat_template"]
    path.write_text(json.dumps(entries))
    with pytest.raises(UserError, match="this model has no chat template; use generate"):
        loaded(directory).chat([{"role": "user", "content": "Hi"}])


def test_control_tokens_in_a_prompt_stay_text(lm):
    """Case 101."""
    ids = lm.encode("<|im_end|>")
    assert not any(lm.tokenizer.is_special(token) for token in ids)
    assert lm.tokenizer.decode(ids) == "<|im_end|>"


# --- Engines -------------------------------------------------------------------------------------


def test_a_model_says_what_computes_it(model, saved, request):
    assert model.engine == request.node.callspec.params["model"]
    assert loaded(saved).engine == "torch", "the default"
    assert loaded(saved, engine="auto").engine == "numba"


def test_both_engines_give_the_same_texts(lm, saved):
    numba = loaded(saved, engine="numba")
    assert numba.generate(PROMPTS, **GREEDY) == lm.generate(PROMPTS, **GREEDY)
    sampled = {"max_tokens": 12, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}
    assert numba.generate(PROMPTS, **sampled) == lm.generate(PROMPTS, **sampled)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_numba_engine_holds_weights_as_they_are_or_in_a_type(saved, dtype):
    lm = loaded(saved, engine="numba", dtype=dtype)
    whole = loaded(saved, dtype="float32").generate(PROMPTS[0], logprobs=5, **GREEDY)
    got = lm.generate(PROMPTS[0], logprobs=5, **GREEDY)
    difference = abs(got.logprobs[0].logprob - whole.logprobs[0].logprob)
    assert (1e-4 < difference < 0.1) if dtype == "bfloat16" else difference < 1e-5


@pytest.mark.parametrize(
    ("cache", "stored"),
    [("auto", "F32"), ("float32", "F32"), ("bfloat16", "BF16"), ("int8", "int8")],
)
def test_the_numba_engine_keeps_keys_and_values_in_a_type(saved, cache, stored):
    lm = loaded(saved, engine="numba", cache=cache)
    assert lm.new_cache().stored == stored
    whole = loaded(saved, engine="numba").generate(PROMPTS[0], logprobs=5, **GREEDY)
    got = lm.generate(PROMPTS[0], logprobs=5, **GREEDY)
    difference = abs(got.logprobs[0].logprob - whole.logprobs[0].logprob)
    assert (difference == 0) if stored == "F32" else 0 < difference < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "int8"}, "cache type 'int8' is for the numba engine"),
        ({"engine": "cuda"}, "engine 'cuda' is not known; known are auto, torch, numba"),
        ({"engine": "numba", "dtype": "float16"}, "dtype 'float16' is none of the numba engine"),
        ({"engine": "numba", "device": "cuda"}, "device 'cuda' is none of the numba engine"),
    ],
)
def test_what_an_engine_has_not_is_refused(saved, options, message):
    with pytest.raises(UserError) as caught:
        armillary.load(saved, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_without_numba_torch_computes_and_one_notice_says_so(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "armillary.engine.decoder", None)
    told: list[str] = []
    lm = loaded(saved, engine="auto", notice=told.append)
    assert lm.engine == "torch"
    assert lm.notices == tuple(told)
    assert len(told) == 1
    assert "cannot be imported" in told[0]
    assert told[0].endswith("torch computes instead")
    for options in ({"engine": "numba"}, {"engine": "auto", "cache": "int8"}):
        with pytest.raises(UserError, match="cannot be imported .* take --engine torch"):
            loaded(saved, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_torch_cannot_use_is_none(saved, monkeypatch):
    monkeypatch.setattr("armillary.engine_choice.gpu_expected", lambda: True)
    assert armillary.load(saved, engine="auto").engine == "numba"
    assert armillary.load(saved, engine="auto", dtype="float64").engine == "torch"
    assert armillary.load(saved, engine="auto", device="cpu").engine == "numba"


def test_where_a_part_has_no_kernel_torch_computes_and_one_notice_names_it(saved, lm, monkeypatch):
    known = {**COMPUTED[FeedForwardConfig], "activation": ("gelu",)}
    monkeypatch.setattr(coverage, "COMPUTED", {**COMPUTED, FeedForwardConfig: known})
    told: list[str] = []
    fallen_back = loaded(saved, engine="auto", notice=told.append)
    what = "feedforward.activation silu has no kernel in the numba engine"
    assert told == [f"layers 0-1: {what}; torch computes instead"]
    assert fallen_back.engine == "torch"
    assert fallen_back.generate(PROMPTS, **GREEDY) == lm.generate(PROMPTS, **GREEDY)
    with pytest.raises(UserError) as caught:
        loaded(saved, engine="numba")
    assert str(caught.value) == f"layers 0-1: {what}; take --engine torch"


@pytest.mark.parametrize("engine", ["numba", "auto"])
def test_only_torch_holds_weights_that_are_not_there(saved, engine):
    with pytest.raises(ValueError, match=f"weights unset, which engine '{engine}' cannot hold"):
        loaded(saved, allow_missing=True, engine=engine)


def test_weights_read_in_place_are_not_saved_again(saved, tmp_path):
    with pytest.raises(ValueError, match="engine='torch'"):
        loaded(saved, engine="numba").save(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_numba_engine_imports_no_torch(saved):
    program = """
import sys
import armillary.language_model
assert "torch" not in sys.modules
lm = armillary.language_model.load(sys.argv[1], engine="numba")
lm.chat([{"role": "user", "content": "Hi"}], max_tokens=3, logprobs=2, top_p=0.9, seed=1)
lm.generate(["Hello", "a longer prompt"], max_tokens=3, repetition_penalty=1.1)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(saved)], check=True)


# --- Cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    "rule", [Unscaled(), DynamicNTK(factor=2.0, original_window=16), LONGROPE], ids=lambda r: r.kind
)
def test_a_cache_between_calls_changes_no_text(tmp_path, rule, windowed):
    """Case 58: a longer prompt, an edited one, a prefix of it, the same again, another one."""
    lm = with_windows(tiny_model(tmp_path, max_positions=WINDOW, scaling=rule), windowed)
    cache = KVCache(lm.config, batch=1, windowed=windowed)
    first = [40, 41, 42, 43, 44]
    for prompt in [first, [*first, 50, 51], [*first[:2], 60, 61], first[:3], first[:3], [99]]:
        # Without a cache, varying rules see prompt + max_tokens from the first token on.
        fresh = KVCache(lm.config, batch=1)
        expected = lm.generate(prompt, cache=fresh, **GREEDY)
        assert lm.generate(prompt, cache=cache, **GREEDY) == expected
        assert cache.length == len(prompt) + GREEDY["max_tokens"] - 1


def test_a_cache_of_the_numba_engine_changes_no_text(saved):
    """Case 58, as above."""
    lm = loaded(saved, engine="numba")
    cache = lm.new_cache()
    first = [40, 41, 42, 43, 44]
    for prompt in [first, [*first, 50, 51], [*first[:2], 60, 61], first[:3], first[:3], [99]]:
        expected = lm.generate(prompt, **GREEDY)
        assert lm.generate(prompt, cache=cache, **GREEDY) == expected
        assert cache.tokens == [*prompt, *expected.token_ids[:-1]]


def test_a_cache_of_the_other_engine_is_refused(lm, saved):
    numba = loaded(saved, engine="numba")
    for one, other in ((lm, numba), (numba, lm)):
        with pytest.raises(TypeError, match="is not of this engine"):
            one.generate("Hi", cache=other.new_cache())


def with_windows(lm: LanguageModel, windowed: bool) -> LanguageModel:
    if not windowed:
        return lm
    layer = lm.config.layers[0]
    attention = layer.attention.model_copy(update={"window": 6})
    narrow = layer.model_copy(update={"attention": attention})
    config = lm.config.model_copy(update={"layers": (narrow, layer)})
    decoder = armillary.Decoder(config).eval()
    decoder.load_state_dict(lm.decoder.state_dict())
    return LanguageModel(decoder, lm.tokenizer, {}, lm.eos_ids)


def test_a_cache_saves_the_work_that_is_done(lm, monkeypatch):
    """Otherwise the test above would hold for a cache that is dropped each time."""
    cache = KVCache(lm.config, batch=1)
    first = lm.generate(PROMPTS[1], cache=cache, **GREEDY)
    follow_up = [*lm.encode(PROMPTS[1]), *first.token_ids, 50, 51]
    seen: list[int] = []
    whole = lm.decoder._run

    def counted(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return whole(tokens, *rest)

    monkeypatch.setattr(lm.decoder, "_run", counted)
    lm.generate(follow_up, cache=cache, **GREEDY)
    # The last token of a completion is not in the cache; then come the two new ones.
    assert seen == [3, *[1] * (GREEDY["max_tokens"] - 1)]


def test_calls_without_a_cache_leave_no_trace(model):
    expected = model.generate(PROMPTS[0], **GREEDY)
    model.generate(PROMPTS[1], **GREEDY)
    assert model.generate(PROMPTS[0], **GREEDY) == expected


LONG_PROMPT = [number % 200 + 3 for number in range(100)]


def test_a_prompt_that_begins_as_the_last_one_is_computed_from_there(saved):
    """Without being told, and so that not even the log-probabilities show it."""
    lm, alone = loaded(saved, engine="numba"), loaded(saved, engine="numba")
    alone.prompts = None
    for prompt, reused in [
        (LONG_PROMPT, 0),
        (LONG_PROMPT, 99),
        ([*LONG_PROMPT[:80], 7, 8], 80),
        ([LONG_PROMPT, [*LONG_PROMPT, 9]], 100),
    ]:
        options = {**GREEDY, "logprobs": 2}
        assert lm.generate(prompt, **options) == alone.generate(prompt, **options)
        assert lm.prompts.reused == reused
    assert loaded(saved).prompts is None, "torch's last bits tell how a prompt was cut"


@pytest.fixture
def roomy(tmp_path, monkeypatch):
    """A saved model whose window holds long prompts, and an empty directory for those."""
    library()  # stays where it is
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path))
    tiny_model(tmp_path / "tokenizer", max_positions=400).save(tmp_path / "roomy")
    return tmp_path / "roomy"


def test_prompts_are_kept_in_files_where_that_is_asked_for(roomy):
    prompt = [number * 7 % 200 + 3 for number in range(300)]
    for asked, reused in [(False, 0), (False, 0), (True, 0), (True, 299), (False, 0)]:
        lm = loaded(roomy, engine="numba", prompt_files=asked)
        lm.generate(prompt, **GREEDY)
        assert lm.prompts.reused == reused


def test_a_text_that_is_dropped_leaves_its_prompt_in_a_file(roomy, tmp_path):
    events = loaded(roomy, engine="numba", prompt_files=True).stream([9] * 300, **GREEDY)
    next(events)
    assert not list(tmp_path.glob("prompts/*.safetensors")), "nothing before the first word"
    events.close()
    assert len(list(tmp_path.glob("prompts/*.safetensors"))) == 1


def test_a_cache_serves_one_prompt(model):
    with pytest.raises(ValueError, match="a cache serves one prompt, and 3 were given"):
        model.generate(PROMPTS, cache=model.new_cache(), **GREEDY)


# --- Defaults of the checkpoint ------------------------------------------------------------------


def test_the_sampling_of_generation_config_is_the_default(saved, tmp_path):
    lm = loaded(saved)
    stated = {"do_sample": True, "temperature": 0.6, "top_k": 7, "repetition_penalty": 1.2}
    again = loaded(huggingface(lm, tmp_path / "model", stated))
    assert again.defaults == {"temperature": 0.6, "top_k": 7, "repetition_penalty": 1.2}
    said = {"max_tokens": 16, "seed": 1, "ignore_eos": True}
    expected = lm.generate("Hello", temperature=0.6, top_k=7, repetition_penalty=1.2, **said)
    assert again.generate("Hello", **said) == expected
    assert lm.generate("Hello", **said) != expected
    # What a call says goes before what the file says.
    greedy = lm.generate("Hello", temperature=0, repetition_penalty=1.0, **said)
    assert again.generate("Hello", temperature=0, repetition_penalty=1.0, **said) == greedy


def test_greedy_decoding_is_the_default_where_the_file_says_so(saved, tmp_path):
    lm = loaded(saved)
    again = loaded(huggingface(lm, tmp_path / "model", {"do_sample": False, "temperature": 0.7}))
    said = {"max_tokens": 12, "ignore_eos": True}
    assert again.generate("Hello", **said) == lm.generate("Hello", temperature=0, **said)


def test_any_of_several_eos_ids_ends_a_text(saved, tmp_path):
    lm = loaded(saved)
    tokens = lm.generate("Hello", **GREEDY).token_ids
    ends = [2, tokens[3]]
    again = loaded(huggingface(lm, tmp_path / "model", {"eos_token_id": ends}))
    assert again.eos_ids == tuple(ends)
    said = {"max_tokens": 12, "temperature": 0}
    answer = again.generate("Hello", **said)
    assert answer.finish_reason == "eos"
    assert answer.token_ids == tokens[: tokens.index(ends[1]) + 1]
    assert answer.text == lm.tokenizer.decode(answer.token_ids[:-1])
    assert again.generate("Hello", ignore_eos=True, **said).token_ids == tokens


def test_a_suggestion_out_of_range_is_refused_with_the_place_it_comes_from(saved, tmp_path):
    directory = huggingface(loaded(saved), tmp_path / "model", {"do_sample": True, "top_p": 5.0})
    with pytest.raises(UserError, match=rf"{directory}: suggests what cannot be: top_p is 5\.0"):
        loaded(directory)


def test_the_defaults_and_eos_ids_are_saved(saved, tmp_path):
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 7]}
    lm = loaded(huggingface(loaded(saved), tmp_path / "model", stated))
    lm.save(tmp_path / "ours")
    again = loaded(tmp_path / "ours")
    assert again.defaults == lm.defaults == {"temperature": 0.6, "top_p": 0.9}
    assert again.eos_ids == lm.eos_ids == (2, 7)


def test_without_max_tokens_a_text_ends_with_the_window(tmp_path):
    lm = tiny_model(tmp_path, max_positions=20)
    answer = lm.generate([40] * 15, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 5
    assert answer.finish_reason == "length"


# --- Errors --------------------------------------------------------------------------------------


REFUSED = [
    ("Hi", {"max_token": 3}, "max_token is no option of generation; known are max_tokens, "),
    ("Hi", {"temperature": -1}, "temperature is -1; it must be a number from 0 to 100"),
    ("Hi", {"temperature": math.nan}, "temperature is nan"),
    ("Hi", {"top_p": 0}, "top_p is 0; it must be a number above 0"),
    ("Hi", {"max_tokens": 0}, "max_tokens is 0; it must be a whole number of 1 or more"),
    ("Hi", {"max_tokens": 255}, "max_tokens is 255, but after a prompt of 2 tokens"),
    ("", {}, "the prompt is empty"),
    ([], {}, "the prompt is empty"),
    ([5, 259], {}, "token 1 of the prompt is 259; the model knows tokens 0 to 258"),
    ([-1], {}, "token 0 of the prompt is -1; the model knows tokens 0 to 258"),
    ([5] * 256, {}, "the prompt has 256 tokens, but the model's window of 256"),
    ([5] * 300, {}, "the prompt has 300 tokens, but the model's window of 256"),
    ("\ud800", {}, "the text is not valid Unicode"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), REFUSED)
def test_what_cannot_be_continued_is_refused_at_once(lm, monkeypatch, prompt, options, message):
    """Case 122: nothing is cut, and no stream begins before its errors are told."""
    monkeypatch.setattr(lm.decoder, "_run", lambda *_: pytest.fail("something was computed"))
    for ask in (lm.generate, lm.stream, lambda one, **how: lm.generate(["Hi", one], **how)):
        with pytest.raises(UserError) as caught:
            ask(prompt, **options)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_an_unknown_option_is_refused_with_the_known_ones_named(model):
    with pytest.raises(UserError, match=r"known are max_tokens, .*repetition_penalty, seed, stop"):
        model.generate("Hi", penalty=1.1)


def test_a_decoder_in_training_is_refused(tmp_path):
    lm = tiny_model(tmp_path)
    lm.decoder.train()
    with pytest.raises(ValueError, match=r"training mode.*call decoder\.eval\(\)"):
        lm.generate("Hi", **GREEDY)
