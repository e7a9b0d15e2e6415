"""Conventions of GGUF files made wrong: llama.cpp must then leave our logits.

So that none of the comparisons in tests/parity/test_llama_cpp_convert.py passes by accident. The
faulty table is read back by itself, so that nothing refuses what it writes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from armillary.checkpoints import open_checkpoint
from armillary.checkpoints.families import FAMILIES
from armillary.checkpoints.families.experts import NORMALISE
from armillary.checkpoints.families.family import RECIPROCAL, Derived, GGUFTable, choice
from armillary.checkpoints.gguf_write import write_gguf
from armillary.checkpoints.layouts import Interleaved, Same
from armillary.weights import build_filled
from support.llama_cpp_peer import llama_cpp_peer, logits_of
from support.peer_families import LENGTH, as_gguf_can_say, build_peer
from support.peer_llama import save_peer
from support.tiny_model import tiny_tokenizer

pytestmark = [pytest.mark.llamacpp, pytest.mark.peer]

CLEARLY = 1e-2  # where 2e-3 is let pass
FAMILY = {family.name: family for family in FAMILIES}
Change = Callable[[GGUFTable], GGUFTable]


@dataclass(frozen=True)
class Fault:
    """A family's variant, and what is done to its table."""

    family: str
    variant: str
    change: Change


def exchanged(one: str, other: str) -> Change:
    """The names of two kinds of tensors."""

    def change(table: GGUFTable) -> GGUFTable:
        places = {one: other, other: one}
        names = {
            ours: next((t.replace(a, b) for a, b in places.items() if a in t), t)
            for ours, t in table.tensors.items()
        }
        return replace(table, tensors=names)

    return change


def key(name: str, **changes: Any) -> Change:
    """Another key."""

    def change(table: GGUFTable) -> GGUFTable:
        keys = tuple(replace(k, **changes) if k.name == name else k for k in table.keys)
        assert keys != table.keys
        return replace(table, keys=keys)

    return change


def never_permuted(table: GGUFTable) -> GGUFTable:
    """Queries and keys as half-split rotation has them."""
    plain = tuple(Same(e.name, e.ours) if isinstance(e, Interleaved) else e for e in table.layouts)
    assert plain != table.layouts
    return replace(table, layouts=plain)


def permuted(table: GGUFTable) -> GGUFTable:
    """Queries and keys as interleaved rotation has them."""
    moved = {o: t for o, t in table.tensors.items() if o.endswith((".q.weight", ".k.weight"))}
    assert moved
    layouts = tuple(Interleaved(theirs, (ours,)) for ours, theirs in moved.items())
    kept = {ours: theirs for ours, theirs in table.tensors.items() if ours not in moved}
    return replace(table, tensors=kept, layouts=(*table.layouts, *layouts))


def normalised(value: bool) -> Change:
    """Whether experts that are picked weigh 1 together."""
    return lambda table: replace(table, derived=(Derived((NORMALISE,), lambda _: value),))


FAULTS = {
    "mixtral: queries and keys are not permuted": Fault("mixtral", "plain", never_permuted),
    "mixtral: gate and up exchanged": Fault(
        "mixtral", "plain", exchanged("ffn_gate_exps", "ffn_up_exps")
    ),
    "mixtral: one expert fewer is used": Fault(
        "mixtral", "plain", key("expert_used_count", form=choice({1: 2}))
    ),
    "qwen3-moe: queries and keys are permuted": Fault("qwen3-moe", "as published", permuted),
    "qwen3-moe: experts count by their probabilities": Fault(
        "qwen3-moe", "plain", normalised(False)
    ),
    "olmoe: queries and keys are permuted": Fault("olmoe", "as many kv heads", permuted),
    "olmoe: experts weigh 1 together": Fault(
        "olmoe", "as many kv heads, normalised", normalised(True)
    ),
    "gpt-oss: gate and up exchanged": Fault(
        "gpt-oss", "plain", exchanged("ffn_gate_exps", "ffn_up_exps")
    ),
    "gpt-oss: one expert fewer is used": Fault(
        "gpt-oss", "plain", key("expert_used_count", form=choice({1: 2}))
    ),
    "deepseek-v3: softmax": Fault(
        "deepseek-v3",
        "plain",
        key("expert_gating_func", form=choice({2: "softmax", 1: "sigmoid"})),
    ),
    "deepseek-v3: experts are scaled down": Fault(
        "deepseek-v3", "plain", key("expert_weights_scale", form=RECIPROCAL, default=1.0)
    ),
    "deepseek-v3: gate and up exchanged in shared experts": Fault(
        "deepseek-v3", "plain", exchanged("ffn_gate_shexp", "ffn_up_shexp")
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_convention_that_is_wrong_is_noticed(tmp_path, name):
    fault = FAULTS[name]
    tokenizer = tiny_tokenizer(tmp_path / "t")
    entries = as_gguf_can_say(fault.family, fault.variant)
    peer = build_peer(fault.family, fault.variant, vocab_size=tokenizer.vocab_size, **entries)
    checkpoint = open_checkpoint(save_peer(peer, tmp_path / "m"))
    checkpoint = replace(checkpoint, tokenizer=tokenizer)
    family = FAMILY[fault.family]
    assert family.gguf is not None
    faulty = replace(family, gguf=fault.change(family.gguf))
    encodings = dict.fromkeys(checkpoint.tensors, "F32")
    write_gguf(tmp_path / "m.gguf", checkpoint, encodings, family=faulty)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, tokenizer.vocab_size, LENGTH)]
    decoder = build_filled(checkpoint.config, checkpoint.tensors)
    with torch.no_grad(), llama_cpp_peer(tmp_path / "m.gguf", LENGTH) as opened:
        ours = decoder(torch.tensor([ids]))[0].numpy()
        assert np.abs(logits_of(opened, ids) - ours).max() > CLEARLY
