"""A prepared directory opens only when it is whole and what is wanted."""

import json

import numpy as np
import pytest

from armillary.data.dataset import TokenDataset
from armillary.data.preparation import prepare
from armillary.errors import CheckpointError, UserError
from armillary.files import write_manifest
from armillary.tokenizer import Tokenizer
from support.datasets import made_up
from support.tiny_model import tiny_tokenizer
from support.vocabularies import byte_level, sentencepiece

DOCUMENTS = [[5, 6, 2], [7, 2], [8, 9, 10, 11, 2], [2], [12, 13, 2], [14, 15, 16, 2], [17, 2]]


@pytest.mark.parametrize("shard_documents", [1, 2, 3, 7, 9])
def test_documents_come_by_number_whatever_the_shards(tmp_path, shard_documents):
    dataset = made_up(tmp_path / "d", DOCUMENTS, shard_documents=shard_documents)
    assert len(dataset) == 7
    assert [dataset[n].tolist() for n in range(7)] == DOCUMENTS
    assert dataset[-1].tolist() == DOCUMENTS[-1]
    assert dataset.lengths.tolist() == [len(ids) for ids in DOCUMENTS]
    assert dataset.read(2, 1, 3).tolist() == [9, 10]
    assert dataset.read(2, 3, 99).tolist() == [11, 2]
    assert dataset.n_tokens == 20
    with pytest.raises(IndexError, match="document 7 of 7"):
        dataset[7]


def test_tokens_are_mapped_not_read(tmp_path):
    dataset = made_up(tmp_path / "d", DOCUMENTS)
    assert isinstance(dataset[0], np.memmap)
    assert not dataset[0].flags.writeable


@pytest.mark.parametrize("shard_documents", [1, 2, 3, 9])
def test_what_is_learned_is_said_of_any_part_of_a_chat(tmp_path, shard_documents):
    masks = [[n % 3 == 0 for n in ids] for ids in DOCUMENTS]
    dataset = made_up(tmp_path / "d", DOCUMENTS, masks=masks, shard_documents=shard_documents)
    assert dataset.masked
    for number, mask in enumerate(masks):
        assert dataset.read_learned(number, 0, 99).tolist() == mask
        assert dataset.read_learned(number, 1, 3).tolist() == mask[1:3]
    numbers, starts, stops = np.array([6, 2, 2, 0, 3]), np.arange(5) % 2, np.array([9, 3, 9, 2, 1])
    assert dataset.count_learned(numbers, starts, stops).tolist() == [
        sum(masks[n][start:stop]) for n, start, stop in zip(numbers, starts, stops, strict=True)
    ]


def test_all_of_a_text_is_learned(tmp_path):
    dataset = made_up(tmp_path / "d", DOCUMENTS)
    assert not dataset.masked
    assert dataset.read_learned(2, 1, 3).tolist() == [True, True]
    assert dataset.read_learned(2, 3, 99).tolist() == [True, True]
    counts = dataset.count_learned(np.array([0, 2]), np.array([1, 0]), np.array([9, 2]))
    assert counts.tolist() == [2, 2]


def test_runs_that_do_not_fit_their_tokens_are_refused(tmp_path):
    masks = [[True] * len(ids) for ids in DOCUMENTS]
    made_up(tmp_path / "d", DOCUMENTS, masks=masks)
    path = tmp_path / "d" / "train" / "00001.learned.npy"
    np.save(path, np.array([5, 900]))
    (tmp_path / "d" / "manifest.json").unlink()
    write_manifest(tmp_path / "d")
    with pytest.raises(UserError, match=r"00001\.learned\.npy: 2 borders are no runs of 8 tokens"):
        TokenDataset(tmp_path / "d")


