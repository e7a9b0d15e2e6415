"""The generation loop on tiny random decoders: a batch gives each prompt what it gets alone."""

import pytest
import torch

from armillary.errors import UserError
from armillary.generation import batch
from armillary.generation.batch import generate, left_padded
from armillary.generation.sampling import SamplingConfig
from armillary.parts.kv_cache import KVCache
from support.models import SCALINGS, VARIANTS, VOCABULARY, build, config, layer

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


def run(decoder, prompts, configs, **options):
    """The events of each prompt."""
    events = [[] for _ in prompts]
    for event in generate(decoder, Letters(), prompts, configs, **options):
        events[event.index].append(event)
    return events


def alone(decoder, prompts, configs, **options):
    pairs = zip(prompts, configs, strict=True)
    return [run(decoder, [p], [c], **options)[0] for p, c in pairs]


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


class Spy:
    """Records the shape of the tokens of every pass through the decoder."""

    def __init__(self, decoder):
        self.shapes = []
        decoder.embedding.register_forward_pre_hook(
            lambda _, arguments: self.shapes.append(tuple(arguments[0].shape))
        )


# --- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_each_row_of_a_padded_batch_is_what_the_prompt_gives_alone(name):
    decoder = build(VARIANTS[name])
    prompts, configs = [SHORT, LONG], [GREEDY, GREEDY]
    assert_same(run(decoder, prompts, configs), alone(decoder, prompts, configs))


def test_options_and_random_numbers_are_each_requests_own():
    decoder = build(VARIANTS["plain"])
    prompts = [SHORT, LONG, [1]]
    expected = alone(decoder, prompts, SAMPLED)
    assert_same(run(decoder, prompts, SAMPLED), expected)
    backwards = run(decoder, prompts[::-1], SAMPLED[::-1])
    for events, other in zip(backwards[::-1], expected, strict=True):
        assert ids(events) == ids(other)


def test_eight_prompts_in_float32_give_the_greedy_texts_that_they_give_alone():
    """Cases 65 and 125."""
    decoder = build(VARIANTS["q/k norm"], dtype=torch.float32)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCABULARY, (n,), generator=g).tolist() for n in range(1, 9)]
    configs = [GREEDY] * 8
    assert_same(run(decoder, prompts, configs), alone(decoder, prompts, configs), atol=1e-4)


def test_a_finished_request_leaves_the_batch_and_the_others_go_on():
    decoder = build(VARIANTS["plain"])
    spy = Spy(decoder)
    prompts = [SHORT, LONG, [1]]
    lengths = [len(events) for events in run(decoder, prompts, SAMPLED)]
    assert lengths == [9, 4, 12]
    assert spy.shapes == [(3, 7)] + [(3, 1)] * 3 + [(2, 1)] * 5 + [(1, 1)] * 3


def test_what_stands_in_the_padding_does_not_matter(monkeypatch):
    """Huge embeddings on the padding's id (case 55); no mask at all must show the difference."""
    decoder = build(VARIANTS["plain"])
    prompts, configs = [SHORT, LONG], [GREEDY, GREEDY]
    expected = alone(decoder, prompts, configs)
    with torch.no_grad():
        decoder.embedding.weight[1] *= 1e6
    assert not any(1 in ids(events) for events in expected)

    def padded_with_1(rows):
        tokens, mask = left_padded(rows)
        return (tokens if mask is None else torch.where(mask, tokens, 1)), mask

    monkeypatch.setattr(batch, "left_padded", padded_with_1)
    assert_same(run(decoder, prompts, configs), expected)
    monkeypatch.setattr(batch, "left_padded", lambda rows: (padded_with_1(rows)[0], None))
    with pytest.raises(AssertionError):
        assert_same(run(decoder, prompts, configs), expected)


def test_padding_is_on_the_left_and_masked():
    tokens, mask = left_padded([[7, 8], [1, 2, 3]])
    assert tokens.tolist() == [[7, 7, 8], [1, 2, 3]]
    assert mask.tolist() == [[False, True, True], [True, True, True]]
    assert left_padded([[7, 8], [1, 2]])[1] is None


# --- prefill --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("name", ["plain", "window", "rope dynamic", "rope longrope"])
def test_a_prefill_in_chunks_is_a_whole_one(name, chunk):
    decoder = build(VARIANTS[name])
    prompts, configs = [SHORT, LONG * 2], [GREEDY, GREEDY]
    whole = run(decoder, prompts, configs)
    spy = Spy(decoder)
    assert_same(run(decoder, prompts, configs, prefill_chunk=chunk), whole)
    assert spy.shapes[0] == (2, chunk)


