"""One request fed with logits made by hand: texts, reasons, reports, and what is refused."""

import math

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.generation.decode import Request, check_prompt
from armillary.generation.sampling import SamplingConfig
from support.models import config as decoder_config

LLAMA = "🦙".encode()
PIECES = [b"a", b"b", b"ST", b"OP", LLAMA[:2], LLAMA[2:], b"<eos>", b"<control>"]
A, B, ST, OP, HALF, OTHER_HALF, EOS, CONTROL = range(8)


class Pieces:
    def is_special(self, token_id):
        return token_id in (EOS, CONTROL)

    def token_bytes(self, token_id):
        return PIECES[token_id]


def logits_for(token_id):
    """Logits whose likeliest token is this one, with the rest in the order of their ids."""
    logits = -np.arange(8, dtype=np.float32)
    logits[token_id] = 5.0
    return logits


def run(tokens, prompt=(A,), eos_ids=(EOS,), **options):
    """The events of a request whose model insists on the given tokens, until it has ended."""
    request = Request(3, prompt, SamplingConfig(temperature=0, **options), Pieces(), eos_ids)
    events = []
    for token_id in tokens:
        events.append(request.take(logits_for(token_id)))
        if request.finish_reason is not None:
            break
    assert all(event.index == 3 for event in events)
    return events


def summary(events):
    assert all(event.finish_reason is None for event in events[:-1])
    ids = [event.token_id for event in events]
    return ids, "".join(event.text for event in events), events[-1].finish_reason


def test_length_is_the_reason_at_max_tokens():
    assert summary(run([A, B, A, B], max_tokens=3)) == ([A, B, A], "aba", "length")


def test_the_first_of_several_eos_ids_ends_the_text_and_is_reported():
    """It has no text even where it is no control token."""
    assert summary(run([A, B, A], eos_ids=(EOS, B))) == ([A, B], "a", "eos")
    assert summary(run([A, EOS, A], eos_ids=(EOS, B))) == ([A, EOS], "a", "eos")
    assert summary(run([A, EOS], max_tokens=2)) == ([A, EOS], "a", "eos")


def test_eos_can_be_ignored():
    assert summary(run([A, EOS, B], max_tokens=3, ignore_eos=True)) == ([A, EOS, B], "ab", "length")


def test_a_stop_string_over_two_tokens_ends_the_text_before_it():
    assert summary(run([A, ST, OP, B], stop=("STOP",))) == ([A, ST, OP], "a", "stop")
    assert summary(run([A, ST, OP], stop=("STOP",), max_tokens=3)) == ([A, ST, OP], "a", "stop")


def test_what_was_held_back_is_shown_with_the_last_token():
    assert summary(run([A, ST, EOS], stop=("STOP",))) == ([A, ST, EOS], "aST", "eos")
    assert summary(run([A, ST], stop=("STOP",), max_tokens=2)) == ([A, ST], "aST", "length")
    assert summary(run([HALF, EOS])) == ([HALF, EOS], "\ufffd", "eos")


def test_the_completion_ends_the_character_that_the_prompt_began():
    for prompt in ([A, HALF], [A, HALF, CONTROL]):
        events = run([OTHER_HALF, A], prompt=prompt, max_tokens=2)
        assert [event.text for event in events] == ["🦙", "a"]
    assert run([A], prompt=[HALF], max_tokens=1)[0].text == "\ufffda"
    assert run([A], prompt=[HALF, OTHER_HALF], max_tokens=1)[0].text == "a"


def test_the_penalty_is_on_prompt_and_completion():
    """5 halved twice over is no longer the likeliest beside 2.6 and 2.55, each seen in turn."""
    logits = np.float32([5.0, 2.6, 2.55, -9, -9, -9, -9, -9])
    config = SamplingConfig(temperature=0, repetition_penalty=2.0)
    request = Request(0, [A], config, Pieces(), ())
    assert [request.take(logits).token_id for _ in range(4)] == [1, 2, 0, 0]


def test_log_probabilities_are_those_of_the_model_before_any_step():
    """Temperature, penalty and top-k change what is chosen, not what is reported."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    config = SamplingConfig(temperature=0, repetition_penalty=9.0, top_k=1, logprobs=3)
    event = Request(0, [0], config, Pieces(), ()).take(logits)
    assert event.token_id == 1
    assert event.logprob.token_id == 1
    assert event.logprob.logprob == pytest.approx(math.log(0.3))
    assert [token for token, _ in event.logprob.top] == [0, 1, 2]
    assert [p for _, p in event.logprob.top] == pytest.approx(
        [math.log(p) for p in (0.4, 0.3, 0.2)]
    )


def test_zero_log_probabilities_report_the_chosen_token_alone():
    (event,) = run([B], max_tokens=1, logprobs=0)
    assert event.logprob.token_id == B
    assert event.logprob.top == ()
    assert run([B], max_tokens=1)[0].logprob is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 1, ["empty"]),
        ([1, -1], 1, ["token 1 ", "-1", "0 to 60"]),
        ([61], 1, ["token 0 ", "61", "0 to 60"]),
        ([1] * 65, 1, ["65 tokens", "window of 64"]),
        ([1] * 64, 1, ["64 tokens", "window of 64", "shorten"]),
        ([1] * 60, 5, ["max_tokens is 5", "60 tokens", "window of 64", "room for 4"]),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(prompt, max_tokens, words):
    with pytest.raises(UserError) as raised:
        check_prompt(prompt, SamplingConfig(max_tokens=max_tokens), decoder_config())
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("room", [4, 1])
def test_prompt_and_completion_may_fill_the_window(room):
    check_prompt([1] * (64 - room), SamplingConfig(max_tokens=room), decoder_config())
