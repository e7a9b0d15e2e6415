"""Documents that losses are measured on: of prepared data, those that no training run sees."""

from pathlib import Path

import pytest

from armillary.data import TokenDataset, prepare
from armillary.data.bpe import train_bpe
from armillary.data.prepared import VALIDATION
from armillary.errors import UserError
from armillary.evaluation.texts import read_documents
from armillary.tokenizer import Tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_bpe(["some words and more of them\n" * 9], vocab_size=270)


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Forty documents of lengths that rise, a third of them held out."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"document {number}: " + "x" * number)
    prepare([str(texts)], tokenizer, tmp_path / "data", validation=0.3, workers=1)
    return tmp_path / "data"


def test_held_out_documents_are_those_of_the_split_without_their_end(
    prepared: Path, tokenizer: Tokenizer
) -> None:
    documents, notices = read_documents([str(prepared)], tokenizer, least=2)
    held_out = TokenDataset(prepared, VALIDATION)
    assert len(documents) == len(held_out) > 5
    assert notices == ()
    for document, tokens in zip(documents, held_out, strict=True):
        assert document.ids == tuple(tokens[:-1].tolist())
        assert tokens[-1] == held_out.end_id
        assert tokenizer.decode(list(document.ids)).startswith("document ")


def test_those_too_short_are_left_out_and_told(prepared: Path, tokenizer: Tokenizer) -> None:
    every, _ = read_documents([str(prepared)], tokenizer, least=2)
    least = sorted(len(document.ids) for document in every)[2]
    documents, notices = read_documents([str(prepared)], tokenizer, least=least)
    assert [d for d in every if len(d.ids) >= least] == list(documents)
    short = len(every) - len(documents)
    assert notices == (f"{short} documents have fewer than {least} tokens and are left out",)
    with pytest.raises(UserError, match="no document has 4,000 tokens"):
        read_documents([str(prepared)], tokenizer, least=4000)


def test_data_of_another_tokenizer_is_refused(prepared: Path) -> None:
    other = train_bpe(["quite another text\n" * 9], vocab_size=262)
    with pytest.raises(UserError, match="another tokenizer than the model's"):
        read_documents([str(prepared)], other, least=2)
