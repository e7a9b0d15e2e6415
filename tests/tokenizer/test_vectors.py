"""The vectors that come with llama.cpp's vocabularies: texts, and the original models' ids."""

import pytest

from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.errors import CheckpointError
from armillary.tokenizer import Tokenizer
from support.downloads import llama_cpp_vocabularies

pytestmark = pytest.mark.download

NAMES = [
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
]
BETWEEN = "\n__ggml_vocab_test__\n"
REFUSED = {"bert-bge": "'bert' is not supported"}


def test_every_set_is_tried_or_refused():
    found = llama_cpp_vocabularies().glob("ggml-vocab-*.gguf.inp")
    named = {path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp") for path in found}
    assert named == {*NAMES, *REFUSED}


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_expected_ones(name):
    """As llama.cpp's own test takes them: no BOS, and control tokens in the text stay text."""
    path = llama_cpp_vocabularies() / f"ggml-vocab-{name}.gguf"
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().removesuffix(BETWEEN).split(BETWEEN)
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    tokenizer = Tokenizer.from_gguf(read_gguf_file(path).metadata)
    assert len(lines) >= 46
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, bos=False)
        assert ids == [int(number) for number in line.split()], text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(name):
    path = llama_cpp_vocabularies() / f"ggml-vocab-{name}.gguf"
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        Tokenizer.from_gguf(read_gguf_file(path).metadata)
