"""tokenizer.model files of both kinds make the tokens that their own libraries make."""

import base64
import io
import itertools
from collections import Counter

import pytest

from armillary.errors import CheckpointError
from armillary.tokenizer import Tokenizer

regex = pytest.importorskip("regex", reason="what tiktoken cuts by; transformers brings it")
sentencepiece = pytest.importorskip("sentencepiece", reason="pip install armillary[peers]")
pytestmark = pytest.mark.peer

TEXT = """The quick brown fox jumps over the lazy dog, and it's 12345 o'clock; don't you'LL see?
Grüße aus Köln: naïve façade, “quoted” … ½. Once upon a time there was a tokenizer that learnt
to read by reading the same three lines over and over again, again and again, once and once more.
"""
PROBES = ["", "The fox", " the  dog's 123456 ", "Grüße\n\n  over", "今天 🙂", "don't\tsee"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def ranks():
    """Byte pairs learnt from the text as tiktoken's are: a token's rank is when it was made."""
    words = [[bytes([b]) for b in word.encode()] for word in regex.findall(LLAMA3, TEXT)]
    found = [bytes([b]) for b in range(256)]
    for _ in range(150):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.append(best[0] + best[1])
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = [best[0] + best[1]]
                at += 1
    return {token: rank for rank, token in enumerate(dict.fromkeys(found))}


def tiktoken_ids(ranks, text):
    """What tiktoken does: of all neighbours, those whose union has the lowest rank are joined."""
    ids = []
    for word in regex.findall(LLAMA3, text):
        raw = word.encode()
        if raw in ranks:
            ids.append(ranks[raw])
            continue
        parts = [bytes([b]) for b in raw]
        while len(parts) > 1:
            joined = [ranks.get(a + b) for a, b in itertools.pairwise(parts)]
            known = [rank for rank in joined if rank is not None]
            if not known:
                break
            at = joined.index(min(known))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write_ranks(path, ranks):
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_ranks_make_the_tokens_of_tiktoken(tmp_path, ranks):
    tokenizer = Tokenizer.from_meta(write_ranks(tmp_path / "tokenizer.model", ranks))
    for text in [*PROBES, TEXT]:
        assert tokenizer.encode(text, bos=False) == tiktoken_ids(ranks, text)
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text
    assert len(tokenizer.encode(TEXT, bos=False)) < len(TEXT) / 1.5


@pytest.mark.parametrize("newer", [False, True])
def test_the_special_tokens_are_llama_3s_at_their_ids(tmp_path, ranks, newer):
    path = write_ranks(tmp_path / "tokenizer.model", ranks)
    tokenizer = Tokenizer.from_meta(path, newer=newer)
    first, special = len(ranks), tokenizer.special_tokens
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.bos_id == first == special["<|begin_of_text|>"]
    assert tokenizer.encode("x")[0] == first
    assert special["<|start_header_id|>"] == first + 6
    assert special["<|eot_id|>"] == first + 9
    assert {first + 1, first + 9} <= set(tokenizer.eos_ids)
    assert special["<|reserved_special_token_0|>"] == first + 2
    last = "<|reserved_special_token_247|>" if newer else "<|reserved_special_token_250|>"
    assert special[last] == first + 255
    assert ("<|python_tag|>" in special) == newer


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_sentencepiece_models_make_its_own_tokens(tmp_path, add_dummy_prefix):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ours = Tokenizer.from_meta(tmp_path / "tokenizer.model")
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_id, ours.eos_ids[0]) == (theirs.bos_id(), theirs.eos_id())
    for text in [*PROBES, TEXT]:
        assert ours.encode(text, bos=False) == theirs.encode(text), text
        assert ours.encode(text)[0] == theirs.bos_id()


def test_what_is_neither_is_refused_in_one_line(tmp_path, ranks):
    path = tmp_path / "tokenizer.model"
    lines = write_ranks(path, ranks).read_bytes().splitlines()
    for content, message in [
        (b"", "neither"),
        (b"hello", "neither"),
        (b"\n\xff\xff\xff\xff", "neither"),
        (b"\n".join(lines[:100]), "all 256 bytes"),
        (b"\n".join([*lines, lines[-1]]), "line .* is not the token of rank"),
        (b"\n".join([*lines, b"!!!! 9"]), "line .* is not the token of rank"),
    ]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            Tokenizer.from_meta(path)
        assert "\n" not in str(caught.value)


def test_a_unigram_model_is_refused(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 20),
        model_writer=model,
        model_type="unigram",
        vocab_size=80,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(CheckpointError, match="that is not BPE; take the model's tokenizer.json"):
        Tokenizer.from_meta(tmp_path / "tokenizer.model")
