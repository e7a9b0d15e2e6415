"""The generation loop on tiny random decoders, on every engine: the same loop, the same texts."""

import numpy as np
import pytest
import torch

from armillary.errors import UserError
from armillary.generation.batch import generate
from armillary.generation.sampling import SamplingConfig
from support.engines import ENGINES, Noting
from support.models import EVERY_VARIANT, SCALINGS, VARIANTS, VOCABULARY, build, config, layer

SHORT, LONG = [5, 17, 40], [9, 3, 33, 21, 8, 54, 12]  # 3 and 7 tokens (case 54)
GREEDY = SamplingConfig(max_tokens=5, temperature=0, logprobs=20)
SAMPLED = [
    SamplingConfig(max_tokens=9, seed=1, top_k=20, repetition_penalty=1.3, logprobs=20),
    SamplingConfig(max_tokens=4, seed=1, temperature=1.5, top_p=0.9, logprobs=20),
    SamplingConfig(max_tokens=12, seed=7, min_p=0.02, logprobs=20),
]


class Letters:
    """Token i is the i-th character from "A" on."""

    eos_ids = ()

    def is_special(self, token_id):
        return False

    def token_bytes(self, token_id):
        return bytes([65 + token_id])


@pytest.fixture(params=ENGINES)
def kind(request):
    """How an engine is made of a decoder."""
    return ENGINES[request.param]


def run(engine, prompts, configs, **options):
    """The events of each prompt."""
    events = [[] for _ in prompts]
    for event in generate(engine, Letters(), prompts, configs, **options):
        events[event.index].append(event)
    return events


def alone(engine, prompts, configs, **options):
    pairs = zip(prompts, configs, strict=True)
    return [run(engine, [p], [c], **options)[0] for p, c in pairs]


def ids(events):
    return [event.token_id for event in events]


