"""The objective is the decoder's loss, whole, and nothing else."""

import torch
from torch.nn import functional as F

from armillary import Decoder, DecoderConfig
from armillary.training.loss import IGNORED
from armillary.training.objective import Objective

CONFIG = DecoderConfig.uniform(
    vocab_size=61, d_model=40, n_layers=2, n_heads=6, n_kv_heads=2, d_head=10, d_ff=24,
    max_positions=32,
)  # fmt: skip


def test_it_is_the_cross_entropy_of_the_decoders_logits():
    decoder = Decoder(CONFIG).double()
    decoder.initialise(0.3, torch.Generator().manual_seed(1))
    tokens = torch.arange(14).reshape(2, 7) * 5 % 61
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0]])
    labels = (tokens * 3 + 1) % 61
    labels[documents < 0] = IGNORED
    labels[0, 2] = IGNORED
    loss = Objective(decoder, chunk=4)(tokens, labels, documents, positions)
    logits = decoder(tokens, documents=documents, positions=positions)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.cross_entropy, expected.detach(), rtol=1e-12, atol=0)
    assert int(loss.count) == 11
    alone = Objective(decoder)(tokens, labels)
    assert abs(float(alone.total) - float(loss.total)) > 1e-3  # documents do matter


def test_its_parameters_are_the_decoders_under_one_prefix():
    objective = Objective(Decoder(CONFIG))
    names = {f"decoder.{name}" for name, _ in objective.decoder.named_parameters()}
    assert {name for name, _ in objective.named_parameters()} == names


def test_the_z_loss_is_passed_on():
    objective = Objective(Decoder(CONFIG), z_loss=0.1)
    tokens = torch.arange(6).reshape(1, 6)
    loss = objective(tokens, tokens)
    assert float(loss.total) > float(loss.cross_entropy) + 0.1
