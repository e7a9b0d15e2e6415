"""Text from tokens: characters are never split and stop strings never shown (cases.md 104, 118)."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.generation.stream import TextStream
from armillary.tokenizer import Tokenizer

LLAMA = "🦙".encode()  # f0 9f a6 99


class Pieces:
    """Token i stands for the i-th of the given bytes; None is a control token."""

    def __init__(self, *pieces: bytes | None):
        self.pieces = pieces

    def is_special(self, token_id):
        return self.pieces[token_id] is None

    def token_bytes(self, token_id):
        piece = self.pieces[token_id]
        return b"<name>" if piece is None else piece

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def run(pieces, stop=(), prompt=()):
    """What each push shows, what finish shows, and whether a stop string was met."""
    n = len(pieces)
    stream = TextStream(Pieces(*pieces, *prompt), stop, range(n, n + len(prompt)))
    shown = [stream.push(i) for i in range(n)]
    return shown, stream.finish(), stream.stopped


def split(data: bytes, cuts) -> list[bytes]:
    """The bytes as pieces; some are empty, as those of control tokens are."""
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def ended(text: str, stops) -> tuple[str, bool]:
    """The specification of stop strings, one character at a time."""
    for end in range(1, len(text) + 1):
        met = [s for s in stops if text[:end].endswith(s)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


# --- characters (case 104) ------------------------------------------------------------------


def test_nothing_is_shown_until_the_character_is_whole():
    assert run([LLAMA[:1], LLAMA[1:2], LLAMA[2:3], LLAMA[3:]]) == (["", "", "", "🦙"], "", False)


def test_cut_after_three_bytes_one_replacement_comes_at_the_end():
    assert run([LLAMA[:1], LLAMA[1:2], LLAMA[2:3]]) == (["", "", ""], "\ufffd", False)


def test_an_invalid_byte_in_the_middle_becomes_a_replacement_at_once():
    assert run([b"a", b"\xff", b"b"]) == (["a", "\ufffd", "b"], "", False)
    # A character that breaks off is replaced when the byte after it shows that it did.
    assert run([LLAMA[:2], b"b"]) == (["", "\ufffdb"], "", False)


def test_a_genuine_replacement_character_is_text_like_any_other():
    assert run(["a\ufffd".encode(), b"b"]) == (["a\ufffd", "b"], "", False)
    assert run([b"a", b"\xef\xbf", b"\xbd"]) == (["a", "", "\ufffd"], "", False)


@pytest.mark.parametrize(
    "prompt",
    [
        [b"see " + LLAMA[:2]],
        [b"see ", LLAMA[:1], LLAMA[1:2]],
        [LLAMA[:2]],
        [LLAMA, LLAMA[:1], LLAMA[1:2], None],
        [LLAMA[1:], LLAMA[:2]],
        [None, None, LLAMA[:1], None, LLAMA[1:2]],
    ],
)
def test_the_completion_continues_the_character_that_the_prompt_ends_in(prompt):
    assert run([LLAMA[2:3], LLAMA[3:] + b"!"], prompt=prompt) == (["", "🦙!"], "", False)
    assert run([b"!"], prompt=prompt) == (["\ufffd!"], "", False)
    assert run([], prompt=prompt) == ([], "\ufffd", False)


@pytest.mark.parametrize("prompt", [[], [b"abc"], [LLAMA], [LLAMA[1:]], [b"\xff"], [None]])
def test_a_prompt_that_ends_on_whole_characters_adds_nothing(prompt):
    assert run([b"!"], prompt=prompt) == (["!"], "", False)


def test_control_tokens_have_no_text_and_break_no_character():
    assert run([b"a", None, LLAMA[:2], None, LLAMA[2:]]) == (["a", "", "", "", "🦙"], "", False)


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=12))
def test_any_split_of_any_bytes_gives_their_text(data, cuts):
    shown, rest, _ = run(split(data, cuts))
    assert "".join(shown) + rest == data.decode("utf-8", "replace")


@given(st.text(max_size=20), st.lists(st.integers(0, 80), max_size=12))
def test_any_split_of_text_shows_every_character_once_it_is_whole(text, cuts):
    pieces = split(text.encode(), cuts)
    shown, rest, _ = run(pieces)
    assert rest == ""
    for i in range(len(pieces)):
        so_far = b"".join(pieces[: i + 1])
        assert "".join(shown[: i + 1]) == so_far.decode("utf-8", "ignore")


# --- the tokenizers' spaces -----------------------------------------------------------------

WORDS = ["<s>", "</s>", "<tool>", "▁", "▁▁", "a", "▁b", "é", "<0xC3>", "<0xA9>", "<0x20>"]


def sentencepiece(directory, scheme):
    """A vocabulary of SentencePiece's kind whose texts get a space in front, or not."""
    added = [{"id": i, "content": WORDS[i], "special": i < 2} for i in range(3)]
    model = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(WORDS)},
            "merges": [],
            "byte_fallback": True,
            "unk_token": "<s>",
        },
    }
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(model))
    return Tokenizer.from_file(path, config={"bos_token": "<s>", "eos_token": "</s>"})