def test_only_the_last_position_is_projected_to_the_vocabulary():
    decoder = build(VARIANTS["plain"])
    shapes = []
    decoder.head.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    run(decoder, [LONG], [GREEDY], prefill_chunk=3)
    assert shapes == [(1, 1, 40)] * 5


# --- each step is a whole pass --------------------------------------------------------------


@pytest.mark.parametrize("name", SCALINGS)
def test_each_step_is_a_whole_pass_under_the_length_of_the_request(name):
    """Across the original window of 8, each row with a length of its own (cases 39 and 42)."""
    decoder = build(VARIANTS[f"rope {name}"])
    prompts = [LONG[:6], SHORT]
    configs = [
        SamplingConfig(max_tokens=n, temperature=0, logprobs=20) for n in (6, 4)
    ]  # full lengths 12 and 7: on either side of the window
    for prompt, config_, events in zip(
        prompts, configs, run(decoder, prompts, configs), strict=True
    ):
        whole = torch.tensor([prompt + ids(events)])
        with torch.no_grad():
            logits = decoder(whole, rotary_length=len(prompt) + config_.max_tokens)
        expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for event, row in zip(events, expected, strict=True):
            assert event.token_id == int(row.argmax())
            for token_id, value in event.logprob.top:
                assert value == pytest.approx(float(row[token_id]), abs=1e-10)


def test_the_length_of_the_request_matters_to_a_rule_that_varies():
    """Else the test above would hold for any length."""
    decoder = build(VARIANTS["rope longrope"])
    short, long = (
        run(decoder, [SHORT], [SamplingConfig(max_tokens=n, temperature=0, logprobs=0)])[0][0]
        for n in (4, 40)
    )
    assert abs(short.logprob.logprob - long.logprob.logprob) > 1e-3


# --- what ends a request --------------------------------------------------------------------


def test_each_request_ends_for_its_own_reason():
    decoder = build(VARIANTS["plain"])
    free = ids(run(decoder, [SHORT], [SamplingConfig(max_tokens=8, temperature=0)])[0])
    text = bytes(65 + i for i in free).decode()
    assert len(set(free[:4])) == 4, "the seed gives four different tokens first"
    configs = [
        SamplingConfig(max_tokens=8, temperature=0),
        SamplingConfig(max_tokens=8, temperature=0, stop=(text[1:3],), ignore_eos=True),
        SamplingConfig(max_tokens=8, temperature=0, ignore_eos=True),
    ]
    got = run(decoder, [SHORT] * 3, configs, eos_ids=(60, free[3], free[1]))
    assert [(ids(e), e[-1].finish_reason) for e in got] == [
        (free[:2], "eos"),
        (free[:3], "stop"),
        (free, "length"),
    ]
    assert ["".join(e.text for e in events) for events in got] == [text[:1], text[:1], text]


def test_the_tokenizers_own_eos_ids_are_the_default():
    decoder = build(VARIANTS["plain"])
    free = ids(run(decoder, [LONG], [GREEDY])[0])
    tokenizer = Letters()
    tokenizer.eos_ids = (free[0],)
    (event,) = generate(decoder, tokenizer, [LONG], [GREEDY])
    assert (event.token_id, event.text, event.finish_reason) == (free[0], "", "eos")


@pytest.mark.parametrize("name", ["plain", "learned"])
def test_a_completion_may_fill_the_window_and_not_pass_it(name):
    decoder = build(VARIANTS[name])
    events = run(decoder, [[1] * 60], [SamplingConfig(max_tokens=4)])[0]
    assert (len(events), events[-1].finish_reason) == (4, "length")
    spy = Spy(decoder)
    with pytest.raises(UserError, match=r"60 tokens .* window of 64"):
        generate(decoder, Letters(), [SHORT, [1] * 60], [GREEDY, GREEDY])
    assert spy.shapes == []  # refused before anything is computed, when called


def test_the_work_stops_when_the_iterator_is_dropped():
    """Case 119."""
    decoder = build(VARIANTS["plain"])
    spy = Spy(decoder)
    events = generate(decoder, Letters(), [LONG], [SamplingConfig(max_tokens=50)])
    for _ in range(3):
        next(events)
    events.close()
    assert len(spy.shapes) == 3


