"""Held-out loss is the token-weighted mean, bits per byte are of the text that was predicted."""

import gzip
import lzma
import math
from itertools import islice

import pytest
import torch
from torch.nn import functional as F

from armillary.data import IGNORED, PackedBatches, TokenDataset, prepare
from armillary.data.bpe import train_bpe
from armillary.training.objective import Objective
from armillary.training.parallel.ranks import Ranks
from armillary.training.precision import Precision
from armillary.training.validation import _some, compressed_bits_per_byte, held_out_loss
from support.models import build, config, layer
from support.runs import write_texts


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    directory = tmp_path_factory.mktemp("validation")
    texts = write_texts(directory / "texts", documents=9)
    tokenizer = train_bpe([path.read_text() for path in sorted(texts.iterdir())], 280)
    prepare([str(texts)], tokenizer, directory / "data", validation=0.0)
    dataset = TokenDataset(directory / "data", "train")
    return PackedBatches(dataset, length=24, batch_size=4, seed=1)


@pytest.fixture(scope="module")
def objective():
    decoder = build(config(layer(dropout=0.5), vocab_size=280), dtype=torch.float64)
    return Objective(decoder).train()


def measure(objective, batches, rows=None):
    return held_out_loss(objective, batches, Precision("float32"), Ranks.single(), rows)


def test_it_is_the_mean_over_all_predicted_tokens(objective, batches):
    found = measure(objective, batches)
    assert objective.training  # as it was before
    nats = targets = size = 0
    objective.eval()
    for batch in batches.once():
        arrays = (batch.tokens, batch.documents, batch.labels)
        tokens, documents, labels = map(torch.from_numpy, arrays)
        logits = objective.decoder(tokens, documents=documents)
        nats += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        targets += int((labels != IGNORED).sum())
        size += sum(
            len(batches.dataset.tokenizer.token_bytes(int(label)))
            for label in labels[(labels != IGNORED) & (labels != batches.dataset.end_id)]
        )
    objective.train()
    assert found.targets == targets == batches.report.targets
    assert found.bytes == size
    assert found.loss == pytest.approx(nats / targets, rel=1e-12)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-12)


def test_some_rows_are_the_same_ones_each_time(objective, batches):
    some = measure(objective, batches, rows=4)
    assert 0 < some.targets < measure(objective, batches).targets
    assert measure(objective, batches, rows=4) == some
    assert measure(objective, batches, rows=10_000) == measure(objective, batches)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_no_row_is_measured_twice(objective, batches, size):
    """Nor left out, whether or not the last batch would go on into another epoch."""
    batches = PackedBatches(batches.dataset, length=24, batch_size=size, seed=1)
    found = measure(objective, batches, rows=batches.n_rows)
    assert found.targets == batches.report.targets
    assert found.loss == pytest.approx(measure(objective, batches).loss, rel=1e-12)


def test_some_rows_are_of_all_documents(tmp_path):
    """As they are planned, rows go through one document after the other."""
    for letter in "abc":
        (tmp_path / f"{letter}.txt").write_text(letter * 800)
    tokenizer = train_bpe(["abc"], 257)
    prepare([str(tmp_path / "*.txt")], tokenizer, tmp_path / "data", validation=0.0, workers=1)
    dataset = TokenDataset(tmp_path / "data", "train")
    one_by_one = PackedBatches(dataset, length=24, batch_size=1)
    drawn = list(islice(_some(one_by_one, 9), 20))
    assert len(drawn) == 9
    assert len({tuple(batch.tokens[0]) for batch in drawn}) == 3


def test_compressors_are_given_the_text_of_the_same_rows(batches):
    found = compressed_bits_per_byte(batches)
    tokenizer = batches.dataset.tokenizer
    text = b""
    for batch in batches.once():
        for token in batch.tokens[batch.documents >= 0].tolist():
            text += b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token)
    assert len(text) == batches.dataset.n_bytes
    assert found == {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
    assert compressed_bits_per_byte(batches, rows=4) != found


def test_a_rank_compresses_the_rows_of_all_ranks(batches):
    share = PackedBatches(batches.dataset, length=24, batch_size=4, seed=1, rank=1, ranks=2)
    assert compressed_bits_per_byte(share) == compressed_bits_per_byte(batches)
