"""A tokenizer written as GGUF metadata makes the same tokens when it is read, or is refused."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.errors import CheckpointError
from armillary.tokenizer import Tokenizer
from armillary.tokenizer.gguf_write import GPT2_PATTERN
from support.downloads import llama_cpp_vocabularies
from support.vocabularies import CHATML, CONTROL, byte_level, sentencepiece

TEXTS = [
    "",
    " hello hello  12's <|im_end|> <think> x\n\n",
    "ab a b </s><0x0A>éß中",
]
MADE = {
    "byte-level": lambda: byte_level(add_bos_token=True),
    "byte-level, digits apart": lambda: byte_level(pre="smollm"),
    "byte-level, whole words first": lambda: byte_level(pre="llama-bpe"),
    "sentencepiece": sentencepiece,
    "sentencepiece, no space": lambda: sentencepiece(add_space_prefix=False),
}


def again(tokenizer, notices=None, size=None):
    size = tokenizer.vocab_size if size is None else size
    return Tokenizer.from_gguf(tokenizer.to_gguf(size, [] if notices is None else notices))


def assert_same(ours, theirs, texts):
    for text in texts:
        for specials in (False, True):
            ids = ours.encode(text, specials=specials)
            assert theirs.encode(text, specials=specials) == ids, text
        assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.special_tokens == ours.special_tokens
    assert theirs.named_tokens == ours.named_tokens
    assert theirs.eos_ids == ours.eos_ids
    assert theirs.chat_templates == ours.chat_templates


@pytest.mark.parametrize("name", MADE)
def test_the_same_tokens_are_made(name):
    ours = Tokenizer.from_gguf(MADE[name]())
    assert_same(ours, again(ours), TEXTS)


SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece())
WRITTEN = again(SENTENCEPIECE)


@given(st.text(alphabet="ab </s>0xAé▁\n", max_size=24))
@settings(max_examples=60)
def test_scores_that_are_made_of_merges_rank_them_alike(text):
    assert WRITTEN.encode(text) == SENTENCEPIECE.encode(text)


@pytest.mark.download
@pytest.mark.parametrize("which", ["gpt-2", "llama-spm", "phi-3"])
def test_vocabularies_of_llama_cpp_are_written_as_they_were(which):
    path = llama_cpp_vocabularies() / f"ggml-vocab-{which}.gguf"
    before = read_gguf_file(path).metadata
    ours = Tokenizer.from_gguf(before)
    after = ours.to_gguf(ours.vocab_size, [])
    for name in ("model", "tokens", "merges", "bos_token_id", "eos_token_id"):
        key = f"tokenizer.ggml.{name}"
        assert after.get(key) == before.get(key)
    if after["tokenizer.ggml.model"] == "gpt2":
        assert after["tokenizer.ggml.pre"] == before["tokenizer.ggml.pre"]
    text = path.with_suffix(".gguf.inp").read_text()
    assert Tokenizer.from_gguf(after).encode(text) == ours.encode(text)


def from_file(directory, made, **config):
    directory.mkdir(exist_ok=True)
    content = made if isinstance(made, dict) else json.loads(made.to_str())
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_file(directory / "tokenizer.json")


def bytes_file(*cuts):
    """Every byte, two merges; cut as told."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: n for n, text in enumerate([*alphabet, "he", "hel", "1a"])}
    merges = [("h", "e"), ("he", "l"), ("1", "a")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made


LAST = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern, behaviour="isolated", invert=False):
    return pre_tokenizers.Split(tokenizers.Regex(pattern), behaviour, invert)


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("cuts", "name"),
    [
        ([pre_tokenizers.ByteLevel(add_prefix_space=False)], "gpt-2"),
        (
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ],
            "smollm",
        ),
        ([split(GPT2_PATTERN, "removed", True), LAST], "gpt-2"),
        ([split(QWEN2), LAST], "qwen2"),
    ],
    ids=["one regex", "digits", "what matches", "a pattern"],
)
def test_a_cut_is_named_by_its_patterns_however_the_file_says_them(tmp_path, cuts, name):
    ours = from_file(tmp_path, bytes_file(*cuts), bos_token="<s>", eos_token="</s>")
    assert ours.to_gguf(ours.vocab_size, [])["tokenizer.ggml.pre"] == name
    assert_same(ours, again(ours), ["hel 11a hello's, 123\n  x", "中文 é"])


