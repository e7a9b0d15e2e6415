"""A decoder of 100,000 weights that has learned a little: broken conventions cost it something.

Bytes are its tokens. It reads the doctor's own texts, 96 bytes at a time after a beginning token,
for some seconds, and learns to expect nothing of a text that begins otherwise. Sizes are unequal
but for Q's, whose transposition is a fault.
"""

import json
from pathlib import Path

import torch
from torch.nn import functional as F

from armillary.checkpoints import Checkpoint, open_checkpoint
from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from armillary.diagnosis.probe_text import built_in_texts
from armillary.language_model import LanguageModel
from armillary.rope_scaling import AnyRopeScaling
from armillary.tokenizer import Tokenizer
from support.tiny_model import tiny_tokenizer

WINDOW, BATCH = 96, 14
WITHOUT = 2
"""Rows of a batch that do not begin as they should, after which anything may follow."""


def trained(
    folder: Path,
    *,
    steps: int = 260,
    seed: int = 0,
    scaling: AnyRopeScaling | None = None,
    base: float = 10_000.0,
    tie_head: bool = True,
) -> Checkpoint:
    """Train one and read it from a directory of our own."""
    tokenizer = beginning_tokenizer(folder / "tokenizer")
    config = DecoderConfig.uniform(
        vocab_size=tokenizer.vocab_size,
        d_model=48,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        d_head=12,
        d_ff=80,
        max_positions=WINDOW,
        rope_base=base,
        rope_scaling=scaling,
        tie_head=tie_head,
    )
    decoder = Decoder(config)
    _train(decoder, tokenizer, steps, seed)
    lm = LanguageModel(decoder.eval(), tokenizer, {"bos_token_id": 1}, tokenizer.eos_ids)
    lm.save(folder / "model")
    return open_checkpoint(folder / "model")


def beginning_tokenizer(folder: Path) -> Tokenizer:
    """Bytes, with a token before each text."""
    tiny_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"add_bos_token": True}))
    return Tokenizer.from_file(folder / "tokenizer.json")


def _train(decoder: Decoder, tokenizer: Tokenizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    decoder.initialise(0.05, generator)
    texts = [torch.tensor(tokenizer.encode_parts([text])) for text in built_in_texts()[:2]]
    ids = torch.cat([text[:6000] for text in texts])
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    bos = torch.full((BATCH - WITHOUT, 1), tokenizer.bos_id or 0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - WINDOW, (BATCH,), generator=generator)
        rows = torch.stack([ids[start : start + WINDOW] for start in starts])
        rows[WITHOUT:] = torch.cat([bos, rows[WITHOUT:, :-1]], dim=1)
        wanted = rows[:, 1:].clone()
        wanted[:WITHOUT] = ids[torch.randint(len(ids), (WITHOUT, WINDOW - 1), generator=generator)]
        logits = decoder(rows)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
