"""Deliberate faults of the engine: for each, a comparison of tests/engine must fail, and by far."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from armillary import reference
from armillary.engine import positions
from armillary.engine.cache import TextCache
from armillary.engine.decoder import EngineDecoder
from armillary.engine.plan import Plan
from armillary.engine.prefill import _Tiled
from armillary.engine.weights import Matrix, Weights
from support.engine import engine, text, weights_of
from support.models import EVERY_VARIANT
from support.mutate import mutate

EXACT, MARGIN, LENGTH = 1e-4, 10, 40
FEW = (8,) * 5
"""In passes of few rows; all at once they go through the tiles of prompts."""


def gap(name: str, sizes: tuple[int, ...] = (LENGTH,)) -> float:
    """How far the engine's logits are from the specification's, at worst: one text among others."""
    of = EVERY_VARIANT[name]
    ids = text(LENGTH)
    decoder = engine(of, width="float32", threads=1)
    caches = [decoder.new_cache() for _ in range(2)]
    worst, end = 0.0, 0
    for size in sizes:
        _, logits = decoder.take(caches, [[7], ids[end : end + size]], every=True)
        end += size
        whole = reference.forward(of.to_dict(), weights_of(of), np.array([ids[:end]]))[0]
        worst = max(worst, float(np.abs(logits - whole[-size:]).max()))
    return worst


@dataclass(frozen=True)
class Fault:
    """A change of a function's text, and the configuration and chunks that show it."""

    function: Callable[..., Any]
    old: str
    new: str
    name: str = "plain"
    sizes: tuple[int, ...] = (LENGTH,)


