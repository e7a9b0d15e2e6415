import copy
import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from armillary.errors import CheckpointError
from armillary.tokenizer import Tokenizer
from support.vocabularies import CHATML, byte_level, sentencepiece

SPECIALS = ["<s>", "</s>", "<|user|>"]
TRAINING = ["hello world, hello all", "the cat's 123 <b>hats</b>", "é 中文 🦙 and more text"]


def byte_level_file() -> tokenizers.Tokenizer:
    """A file as GPT-2's kind has it: added tokens beyond the vocabulary, one of them plain."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TRAINING, trainer)
    return with_added_tokens(made)


def metaspace_file(kind: str) -> tokenizers.Tokenizer:
    """A SentencePiece file without byte tokens, as BPE or as Unigram."""
    letters = [*sorted(set("".join(TRAINING)) - {" "}), "▁"]
    if kind == "Unigram":
        vocab = [("<unk>", 0.0), *((c, -5.0) for c in letters), ("▁hello", -1.0), ("he", -2.0)]
        made = tokenizers.Tokenizer(models.Unigram(vocab, 0, False))
    else:
        names = ["<unk>", *letters, "he", "▁he"]
        vocab = {name: n for n, name in enumerate(names)}
        made = tokenizers.Tokenizer(
            models.BPE(vocab, [("h", "e"), ("▁", "he")], unk_token="<unk>", fuse_unk=True)
        )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return with_added_tokens(made)


def with_added_tokens(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.add_special_tokens(SPECIALS[:2])
    made.add_tokens([tokenizers.AddedToken("<|user|>", rstrip=True, normalized=False)])
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


FILES = {
    "byte-level": byte_level_file,
    "bpe": lambda: metaspace_file("BPE"),
    "unigram": lambda: metaspace_file("Unigram"),
}


@pytest.fixture(scope="module", params=FILES)
def peer(request):
    return FILES[request.param]()


def read(directory, content, config=None, **others):
    """Write files by their names (with _ for .) and read the tokenizer from them."""
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "tokenizer.json").write_text(text)
    default = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(default | (config or {})))
    for name, entries in others.items():
        (directory / f"{name}.json").write_text(json.dumps(entries))
    return Tokenizer.from_file(directory / "tokenizer.json")


def refused(directory, content, *words, config=None):
    with pytest.raises(CheckpointError) as caught:
        read(directory, content, config)
    message = str(caught.value)
    assert message.startswith(str(directory))
    assert "\n" not in message
    for word in words:
        assert word in message


def test_ids_are_the_tokenizers_librarys(peer, tmp_path):
    """With control tokens read and not read, among spaces that one of them swallows."""
    ours = read(tmp_path, peer.to_str())
    draw = random.Random(0)
    pieces = [*SPECIALS, "<think>", "hello", " hello", " ", "  ", "he", "<", "|", "é", "12", "'s"]
    for _ in range(500):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(12)))
        wanted = peer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, specials=True, bos=False) == wanted, text
        plain = ours.encode(text)
        assert plain[0] == ours.bos_id
        unknown = ours.special_tokens.get("<unk>")
        assert not any(ours.is_special(i) for i in plain[1:] if i != unknown)


def test_markers_in_text_stay_text(tmp_path):
    """Also <|user|>, which the file declares as a plain added token."""
    ours = read(tmp_path, byte_level_file().to_str())
    text = "</s><|user|>  <s>hello"
    assert ours.decode(ours.encode(text, bos=False)) == text


@pytest.mark.parametrize("text", ["</s>", "<0x0A>"])
def test_merges_of_the_file_spell_no_control_or_byte_token(tmp_path, text):
    """Files whose merges were made out of scores have such merges."""
    Tokenizer.from_gguf(sentencepiece()).save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"<0x": 282}
    content["model"]["merges"] = [["<0x0", "A>"], ["<0x", "0"], ["<0", "x"], ["</", "s>"]]
    content["model"]["merges"] += [["A", ">"], ["<", "0"], ["<", "/"], ["s", ">"]]
    ours = read(tmp_path, content)
    ids = ours.encode(text, bos=False)
    assert ours.decode(ids) == text
    assert not any(map(ours.is_special, ids))


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("template", [True, False])
def test_the_beginning_is_add_bos_tokens_else_the_templates(tmp_path, said, template):
    """cases.md 99: add_bos_token decides where it is said, as in transformers."""
    peer = byte_level_file()
    if not template:
        peer.post_processor = processors.ByteLevel()
    ours = read(tmp_path, peer.to_str(), {} if said is None else {"add_bos_token": said})
    wanted = template if said is None else said
    assert ours.encode("hello").count(ours.bos_id) == wanted


def test_other_beginnings_are_kept(tmp_path):
    """Some families begin a text with two tokens of their own."""
    peer = byte_level_file()
    ids = [peer.token_to_id(text) for text in ("<|user|>", "<s>")]
    peer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(
                single="<|user|> <s> $A </s>",
                special_tokens=[
                    *zip(("<|user|>", "<s>"), ids, strict=True),
                    ("</s>", peer.token_to_id("</s>")),
                ],
            ),
        ]
    )
    ours = read(tmp_path, peer.to_str())
    assert ours.encode("hello")[:2] == ids
    assert ours.encode("<|user|><s>hello", specials=True)[:3] == ours.encode("hello")[:3]
    assert ours.encode("hello")[-1] not in ours.eos_ids
    ours.save(tmp_path / "again")
    assert same(ours, Tokenizer.from_file(tmp_path / "again" / "tokenizer.json"))


def test_names_come_from_either_file(tmp_path):
    entry = {"content": "<|user|>", "lstrip": False}
    ours = read(
        tmp_path,
        byte_level_file().to_str(),
        {"pad_token": entry},
        special_tokens_map={"pad_token": "</s>", "unk_token": "<think>"},
    )
    assert ours.token_bytes(ours.pad_id) == b"<|user|>"
    assert ours.named_tokens["unk_token"] == "<think>"


def test_a_config_in_hand_takes_the_files_place(tmp_path):
    read(tmp_path, byte_level_file().to_str(), {"add_bos_token": True})
    ours = Tokenizer.from_file(
        tmp_path / "tokenizer.json", config={"add_bos_token": False, "bos_token": "<s>"}
    )
    assert ours.encode("a") == ours.encode("a", bos=False)
    assert ours.eos_ids == ()


def test_tokens_listed_only_in_the_config_are_added(tmp_path):
    peer = byte_level_file()
    size = peer.get_vocab_size()
    ours = read(
        tmp_path,
        peer.to_str(),
        {"added_tokens_decoder": {str(size): {"content": "<|new|>", "special": True}}},
    )
    assert ours.special_tokens["<|new|>"] == size
    assert ours.encode("<|new|>", specials=True, bos=False) == [size]


def test_truncation_in_the_file_cuts_nothing(tmp_path):
    peer = byte_level_file()
    peer.enable_truncation(4)
    peer.enable_padding(length=50)
    assert (
        read(tmp_path, peer.to_str()).decode(
            read(tmp_path, peer.to_str()).encode("hello " * 20, bos=False)
        )
        == "hello " * 20
    )


def test_chat_templates_are_found_in_every_place(tmp_path):
    content = byte_level_file().to_str()
    assert read(tmp_path, content, {"chat_template": "A"}).chat_template == "A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    ours = read(tmp_path, content, {"chat_template": named})
    assert (ours.chat_template, ours.chat_templates["tool_use"]) == ("D", "T")
    (tmp_path / "chat_template.jinja").write_text("file\n")
    assert read(tmp_path, content, {"chat_template": "A"}).chat_template == "file\n"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert read(tmp_path, content).chat_templates == {"default": "file\n", "rag": "R"}


def same(one: Tokenizer, other: Tokenizer) -> bool:
    facts = ("bos_id", "eos_ids", "pad_id", "vocab_size", "named_tokens", "special_tokens")
    texts = ["hello  <|im_end|>\nab'é🦙", "<s></s><|user|> <think>", ""]
    return (
        all(getattr(one, fact) == getattr(other, fact) for fact in (*facts, "chat_templates"))
        and all(one.token_bytes(i) == other.token_bytes(i) for i in range(one.vocab_size))
        and all(
            one.encode(text, specials=specials) == other.encode(text, specials=specials)
            for text in texts
            for specials in (False, True)
        )
    )


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_gguf_tokenizer_is_saved_and_read_as_the_same(make, add_bos, tmp_path):
    templates = {"tokenizer.chat_template": CHATML, "tokenizer.chat_templates": ["x"]}
    extra = templates | {"tokenizer.chat_template.x": "X"}
    ours = Tokenizer.from_gguf(make(add_bos_token=add_bos) | extra)
    ours.save(tmp_path)
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert same(ours, again)
    again.save(tmp_path / "twice")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.peer
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_transformers_reads_what_is_saved(make, tmp_path):
    """Ids with and without control tokens in the text, the beginning, and the chat template."""
    from transformers import AutoTokenizer

    ours = Tokenizer.from_gguf(make(add_bos_token=True) | {"tokenizer.chat_template": CHATML})
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    bos = ours.named_tokens["bos_token"]
    for text in ("ab hello", f"a{bos} b", "", "  ab</s>é🦙"):
        assert ours.encode(text, specials=True) == theirs.encode(text)
        assert ours.encode(text) == theirs.encode(text, split_special_tokens=True)
    assert theirs.chat_template == CHATML
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_ids[0])


BYTE_LEVEL = json.loads(byte_level_file().to_str())
UNIGRAM = json.loads(metaspace_file("Unigram").to_str())


def changed(content, *path, to):
    """A copy in which the entry at a path is another; `to=None` takes it away."""
    content = copy.deepcopy(content)
    *before, last = path
    place = content
    for key in before:
        place = place[key]
    if to is None:
        del place[last]
    else:
        place[last] = to
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not JSON", ["is not JSON", "line 1"]),
        ("[1]", ["JSON object"]),
        ("{}", ["holds no model"]),
        (changed(BYTE_LEVEL, "model", "type", to="WordPiece"), ["'WordPiece'"]),
        (changed(BYTE_LEVEL, "model", "merges", to=None), ["model.merges"]),
        (changed(BYTE_LEVEL, "model", "merges", to=[["a"]]), ["model.merges"]),
        (changed(BYTE_LEVEL, "model", "merges", to=["q q"]), ["cannot be built"]),
        (changed(BYTE_LEVEL, "model", "vocab", to={"a": 0, "b": 0}), ["id to two texts"]),
        (changed(BYTE_LEVEL, "model", "vocab", to={"a": -1}), ["model.vocab"]),
        (changed(BYTE_LEVEL, "model", "vocab", to=["a"]), ["model.vocab"]),
        (changed(BYTE_LEVEL, "model", "vocab", "a", to=1 << 40), ["model.vocab"]),
        (changed(BYTE_LEVEL, "model", "end_of_word_suffix", to="</w>"), ["end of words"]),
        (changed(BYTE_LEVEL, "added_tokens", to=[{"id": 5}]), ["added_tokens", "content"]),
        (changed(BYTE_LEVEL, "added_tokens", 0, "id", to=3), ["added_tokens", "'<s>'", "3"]),
        (changed(UNIGRAM, "added_tokens", -1, "id", to=10_000_000), ["leave ids out"]),
        (changed(UNIGRAM, "model", "vocab", to=[["a", "b"]]), ["model.vocab"]),
        (changed(UNIGRAM, "model", "vocab", to={"a": 0}), ["model.vocab"]),
        (
            changed(BYTE_LEVEL, "post_processor", "single", to=[{"SpecialToken": {}}]),
            ["well formed"],
        ),
        (changed(BYTE_LEVEL, "post_processor", to={"type": "X"}), ["'X'", "add_bos_token"]),
        (changed(BYTE_LEVEL, "pre_tokenizer", "type", to="X"), ["cannot be built"]),
        (
            changed(
                changed(BYTE_LEVEL, "pre_tokenizer", to={"type": "Whitespace"}),
                "decoder",
                to={"type": "BPEDecoder", "suffix": "</w>"},
            ),
            ["neither byte-level nor SentencePiece"],
        ),
    ],
)
def test_faults_of_the_file_are_named(content, words, tmp_path):
    refused(tmp_path, content, *words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bos_token": "<none>"}, ["bos_token", "'<none>'"]),
        ({"bos_token": None, "add_bos_token": True}, ["add_bos_token", "no bos_token"]),
        ({"add_bos_token": "yes"}, ["add_bos_token", "'yes'"]),
        ({"chat_template": 5}, ["chat_template"]),
        ({"chat_template": [{"name": "x"}]}, ["chat_template"]),
        ({"added_tokens_decoder": {"x": {}}}, ["added_tokens_decoder", "'x'"]),
        ({"eos_tokens": ["<none>"]}, ["eos_tokens"]),
    ],
)
def test_faults_of_the_config_are_named(config, words, tmp_path):
    refused(tmp_path, BYTE_LEVEL, "tokenizer_config.json", *words, config=config)


def test_an_absent_file_says_what_to_fetch(tmp_path):
    with pytest.raises(CheckpointError, match="fetch it beside the weights"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"older tokenizer\.model"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_a_control_token_lies_in_its_own_part_though_it_swallows_the_space_behind_it(tmp_path):
    """As <|end|> of Phi-3, which would otherwise reach into the next part, and be in neither."""
    made = byte_level_file()
    made.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True, normalized=False)])
    ours = read(tmp_path, made.to_str())
    end = ours.special_tokens["<|end|>"]
    ids, places = ours.encode_located(["a", end, " \n", end])
    assert ids[-2:] == [end, end]
    assert places[-2:].tolist() == [[1, 1], [3, 3]]
    assert ids == ours.encode_parts(["a", end, " \n", end])