def test_chats_written_by_another_template_than_the_models_are_refused(tmp_path):
    """Cases.md 90: a mask that belongs to another template."""
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    source = [str(tmp_path / "a.jsonl")]
    prepare(source, tokenizer, tmp_path / "d", format="chat", validation=0, workers=1)
    assert TokenDataset(tmp_path / "d", tokenizer=tokenizer).masked
    tokenizer.chat_templates["default"] += " "
    with pytest.raises(UserError, match="another chat template than the model's"):
        TokenDataset(tmp_path / "d", tokenizer=tokenizer)
    del tokenizer.chat_templates["default"]  # as of a base model
    assert TokenDataset(tmp_path / "d", tokenizer=tokenizer).masked


@pytest.fixture
def written(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("é and <|im_end|>")
    prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "d", validation=0, workers=1)
    return tmp_path / "d", tokenizer


def test_the_tokenizer_comes_along_and_another_one_is_refused(written):
    path, tokenizer = written
    dataset = TokenDataset(path, tokenizer=tokenizer, verify=True)
    assert dataset.tokenizer.decode(dataset[0][:-1]) == "é and <|im_end|>"
    assert dataset.end_id == tokenizer.eos_ids[0]
    assert dataset.vocab_size == tokenizer.vocab_size
    with pytest.raises(UserError, match="was prepared with another tokenizer than the model's"):
        TokenDataset(path, tokenizer=Tokenizer.from_gguf(byte_level()))


def test_other_settings_than_those_wanted_are_refused(written):
    path, _ = written
    TokenDataset(path, settings={"seed": 0, "validation": 0.0})
    with pytest.raises(UserError, match="seed is 0, not 1; validation is 0.0, not 0.5"):
        TokenDataset(path, settings={"seed": 1, "validation": 0.5})


def test_a_split_without_documents_is_refused(written):
    with pytest.raises(UserError, match="has no documents in 'validation', only: train"):
        TokenDataset(written[0], "validation")


def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text(written):
    path, _ = written
    dataset = TokenDataset(path)
    assert dataset.token_bytes[dataset[0]].sum() == dataset.n_bytes == len("é and <|im_end|>") + 1
    assert dataset.token_bytes[dataset.end_id] == 0


def test_byte_tokens_of_sentencepiece_count_one_byte_each(tmp_path):
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    (tmp_path / "a.txt").write_text("é🦙")
    prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "d", validation=0, workers=1)
    dataset = TokenDataset(tmp_path / "d")
    spaces = 1  # SentencePiece puts one before a text
    assert dataset.token_bytes[dataset[0]].sum() == dataset.n_bytes + spaces


@pytest.mark.parametrize("fault", ["descending", "beyond", "another type", "no array"])
def test_borders_that_do_not_fit_are_refused(tmp_path, fault):
    made_up(tmp_path / "d", DOCUMENTS)
    path = tmp_path / "d" / "train" / "00000.offsets.npy"
    borders = np.load(path)
    if fault == "descending":
        np.save(path, borders[[0, 2, 1, 3]])
    elif fault == "beyond":
        np.save(path, np.append(borders[:-1], 99))
    elif fault == "another type":
        np.save(path, borders.astype(np.float64))
    else:
        path.write_bytes(b"borders")
    (tmp_path / "d" / "manifest.json").unlink()
    write_manifest(tmp_path / "d")
    with pytest.raises(UserError, match=r"00000\.offsets\.npy: "):
        TokenDataset(tmp_path / "d")


def test_a_pickle_is_not_opened(tmp_path):
    made_up(tmp_path / "d", DOCUMENTS)
    path = tmp_path / "d" / "train" / "00000.tokens.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "d" / "manifest.json").unlink()
    write_manifest(tmp_path / "d")
    with pytest.raises(UserError, match=r"00000\.tokens\.npy: cannot be read"):
        TokenDataset(tmp_path / "d")


def test_a_cut_shard_is_noticed_on_opening(tmp_path):
    made_up(tmp_path / "d", DOCUMENTS)
    path = tmp_path / "d" / "train" / "00001.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00001\.tokens\.npy: has \d+ bytes"):
        TokenDataset(tmp_path / "d")


def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path):
    made_up(tmp_path / "d", DOCUMENTS)
    path = tmp_path / "d" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../x"] = manifest["files"]["dataset.json"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not name a file inside"):
        TokenDataset(tmp_path / "d")