def assert_same(ours, theirs, atol=1e-10):
    """Equal tokens, texts and reasons, and log-probabilities of each step's 20 likeliest tokens."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert ids(mine) == ids(other)
        assert [e.text for e in mine] == [e.text for e in other]
        assert [e.finish_reason for e in mine] == [e.finish_reason for e in other]
        for a, b in zip(mine, other, strict=True):
            assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=atol)
            assert dict(a.logprob.top) == pytest.approx(dict(b.logprob.top), abs=atol)


# --- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_VARIANT)
def test_each_row_of_a_batch_is_what_the_prompt_gives_alone(kind, name):
    engine = kind.make(build(EVERY_VARIANT[name]))
    prompts, configs = [SHORT, LONG], [GREEDY, GREEDY]
    assert_same(run(engine, prompts, configs), alone(engine, prompts, configs), kind.atol)


def test_options_and_random_numbers_are_each_requests_own(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    prompts = [SHORT, LONG, [1]]
    expected = alone(engine, prompts, SAMPLED)
    assert_same(run(engine, prompts, SAMPLED), expected, kind.atol)
    backwards = run(engine, prompts[::-1], SAMPLED[::-1])
    for events, other in zip(backwards[::-1], expected, strict=True):
        assert ids(events) == ids(other)


def test_eight_prompts_in_float32_give_the_greedy_texts_that_they_give_alone(kind):
    """Cases 65 and 125."""
    engine = kind.make(build(VARIANTS["q/k norm"], dtype=torch.float32))
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCABULARY, (n,), generator=g).tolist() for n in range(1, 9)]
    configs = [GREEDY] * 8
    assert_same(run(engine, prompts, configs), alone(engine, prompts, configs), atol=1e-4)


def test_a_finished_request_leaves_the_batch_and_the_others_go_on(kind):
    engine = Noting(kind.make(build(VARIANTS["plain"])))
    prompts = [SHORT, LONG, [1]]
    lengths = [len(events) for events in run(engine, prompts, SAMPLED)]
    assert lengths == [9, 4, 12]
    assert engine.calls == [[3, 7, 1], *[[1] * 3] * 3, *[[1] * 2] * 5, *[[1]] * 3]


# --- each step is a whole pass --------------------------------------------------------------


@pytest.mark.parametrize("name", SCALINGS)
def test_each_step_is_a_whole_pass_under_the_length_of_the_request(kind, name):
    """Across the original window of 8, each row with a length of its own (cases 39 and 42)."""
    decoder = build(VARIANTS[f"rope {name}"])
    engine = kind.make(decoder)
    prompts = [LONG[:6], SHORT]
    configs = [
        SamplingConfig(max_tokens=n, temperature=0, logprobs=20) for n in (6, 4)
    ]  # full lengths 12 and 7: on either side of the window
    for prompt, config_, events in zip(
        prompts, configs, run(engine, prompts, configs), strict=True
    ):
        whole = torch.tensor([prompt + ids(events)])
        with torch.no_grad():
            logits = decoder(whole, rotary_length=len(prompt) + config_.max_tokens)
        expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for event, row in zip(events, expected, strict=True):
            assert event.token_id == int(row.argmax())
            for token_id, value in event.logprob.top:
                assert value == pytest.approx(float(row[token_id]), abs=kind.atol)


def test_the_length_of_the_request_matters_to_a_rule_that_varies(kind):
    """Else the test above would hold for any length."""
    engine = kind.make(build(VARIANTS["rope longrope"]))
    short, long = (
        run(engine, [SHORT], [SamplingConfig(max_tokens=n, temperature=0, logprobs=0)])[0][0]
        for n in (4, 40)
    )
    assert abs(short.logprob.logprob - long.logprob.logprob) > 1e-3


# --- what ends a request --------------------------------------------------------------------


def test_each_request_ends_for_its_own_reason(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    free = ids(run(engine, [SHORT], [SamplingConfig(max_tokens=8, temperature=0)])[0])
    text = bytes(65 + i for i in free).decode()
    assert len(set(free[:4])) == 4, "the seed gives four different tokens first"
    configs = [
        SamplingConfig(max_tokens=8, temperature=0),
        SamplingConfig(max_tokens=8, temperature=0, stop=(text[1:3],), ignore_eos=True),
        SamplingConfig(max_tokens=8, temperature=0, ignore_eos=True),
    ]
    got = run(engine, [SHORT] * 3, configs, eos_ids=(60, free[3], free[1]))
    assert [(ids(e), e[-1].finish_reason) for e in got] == [
        (free[:2], "eos"),
        (free[:3], "stop"),
        (free, "length"),
    ]
    assert ["".join(e.text for e in events) for events in got] == [text[:1], text[:1], text]


def test_the_tokenizers_own_eos_ids_are_the_default(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    free = ids(run(engine, [LONG], [GREEDY])[0])
    tokenizer = Letters()
    tokenizer.eos_ids = (free[0],)
    (event,) = generate(engine, tokenizer, [LONG], [GREEDY])
    assert (event.token_id, event.text, event.finish_reason) == (free[0], "", "eos")


@pytest.mark.parametrize("name", ["plain", "learned"])
def test_a_completion_may_fill_the_window_and_not_pass_it(kind, name):
    engine = Noting(kind.make(build(VARIANTS[name])))
    events = run(engine, [[1] * 60], [SamplingConfig(max_tokens=4, temperature=0)])[0]
    assert (len(events), events[-1].finish_reason) == (4, "length")
    engine.calls.clear()
    with pytest.raises(UserError, match=r"60 tokens .* window of 64"):
        generate(engine, Letters(), [SHORT, [1] * 60], [GREEDY, GREEDY])
    assert engine.calls == []  # refused before anything is computed, when called


def test_the_work_stops_when_the_iterator_is_dropped(kind):
    """Case 119."""
    engine = Noting(kind.make(build(VARIANTS["plain"])))
    events = generate(engine, Letters(), [LONG], [SamplingConfig(max_tokens=50, seed=1)])
    for _ in range(3):
        next(events)
    events.close()
    assert len(engine.calls) == 3


# --- texts ----------------------------------------------------------------------------------


def test_the_pieces_of_a_stream_are_the_text_of_its_tokens(kind):
    """A vocabulary made mostly of pieces of one character, so that many are broken."""
    engine = kind.make(build(config(layer())))
    tokenizer = Letters()
    tokenizer.token_bytes = lambda i: "🦙é".encode()[i % 6 :][:1]
    events = list(generate(engine, tokenizer, [LONG], [SamplingConfig(max_tokens=40, seed=2)]))
    prompt = b"".join(map(tokenizer.token_bytes, LONG))
    completion = b"".join(map(tokenizer.token_bytes, ids(events)))
    whole = (prompt + completion).decode("utf-8", "replace")
    assert whole.endswith("".join(event.text for event in events))
    assert any(event.text == "" for event in events)


def test_a_seed_repeats_its_text_and_another_does_not(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    texts = [
        ids(run(engine, [LONG], [SamplingConfig(max_tokens=12, seed=s)])[0]) for s in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


# --- a cache to go on from ------------------------------------------------------------------


def test_a_cache_keeps_a_conversation(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    cache = engine.new_cache()
    first = run(engine, [LONG], [GREEDY], cache=cache)
    assert np.ravel(cache.tokens).tolist() == LONG + ids(first[0])[:-1]
    turn = LONG + ids(first[0]) + [4, 4, 2]
    expected = run(engine, [turn], [GREEDY])
    assert_same(run(engine, [turn], [GREEDY], cache=cache), expected, kind.atol)


@pytest.mark.parametrize("name", ["plain", "window", "rope dynamic", "rope longrope"])
@pytest.mark.parametrize(
    "edited",
    [[1, 2, 9, 4], [1, 2, 3], [7, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]],
    ids=["edited", "prefix", "other", "same", "longer"],
)
def test_a_prompt_that_was_edited_is_as_if_run_afresh(kind, name, edited):
    """Case 58."""
    engine = kind.make(build(VARIANTS[name]))
    cache = engine.new_cache()
    run(engine, [[1, 2, 3, 4, 5]], [SamplingConfig(max_tokens=8, temperature=0)], cache=cache)
    expected = run(engine, [edited], [GREEDY], cache=engine.new_cache())
    assert_same(run(engine, [edited], [GREEDY], cache=cache), expected, kind.atol)


# --- faults ---------------------------------------------------------------------------------


def test_calls_that_do_not_fit_are_refused(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    with pytest.raises(ValueError, match="2 prompts and 1 configs"):
        generate(engine, Letters(), [SHORT, LONG], [GREEDY])
    with pytest.raises(ValueError, match="0 prompts"):
        generate(engine, Letters(), [], [])
    with pytest.raises(ValueError, match="a cache serves one prompt, and 2 were given"):
        generate(engine, Letters(), [SHORT, LONG], [GREEDY, GREEDY], cache=engine.new_cache())
    with pytest.raises(TypeError, match="of type dict is not of this engine"):
        generate(engine, Letters(), [SHORT], [GREEDY], cache={})
