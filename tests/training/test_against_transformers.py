"""Fifty steps of AdamW beside transformers: the same weights and batches, the same losses."""

import pytest
import torch

from armillary.checkpoints import open_checkpoint
from armillary.training.loss import IGNORED, next_token_labels, next_token_loss
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.precision import Precision
from armillary.training.schedule import ScheduleConfig, factor, set_learning_rates
from armillary.weights import build_filled
from support.models import VOCABULARY
from support.peer_llama import build_peer, config_entries, save_peer

STEPS = 50
SCHEDULE = ScheduleConfig(steps=STEPS, kind="cosine", warmup=5, final=0.1)
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1)
MAX_NORM = 1.0


def batches():
    """Rows of a counting text, so that there is something to learn; the last tokens are padding."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        start = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
        stride = torch.randint(1, 3, (4, 1), generator=generator)
        lengths = torch.randint(5, 13, (4, 1), generator=generator)
        yield (start + stride * torch.arange(12)) % VOCABULARY, torch.arange(12) < lengths


def ours(decoder):
    precision, optimizer = Precision(), build_optimizer(decoder, OPTIMIZER)
    for step, (ids, mask) in enumerate(batches()):
        set_learning_rates(optimizer, SCHEDULE, step)
        hidden = decoder.hidden(ids, mask=mask)
        loss = next_token_loss(decoder, hidden, next_token_labels(ids, mask=mask), chunk=7)
        mean = loss.total / loss.count
        precision.backward(mean)
        precision.step(optimizer, MAX_NORM)
        yield float(mean.detach())


def theirs(peer):
    """The recipe in torch's and transformers' own words."""
    decayed = [p for p in peer.parameters() if p.dim() > 1]
    rest = [p for p in peer.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, (ids, mask) in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * factor(SCHEDULE, step)
        labels = ids.masked_fill(~mask, IGNORED)
        loss = peer(ids, attention_mask=mask.long(), labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), MAX_NORM)
        optimizer.step()
        yield float(loss.detach())


@pytest.mark.peer
@pytest.mark.parametrize("tied", [False, True])
def test_fifty_steps_lose_what_they_lose_in_transformers(tmp_path, tied):
    entries = config_entries("default", tie_word_embeddings=tied)
    peer = build_peer(entries, torch.float32)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if "norm" not in name:
                parameter.mul_(0.2)
    checkpoint = open_checkpoint(save_peer(peer, tmp_path / "peer"))
    decoder = build_filled(checkpoint.config, checkpoint.tensors, dtype=torch.float32)
    found, wanted = torch.tensor(list(ours(decoder))), torch.tensor(list(theirs(peer)))
    assert (found - wanted).abs().max() <= 1e-4
    assert wanted[-1] < wanted[0] - 1