FAULTS = {
    "scores are not scaled": Fault(Plan._attend, "config.score_scale", "1.0", sizes=FEW),
    "scores of a prompt are not scaled": Fault(_Tiled._attend, "config.score_scale", "1.0"),
    "a window is one too long": Fault(
        Plan._of_cache, "config.window or 0", "(config.window or -1) + 1", "window", FEW
    ),
    "a prompt's window is one too long": Fault(
        Plan._of_cache, "config.window or 0", "(config.window or -1) + 1", "window"
    ),
    "no window": Fault(Plan._of_cache, "config.window or 0", "0", "mixed layers", FEW),
    "no window in a prompt": Fault(Plan._of_cache, "config.window or 0", "0", "mixed layers"),
    "no soft cap": Fault(Plan._of_cache, "config.soft_cap or 0.0", "0.0", "soft cap", FEW),
    "no soft cap in a prompt": Fault(Plan._of_cache, "config.soft_cap or 0.0", "0.0", "soft cap"),
    "keys are not turned": Fault(
        Plan._attention, "self._rotate(config, part", "part is q and self._rotate(config, part"
    ),
    "pairs are half the width apart in every layout": Fault(
        Plan._rotate, "rotate_{config.rotary.layout}", "rotate_half_split", "interleaved"
    ),
    "the keys' norm is the queries'": Fault(
        Plan._attention, '(k, "k_norm"', '(k, "q_norm"', "q/k norm"
    ),
    "the result is not added to the path": Fault(Plan._back, "adds=True", "adds=False"),
    "up is taken for gate": Fault(
        Plan._feedforward,
        "gate, up, stride = both, both.data[4 * f :]",
        "gate, up, stride = both, both.data",
        "fused glu",
    ),
    "a parallel path reads what attention has added": Fault(
        Plan._layer, 'layer.residual == "sequential"', "True", "parallel"
    ),
    "parallel paths share a norm": Fault(
        Plan._layer, 'layer.residual == "parallel"', "False", "parallel"
    ),
    "norms of results are left out": Fault(
        Plan._layer,
        'gives = layer.norm_placement != "post", layer.norm_placement != "pre"',
        'gives = layer.norm_placement != "post", False',
        "sandwich norm",
    ),
    "an offset of norms is forgotten": Fault(
        Plan._normalise, "config.offset", "0.0", "norm offset"
    ),
    "eps is another": Fault(Plan._normalise, "config.eps", "1e-2"),
    "embeddings are not scaled": Fault(
        Plan._embed, "self.config.embedding_scale", "1.0", "embedding scale"
    ),
    "no final soft cap": Fault(
        Plan._head, "config.final_soft_cap is not None", "False", "final soft cap"
    ),
    "no bias of the head": Fault(
        Plan._head, 'self._weights.optional("head.bias")', "None", "head bias"
    ),
    "positions begin at one": Fault(
        EngineDecoder._pass, "self._table(int(place))", "self._table(int(place) + 1)", "learned"
    ),
    "keys of other frequencies are kept": Fault(
        EngineDecoder._begin,
        "stale = cache.length and",
        "stale = False and",
        "rope longrope",
        (8, 32),
    ),
    "frequencies are those of the text before": Fault(
        EngineDecoder._begin, "cache.filled_at = length", "pass", "rope dynamic", (9, 1, 30)
    ),
    "no attention factor": Fault(
        positions.Angles.__init__, "rotary.scaling.attention_factor()", "1.0", "rope yarn"
    ),
    "a grown cache loses what it held": Fault(
        TextCache._take, "layer[:, : held.shape[1]] = held", "pass", sizes=(20, 20)
    ),
    "every expert is the first": Fault(
        Matrix.rows,
        "first * self.row_bytes : last * self.row_bytes",
        "0 : (last - first) * self.row_bytes",
        "experts",
    ),
    "experts count as if they were all": Fault(
        Plan._choose, "normalise=int(router.normalise)", "normalise=0", "experts"
    ),
    "the selection's bias is left out": Fault(
        Plan._choose,
        'self._weights.optional(name + "selection_bias")',
        "None",
        "experts, sigmoid in groups",
    ),
    "the shared network's gate is left out": Fault(
        Plan._mixture,
        "None if gate is None else gate.data",
        "None",
        "experts, shared one gated",
    ),
    "gates are not bounded": Fault(
        Plan._feedforward,
        "_LARGEST if config.limit is None else config.limit",
        "_LARGEST",
        "clipped glu",
    ),
    "sinks are left out": Fault(
        Plan._attention, 'self._weights.optional(name + "sinks")', "None", "sinks"
    ),
    "the key of all heads is not turned": Fault(
        Plan._latent, "self._rotate(config, kept, 1, 0, first=rank)", "pass", "latent"
    ),
    "the first channels of queries are turned": Fault(
        Plan._latent, "first=d_key", "first=0", "latent", FEW
    ),
    "queries have no channels that turn": Fault(
        Plan._latent, "own=q, tail", "own=wide, tail", "latent", FEW
    ),
    "vectors are not normalised": Fault(
        Plan._latent, "kept, kept, 1, rank, None", "kept, kept, 0, rank, None", "latent"
    ),
    "vectors that make queries are not normalised": Fault(
        Plan._latent_queries, "down, down, 1", "down, down, 0", "latent"
    ),
    "heads have the first one's values": Fault(
        Weights.of_heads, "(e * each + d_key, (e + 1) * each)", "(d_key, each)", "latent", FEW
    ),
    "keys' weights are read by rows": Fault(
        Weights.of_heads, ".T, form", ".reshape(whole.k, -1), form", "latent, queries direct"
    ),
}


def test_without_a_fault_there_is_no_gap() -> None:
    for name in sorted({fault.name for fault in FAULTS.values()}):
        for sizes in ((LENGTH,), FEW, (8, 32), (9, 1, 30), (20, 20)):
            assert gap(name, sizes) <= EXACT, (name, sizes)


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_fails_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    # Room that the text outgrows.
    monkeypatch.setattr("armillary.engine.kv_layout.CHUNK", 16)
    monkeypatch.setitem(TextCache.__init__.__kwdefaults__, "room", 16)
    mutate(monkeypatch, fault.function, fault.old, fault.new)
    assert gap(fault.name, fault.sizes) > MARGIN * EXACT