ids = st.lists(st.integers(0, len(WORDS) - 1), max_size=8)


@pytest.fixture(scope="module", params=["never", "first", "always"])
def tokenizer(request, tmp_path_factory):
    return sentencepiece(tmp_path_factory.mktemp("tokenizer"), request.param)


@given(prompt=ids, completion=ids)
def test_the_text_is_what_decoding_has_more_with_the_completion(tokenizer, prompt, completion):
    stream = TextStream(tokenizer, (), prompt)
    text = "".join(map(stream.push, completion)) + stream.finish()
    before = tokenizer.decode(prompt, skip_specials=True)
    whole = tokenizer.decode(prompt + completion, skip_specials=True)
    broken = prompt_breaks_off(tokenizer, prompt)
    assert before[: len(before) - broken] + text == whole


def prompt_breaks_off(tokenizer, prompt):
    """Whether the prompt ends in the first byte of é, which alone decodes to U+FFFD."""
    last_texts = [i for i in prompt if not tokenizer.is_special(i)][-1:]
    return last_texts == [WORDS.index("<0xC3>")]


def test_a_completion_keeps_its_space_after_a_text_and_not_after_bos_alone(tmp_path):
    tokenizer = sentencepiece(tmp_path, "first")
    bos, a, b = (WORDS.index(word) for word in ("<s>", "a", "▁b"))
    texts = {
        prompt: "".join(map(TextStream(tokenizer, (), prompt).push, [b, b]))
        for prompt in [(bos, a), (bos,), ()]
    }
    assert texts == {(bos, a): " b b", (bos,): "b b", (): "b b"}


# --- stop strings (case 118) ----------------------------------------------------------------


def test_a_stop_string_over_two_tokens_shows_nothing():
    assert run([b"ST", b"OP", b"x"], ("STOP",)) == (["", "", ""], "", True)


def test_what_only_began_like_a_stop_string_is_shown():
    assert run([b"STO", b"NE"], ("STOP",)) == (["", "STONE"], "", False)


def test_the_beginning_of_a_stop_string_is_shown_at_the_end():
    assert run([b"a", b"ST"], ("STOP",)) == (["a", ""], "ST", False)


def test_of_two_stops_the_shorter_prefix_ends_the_text():
    assert run([b"aS", b"TO", b"P"], ("STOP", "ST")) == (["a", "", ""], "", True)
    assert run([b"aS", b"TO", b"P"], ("ST", "STOP")) == (["a", "", ""], "", True)


def test_of_two_stops_that_end_together_the_longer_goes_whole():
    assert run([b"aSTO", b"Pb"], ("OP", "STOP")) == (["a", ""], "", True)


def test_text_before_a_stop_inside_one_token_is_shown():
    assert run([b"one\n\ntwo"], ("\n\n",)) == (["one"], "", True)


def test_a_stop_string_may_split_inside_a_character():
    assert run([b"a" + LLAMA[:2], LLAMA[2:] + b"b"], ("🦙",)) == (["a", ""], "", True)


def test_a_failed_beginning_may_hold_another():
    """After "aab" fails at the third a, "aa" is still held."""
    assert run([b"a", b"a", b"a", b"b"], ("aab",)) == (["", "", "a", ""], "", True)


def test_a_stop_that_ends_in_a_broken_character_is_met_at_the_end():
    assert run([b"a", LLAMA[:3]], ("\ufffd",)) == (["a", ""], "", True)


@given(
    text=st.text("ab🦙", max_size=12),
    stops=st.lists(st.text("ab🦙", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_any_split_of_any_text_ends_at_the_first_completed_stop(text, stops, cuts):
    pieces = split(text.encode(), cuts)
    stream = TextStream(Pieces(*pieces), tuple(stops))
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        assert not any(s in shown for s in stops)
        met = ended(b"".join(pieces[: i + 1]).decode("utf-8", "ignore"), stops)[1]
        assert stream.stopped == met  # at the very token that completes it
    assert (shown + stream.finish(), stream.stopped) == ended(text, stops)


@given(
    text=st.text("ab", max_size=12),
    stop=st.text("ab", min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=6),
)
def test_one_stop_string_splits_the_text(text, stop, cuts):
    shown, rest, stopped = run(split(text.encode(), cuts), (stop,))
    assert "".join(shown) + rest == text.split(stop)[0]
    assert stopped == (stop in text)
