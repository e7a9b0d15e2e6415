"""What an objective is given computes what the rows say, by the shortest way."""

import numpy as np
import torch

from armillary.data import IGNORED, Batch
from armillary.training.batches import arguments
from armillary.training.objective import Objective
from support.models import build, config

CPU = torch.device("cpu")


def rows(documents):
    documents = np.array(documents)
    draw = np.random.default_rng(0)
    tokens = draw.integers(3, 61, documents.shape)
    positions = np.zeros_like(documents)
    for row, numbers in enumerate(documents):
        for number in set(numbers.tolist()):
            positions[row][numbers == number] = np.arange((numbers == number).sum())
    labels = np.where(documents >= 0, draw.integers(3, 61, documents.shape), IGNORED)
    return Batch(tokens, labels, documents, positions)


def test_rows_of_one_document_need_no_mask():
    """Padding stands behind, where causal order hides it."""
    batch = rows([[0, 0, 0, 0, 0], [0, 0, 0, -1, -1], [-1, -1, -1, -1, -1]])
    tokens, labels, documents, positions = arguments(batch, CPU)
    assert documents is None
    assert positions is None
    objective = Objective(build(config()))
    told = objective(tokens, labels, torch.from_numpy(batch.documents))
    torch.testing.assert_close(objective(tokens, labels).total, told.total, rtol=1e-12, atol=0)


def test_one_row_of_several_documents_is_enough_for_a_mask():
    batch = rows([[0, 0, 0, 0, 0], [0, 0, 1, 1, -1]])
    _, _, documents, positions = arguments(batch, CPU)
    assert documents.tolist() == batch.documents.tolist()
    assert positions.tolist() == batch.positions.tolist()