@pytest.mark.parametrize(
    "cuts",
    [
        [split(r"\w+|."), LAST],
        [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        [pre_tokenizers.Punctuation(), LAST],
        [split(GPT2_PATTERN, "merged_with_next"), LAST],
    ],
    ids=["another pattern", "a space before", "punctuation", "another behaviour"],
)
def test_a_cut_without_a_name_is_refused(tmp_path, cuts):
    ours = from_file(tmp_path, bytes_file(*cuts))
    with pytest.raises(CheckpointError, match=r"cuts a text .*; write a directory instead"):
        ours.to_gguf(ours.vocab_size, [])


def test_ids_without_a_token_are_filled_up_and_never_made(tmp_path):
    ours = Tokenizer.from_gguf(byte_level())
    size = ours.vocab_size + 3
    metadata = ours.to_gguf(size, [])
    tokens, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    assert tokens[-3:] == [f"[PAD{n}]" for n in range(size - 3, size)]
    assert types[-3:] == [5] * 3
    text = f"x {tokens[-1]} y"
    assert again(ours, size=size).encode(text, specials=True) == ours.encode(text, specials=True)
    with pytest.raises(CheckpointError, match=rf"token {size - 4} of .* has 9 embeddings"):
        ours.to_gguf(9, [])


def test_more_end_tokens_have_keys_of_their_own():
    """But for those that readers know by their texts."""
    more = byte_level()
    more["tokenizer.ggml.tokens"] += ["<a>", "<b>", "<c>"]
    more["tokenizer.ggml.token_type"] += [CONTROL] * 3
    ours = Tokenizer.from_gguf(more)
    a, b, c = (ours.special_tokens[f"<{name}>"] for name in "abc")
    notices = []
    metadata = ours.to_gguf(ours.vocab_size, notices, eos_ids=[2, 0, a, b, c])
    ids = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert ids == [2, a, b]
    assert notices == [f"GGUF has no key for the end tokens [{c}]"]


def test_chat_templates_keep_their_names():
    named = byte_level() | {
        "tokenizer.chat_template": CHATML,
        "tokenizer.chat_templates": ["tools"],
        "tokenizer.chat_template.tools": "{{ tools }}",
    }
    ours = Tokenizer.from_gguf(named)
    assert again(ours).chat_templates == {"default": CHATML, "tools": "{{ tools }}"}


def with_merges(directory, edit):
    """The SentencePiece vocabulary as a file, its merges edited."""
    SENTENCEPIECE.save(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    edit(content["model"]["merges"])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return from_file(directory, content, **names)


@pytest.mark.parametrize(
    "edit",
    [lambda merges: merges.reverse(), lambda merges: merges.append(merges.pop(0))],
    ids=["reversed", "the first last"],
)
def test_any_order_of_the_tokens_is_a_ranking(tmp_path, edit):
    ours = with_merges(tmp_path, edit)
    assert_same(ours, again(ours), TEXTS)


def test_added_tokens_need_no_merges(tmp_path):
    """A text that other tokens spell is found before they are merged, there as here."""
    SENTENCEPIECE.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    size = SENTENCEPIECE.vocab_size
    content["added_tokens"].append({"id": size, "content": "</ab", "special": False})
    ours = from_file(tmp_path, content, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    assert ours.encode("a</ab b")[-3] == size
    assert_same(ours, again(ours), [*TEXTS, "a</ab b </ab"])


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda merges: merges.pop(), "leave out a way to make"),
        (lambda merges: merges.append(["▁", "ab"]), "make a token at two ranks"),
    ],
    ids=["one less", "one again"],
)
def test_merges_that_scores_cannot_say_are_refused(tmp_path, edit, what):
    ours = with_merges(tmp_path, edit)
    with pytest.raises(CheckpointError, match=f"{what}.*; write a directory instead"):
        ours.to_gguf(ours.vocab_size, [])


def test_a_unigram_vocabulary_and_a_strange_beginning_are_refused(tmp_path):
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], 0, False))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    strange = bytes_file(pre_tokenizers.ByteLevel(add_prefix_space=False))
    strange.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", strange.token_to_id("</s>"))]
    )
    for made, what in ((unigram, "a Unigram vocabulary"), (strange, "a text's beginning with")):
        ours = from_file(tmp_path, made, bos_token="<s>" if made is strange else None)
        with pytest.raises(CheckpointError, match=what):
            ours.to_gguf(ours.vocab_size, [])


def test_what_gguf_leaves_out_is_said(tmp_path):
    """A normaliser, and that no space goes before a text that has one."""
    normalised = bytes_file(pre_tokenizers.ByteLevel(add_prefix_space=False))
    normalised.normalizer = tokenizers.normalizers.NFC()
    SENTENCEPIECE.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = None
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}
    content["pre_tokenizer"]["split"] = False
    for made, what in ((normalised, "normaliser"), (content, "behind every control token")):
        names = {} if made is normalised else {"unk_token": "<unk>", "bos_token": "<s>"}
        ours = from_file(tmp_path, made, **names)
        notices = []
        ours.to_gguf(ours.vocab_size, notices)
        assert len(notices) == 1
        assert what in notices[0]
