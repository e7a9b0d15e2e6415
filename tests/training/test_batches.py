"""What an objective is given computes what the rows say, by the shortest way."""

import numpy as np
import torch

from armillary.data import IGNORED, Batch
from armillary.training.batches import arguments
from armillary.training.loss import next_token_loss
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


def test_skipped_positions_go_along_without_a_mask():
    batch = rows([[0, 0, 0, 0, 0], [0, 0, 0, -1, -1]])
    batch.positions[0] = [0, 1, 12, 13, 14]
    _, _, documents, positions = arguments(batch, CPU)
    assert documents is None
    assert positions.tolist() == batch.positions.tolist()


def test_skipped_positions_train_the_angles_of_a_long_row():
    """Loss and gradients are those of a row so long, in which the places between are not read."""
    batch = rows([[0, 0, 0, 0, 0]])
    at = [0, 1, 12, 13, 40]
    batch.positions[0] = at
    found = gradients(lambda objective: objective(*arguments(batch, CPU)))
    tokens, labels = torch.full((1, 41), 7), torch.full((1, 41), IGNORED)
    tokens[0, at], labels[0, at] = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    readable = torch.zeros(1, 41, dtype=torch.bool)
    readable[0, at] = True

    def long_row(objective):
        hidden = objective.decoder.hidden(tokens, mask=readable, positions=torch.arange(41))
        return next_token_loss(objective.decoder, hidden, labels)

    for name, expected in gradients(long_row).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)
    counted = rows([[0, 0, 0, 0, 0]])
    plain = gradients(lambda objective: objective(*arguments(counted, CPU)))
    name = "decoder.layers.0.attention.q.weight"
    assert (
        plain[name] - found[name]
    ).abs().max() > 1e-3  # they do differ from those of a short one


def gradients(loss_of):
    """The loss, and the gradient of every parameter."""
    objective = Objective(build(config()))
    loss = loss_of(objective).total
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in objective.named_parameters()}
