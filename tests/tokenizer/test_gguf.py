import io

import pytest

from armillary.errors import CheckpointError
from armillary.tokenizer import Tokenizer
from support.vocabularies import CHATML, CONTROL, USER_DEFINED, byte_level, sentencepiece


def refused(metadata, *words):
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_gguf(metadata, where="model.gguf")
    message = str(caught.value)
    assert message.startswith("model.gguf: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "none", "x\ny"])
def test_other_vocabularies_are_refused_by_name(kind):
    refused(byte_level(model=kind), "tokenizer.ggml.model", repr(kind))


def test_an_unknown_pre_tokenizer_is_refused_by_name():
    """cases.md 114: never the default in silence."""
    refused(byte_level(pre="gpt-9"), "tokenizer.ggml.pre", "'gpt-9'")
    refused(byte_level(pre="default"), "tokenizer.ggml.pre")
    refused(byte_level(pre=None), "tokenizer.ggml.pre")


def test_one_more_token_changes_no_pre_tokenizer():
    """cases.md 114: the name decides, not a hash of what the vocabulary gives."""
    plain = byte_level(pre="qwen2")
    more = byte_level(pre="qwen2")
    more["tokenizer.ggml.tokens"].append("zq")
    more["tokenizer.ggml.token_type"].append(1)
    more["tokenizer.ggml.merges"].append("z q")
    text = "12 345's\tdon'T 我想 é😀 \t\t x  \n\n y"
    assert Tokenizer.from_gguf(plain).encode(text) == Tokenizer.from_gguf(more).encode(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"merges": None}, ["tokenizer.ggml.merges", "missing"]),
        ({"merges": ["h e", "h q"]}, ["tokenizer.ggml.merges", "entry 1", "'h q'"]),
        ({"merges": ["he"]}, ["tokenizer.ggml.merges", "entry 0"]),
        ({"merges": [7]}, ["tokenizer.ggml.merges", "entry 0"]),
        ({"merges": "h e"}, ["tokenizer.ggml.merges", "list", "str"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens", "missing"]),
        ({"tokens": []}, ["tokenizer.ggml.tokens", "empty"]),
        ({"tokens": ["a", "b", "a"]}, ["tokenizer.ggml.tokens", "'a'", "0", "2"]),
        ({"tokens": ["a", 5]}, ["tokenizer.ggml.tokens", "entry 1"]),
        ({"token_type": [1, 2]}, ["tokenizer.ggml.token_type", "2 entries", "272 tokens"]),
        ({"eos_token_id": 272}, ["tokenizer.ggml.eos_token_id", "272"]),
        ({"bos_token_id": -1}, ["tokenizer.ggml.bos_token_id", "-1"]),
        ({"bos_token_id": True}, ["tokenizer.ggml.bos_token_id", "bool"]),
        ({"add_bos_token": 1}, ["tokenizer.ggml.add_bos_token", "bool", "int"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["add_bos_token", "bos_token_id"]),
        ({"model": None}, ["tokenizer.ggml.model", "missing"]),
    ],
)
def test_faults_are_named(change, words):
    refused(byte_level(**change), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": None}, ["tokenizer.ggml.scores", "missing"]),
        ({"scores": [0.0]}, ["tokenizer.ggml.scores", "1 entries", "282 tokens"]),
        ({"scores": [float("nan")] * 282}, ["tokenizer.ggml.scores", "no number"]),
    ],
)
def test_faults_of_scores_are_named(change, words):
    refused(sentencepiece(**change), *words)


def test_missing_rules_are_those_of_llama_cpp():
    """SentencePiece begins with BOS unless told otherwise, GPT-2's kind does not, Llama 3 does."""
    assert Tokenizer.from_gguf(sentencepiece()).encode("a")[0] == 1
    ids = sentencepiece(bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    tokenizer = Tokenizer.from_gguf(ids)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert Tokenizer.from_gguf(byte_level()).encode("a")[0] != 1
    assert Tokenizer.from_gguf(byte_level(pre="llama-bpe")).encode("a")[0] == 1
    assert Tokenizer.from_gguf(byte_level(pre="llama-bpe", bos_token_id=None)).encode("a")[0] != 1


def test_the_space_before_a_text_can_be_switched_off():
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.token_bytes(tokenizer.encode("ab")[0]) == b"ab"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_every_end_token_is_known():
    metadata = byte_level(eot_token_id=0, eom_token_id=5)
    assert Tokenizer.from_gguf(metadata).eos_ids == (2, 0, 5)


def test_what_looks_like_a_marker_is_one():
    """Some files declare role markers as plain added tokens."""
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += ["<｜User｜>", "<|turn|>", "<tool>"]
    metadata["tokenizer.ggml.token_type"] += [USER_DEFINED] * 3
    tokenizer = Tokenizer.from_gguf(metadata)
    assert {"<｜User｜>", "<|turn|>"} <= set(tokenizer.special_tokens)
    assert "<tool>" not in tokenizer.special_tokens


def test_an_answer_in_parts_ends_with_the_last():
    metadata = byte_level(eos_token_id=None)
    metadata["tokenizer.ggml.tokens"] += ["<|end|>", "<|return|>", "<|call|>"]
    metadata["tokenizer.ggml.token_type"] += [CONTROL] * 3
    tokenizer = Tokenizer.from_gguf(metadata)
    ends = {tokenizer.token_bytes(i) for i in tokenizer.eos_ids}
    assert ends == {b"<|endoftext|>", b"<|im_end|>", b"<|return|>", b"<|call|>"}


def test_chat_templates_are_read():
    templates = {
        "tokenizer.chat_template": CHATML,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    tokenizer = Tokenizer.from_gguf(byte_level() | templates)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.chat_templates == {"default": CHATML, "tool_use": "{{ tools }}"}
    del templates["tokenizer.chat_template.tool_use"]
    refused(byte_level() | templates, "tokenizer.chat_template.tool_use", "missing")


TRAINING = """The quick brown fox jumps over the lazy dog.
    def rotate(x, y):  return x * cos - y * sin  # ==== ----
Pages 12, 123 and 1234 of 12345; </s> and <s> are only text here.
Łódź, naïve façade, Ελληνικά, 中文字, 🦙 and é, é again.
"""


@pytest.mark.peer
@pytest.mark.parametrize("size", [360, 420])
def test_merges_by_score_are_sentencepieces(size):
    """Random texts over a vocabulary just trained, also with runs of one character."""
    import random

    import sentencepiece as peer

    file = io.BytesIO()
    peer.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING.splitlines()),
        model_writer=file,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=1.0,
        minloglevel=2,
    )
    reference = peer.SentencePieceProcessor(model_proto=file.getvalue())
    ids = range(reference.get_piece_size())
    kinds = {0: 2, 1: 3, 2: 3}
    ours = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": list(map(reference.id_to_piece, ids)),
            "tokenizer.ggml.scores": list(map(reference.get_score, ids)),
            "tokenizer.ggml.token_type": [
                6 if reference.is_byte(i) else kinds.get(i, 1) for i in ids
            ],
        }
    )
    draw = random.Random(0)
    pieces = [*TRAINING, "  ", "    ", "====", "</s>", "<s>", "<0x0A>", "ü", "\t", "\n", "12"]
    for _ in range(2000):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(30)))
        assert ours.encode(text, bos=False) == reference.encode(text), text
