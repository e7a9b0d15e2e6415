"""Held-out loss is the token-weighted mean, bits per byte are of the text that was predicted."""

import gzip
import lzma
import math

import pytest
import torch
from torch.nn import functional as F

from armillary.data import IGNORED, PackedBatches, TokenDataset, prepare
from armillary.data.bpe import train_bpe
from armillary.training.objective import Objective
from armillary.training.parallel.ranks import Ranks
from armillary.training.precision import Precision
from armillary.training.validation import compressed_bits_per_byte, held_out_loss
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


def test_some_rows_are_the_first_ones(objective, batches):
    some = measure(objective, batches, rows=4)
    assert 0 < some.targets < measure(objective, batches).targets
    assert measure(objective, batches, rows=10_000) == measure(objective, batches)


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