# --- texts ----------------------------------------------------------------------------------


def test_the_pieces_of_a_stream_are_the_text_of_its_tokens():
    """A vocabulary made mostly of pieces of one character, so that many are broken."""
    decoder = build(config(layer()))
    tokenizer = Letters()
    tokenizer.token_bytes = lambda i: "🦙é".encode()[i % 6 :][:1]
    events = list(generate(decoder, tokenizer, [LONG], [SamplingConfig(max_tokens=40, seed=2)]))
    prompt = b"".join(map(tokenizer.token_bytes, LONG))
    completion = b"".join(map(tokenizer.token_bytes, ids(events)))
    whole = (prompt + completion).decode("utf-8", "replace")
    assert whole.endswith("".join(event.text for event in events))
    assert any(event.text == "" for event in events)


def test_a_seed_repeats_its_text_and_another_does_not():
    decoder = build(VARIANTS["plain"])
    texts = [
        ids(run(decoder, [LONG], [SamplingConfig(max_tokens=12, seed=s)])[0]) for s in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


# --- a cache to go on from ------------------------------------------------------------------


def test_a_cache_keeps_a_conversation():
    """The second turn computes only what is new."""
    decoder = build(VARIANTS["plain"])
    cache = KVCache(decoder.config)
    first = run(decoder, [LONG], [GREEDY], cache=cache)
    assert cache.tokens.tolist() == [LONG + ids(first[0])[:-1]]
    turn = LONG + ids(first[0]) + [4, 4, 2]
    expected = run(decoder, [turn], [GREEDY])
    spy = Spy(decoder)
    assert_same(run(decoder, [turn], [GREEDY], cache=cache), expected)
    assert spy.shapes[0] == (1, 4)


@pytest.mark.parametrize("name", ["plain", "window", "rope dynamic", "rope longrope"])
@pytest.mark.parametrize(
    "edited",
    [[1, 2, 9, 4], [1, 2, 3], [7, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]],
    ids=["edited", "prefix", "other", "same", "longer"],
)
@pytest.mark.parametrize("windowed", [False, True])
def test_a_prompt_that_was_edited_is_as_if_run_afresh(name, edited, windowed):
    """Case 58; after 12 tokens a windowed layer of 3 cannot go back and is computed again."""
    decoder = build(VARIANTS[name])
    cache = KVCache(decoder.config, windowed=windowed)
    run(decoder, [[1, 2, 3, 4, 5]], [SamplingConfig(max_tokens=8, temperature=0)], cache=cache)
    expected = run(decoder, [edited], [GREEDY], cache=KVCache(decoder.config))
    assert_same(run(decoder, [edited], [GREEDY], cache=cache), expected)


# --- faults ---------------------------------------------------------------------------------


def test_a_cache_that_holds_padding_is_not_taken_for_a_prompt():
    """A row is padded with its own first token, so tokens alone cannot tell the two apart."""
    decoder = build(VARIANTS["plain"])
    cache = KVCache(decoder.config)
    padded = torch.tensor([[5, 5, 17]])
    decoder.prefill(padded, cache, mask=torch.tensor([[False, True, True]]))
    prompt = [5, 5, 17, 40]
    assert_same(run(decoder, [prompt], [GREEDY], cache=cache), run(decoder, [prompt], [GREEDY]))


def test_calls_that_do_not_fit_are_refused():
    decoder = build(VARIANTS["plain"])
    with pytest.raises(ValueError, match="2 prompts and 1 configs"):
        generate(decoder, Letters(), [SHORT, LONG], [GREEDY])
    with pytest.raises(ValueError, match="0 prompts"):
        generate(decoder, Letters(), [], [])
    cache = KVCache(decoder.config)
    with pytest.raises(ValueError, match="a cache of 1 rows for 2 prompts"):
        generate(decoder, Letters(), [SHORT, LONG], [GREEDY, GREEDY], cache=cache)
    with pytest.raises(ValueError, match="training mode"):
        generate(decoder.train(), Letters(), [SHORT], [GREEDY])


def test_the_callers_gradient_mode_is_left_alone():
    decoder = build(VARIANTS["plain"])
    modes = []
    decoder.head.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    for _ in generate(decoder, Letters(), [SHORT], [GREEDY]):
        assert torch.is_grad_enabled()
    assert modes == [False] * 5
