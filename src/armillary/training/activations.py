"""What a forward pass keeps for the backward pass, from the configuration alone.

One function for each part, in the order in which the part computes; each names what torch holds
because an operation's gradient needs it. Tests count the same on real passes. Builds no model.

Symbols: B rows, T tokens of a row on this process, d = d_model, h, h_kv, d_h, f = d_ff.
"""

from collections import Counter
from dataclasses import dataclass, replace

from armillary.config import (
    AnyFeedForward,
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LatentConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
)
from armillary.parts.attention import QUERY_BLOCK

Kept = Counter[str]
"""Bytes by what they are."""

_WIDE = 4  # bytes of float32: weights, residual path, statistics
_OUT = ["attention.out"]


@dataclass(frozen=True)
class Pass:
    """One forward pass of one process.

    rows        B
    length      tokens of a whole row
    documents   whether several documents share a row, so that masks are written out
    narrow      bytes of the type that products are computed in; 4 is float32, without autocast
    tensor      processes that share each layer by heads and channels
    context     processes that share each row
    """

    rows: int
    length: int
    documents: bool = False
    narrow: int = 4
    tensor: int = 1
    context: int = 1

    @property
    def queries(self) -> int:
        """Tokens of a row that are computed here."""
        return self.length // self.context

    @property
    def tokens(self) -> int:
        """Tokens that are computed here."""
        return self.rows * self.queries


@dataclass(frozen=True)
class Adapted:
    """A frozen layer with adapters: the projections that have one, and what one is like."""

    projections: frozenset[str]
    rank: int
    dropout: bool


def layer_kept(layer: LayerConfig, d: int, run: Pass, adapted: Adapted | None = None) -> Kept:
    """What one layer keeps. Without `adapted` all its weights train."""
    before, after = layer.norm_placement != "post", layer.norm_placement != "pre"
    # Residual path read by norms: the layer's input, and what attention made of it.
    read = before + (before and layer.residual == "sequential")
    kept = Kept({"inputs of norms": _WIDE * run.tokens * d * (read + 2 * after)})
    trains = adapted is None
    for _ in range(before * (1 if layer.residual == "parallel_shared_norm" else 2)):
        kept += _norm("norms", layer.norm, run.tokens, d, _WIDE, trains)
    for _ in range(2 * after):
        kept += _norm("norms", layer.norm, run.tokens, d, run.narrow, trains)
    kept += _attention(layer.attention, d, run, adapted)
    # In float32 attention has kept what both sub-layers read.
    first = layer.residual != "parallel_shared_norm" or run.narrow < _WIDE
    if isinstance(layer.feedforward, MixtureConfig):
        kept += _mixture(layer.feedforward, d, run, adapted, first)
    else:
        kept += _dense("feedforward", layer.feedforward, d, run, adapted, first)
    if layer.dropout:
        kept["dropout"] += 2 * run.narrow * run.tokens * d
    return +kept


def outside_kept(config: DecoderConfig, run: Pass, trains: bool = True) -> Kept:
    """What is kept before and after the layers."""
    d, kept = config.d_model, Kept()
    if config.final_norm is not None:
        kept["input of the final norm"] += _WIDE * run.tokens * d
        kept += _norm("final norm", config.final_norm, run.tokens, d, _WIDE, trains)
    if config.input_dropout:
        kept["dropout"] += _WIDE * run.tokens * d
    # Rows have positions of their own where documents share them.
    rows = run.rows if run.documents else 1
    for rotary in dict.fromkeys(layer.attention.rotary for layer in config.layers):
        if rotary is not None:
            kept["rotations"] += 2 * _WIDE * rows * run.queries * (rotary.d_rotary // 2)
    return +kept


def widest(layer: LayerConfig, d: int, run: Pass) -> int:
    """Bytes of gradients on their way through a layer: the residual path's, and the widest one."""
    attention = layer.attention
    within = max(_width(layer.feedforward, d), attention.n_heads * attention.d_head) // run.tensor
    return run.tokens * (2 * _WIDE * d + run.narrow * max(within, d))


def _norm(name: str, norm: NormConfig, vectors: int, d: int, type_: int, trains: bool) -> Kept:
    """Besides its input in float32: statistics, and for the weight's gradient what it scales."""
    if norm.kind == "layer":
        return Kept({name: 2 * _WIDE * vectors})
    normal = type_ if norm.cast_before_weight else _WIDE
    return Kept({name: vectors * (_WIDE + normal * d * trains)})


def _attention(attention: AttentionConfig, d: int, run: Pass, adapted: Adapted | None) -> Kept:
    kept = Kept()
    if attention.latent is not None:
        return _latent(attention, attention.latent, d, run, adapted)
    h, h_kv = attention.n_heads // run.tensor, attention.n_kv_heads // run.tensor
    d_h, norm = attention.d_head, attention.qk_norm
    kept += _inputs(["attention.q", "attention.k", "attention.v"], d, run, adapted)
    if norm is not None:
        heads = run.tokens * (h + h_kv)
        kept["inputs of norms"] += _WIDE * heads * d_h
        kept += _norm("norms", norm, heads, d_h, run.narrow, adapted is None)
    kept += _attend(attention, h, h_kv, run)
    kept += _inputs(_OUT, h * d_h, run, adapted)
    return kept


def _latent(
    attention: AttentionConfig, latent: LatentConfig, d: int, run: Pass, adapted: Adapted | None
) -> Kept:
    """The vectors before and after their norms, and heads as they are attended with."""
    h, ranks = attention.n_heads, {"kv": latent.kv_rank}
    if latent.q_rank is not None:
        ranks["q"] = latent.q_rank
    reads = ["attention.kv_down", "attention.q_down" if "q" in ranks else "attention.q"]
    kept = _inputs(reads, d, run, adapted)
    for name, rank in ranks.items():
        kept["inputs of norms"] += _WIDE * run.tokens * rank
        kept += _norm("norms", latent.norm, run.tokens, rank, run.narrow, adapted is None)
        kept += _inputs([f"attention.{name}_up"], rank, run, adapted)
    kept += _attend(attention, h, h, run)
    kept += _inputs(_OUT, h * latent.d_value, run, adapted)
    return kept


def _attend(attention: AttentionConfig, h: int, h_kv: int, run: Pass) -> Kept:
    """Queries, keys and values as they are attended with, and what that keeps besides."""
    # Where values have a width of their own, the narrower of them and keys is filled up.
    rows, d_h = run.rows, max(attention.d_head, attention.d_value)
    queries = rows * h * run.queries
    pairs = rows * h_kv * (run.length if run.context > 1 else run.queries)
    scores = queries * run.length
    windowed = attention.window is not None and attention.window < run.length
    by_hand = attention.soft_cap is not None or attention.sinks
    plain = not (run.documents or windowed or run.context > 1 or by_hand)
    if not plain and run.queries // (2 if run.context > 1 else 1) > QUERY_BLOCK:
        # Computed again block by block, from what rotation has given in float32; keys and values
        # that are gathered from other processes are in one tensor.
        turned = _WIDE if attention.rotary is not None else run.narrow
        values = turned if run.context > 1 else run.narrow
        return Kept(
            {
                "queries": turned * queries * d_h,
                "keys and values": (turned + values) * pairs * d_h,
            }
        )
    if attention.dropout and not by_hand:
        # Only torch's plain path drops: float32, keys repeated for each head, scores held.
        return Kept(
            {
                "queries": _WIDE * queries * d_h,
                "keys and values": 2 * _WIDE * pairs * d_h * (h // h_kv),
                "scores": 3 * _WIDE * scores,
            }
        )
    kept = Kept(
        {
            "queries": run.narrow * queries * d_h,
            "keys and values": 2 * run.narrow * pairs * d_h,
        }
    )
    if by_hand:
        # Bounded scores, float32 weights and, if narrower, those that multiply values.
        bounded = run.narrow if attention.soft_cap is not None else 0
        narrow = run.narrow if run.narrow < _WIDE else 0
        dropped = run.narrow if attention.dropout else 0
        kept["scores"] = (bounded + _WIDE + narrow + dropped) * scores
        if run.documents or windowed:
            masks = (rows if run.documents else 1) * (h // h_kv) * run.queries * run.length
            kept["masks"] = masks  # one byte each
        return kept
    kept["attention's result"] = run.narrow * queries * d_h
    kept["scores"] = _WIDE * queries
    if not plain:
        # One mask for all heads, but a copy for each head of a group.
        masks = (rows if run.documents else 1) * (h // h_kv) * run.queries * run.length
        kept["masks"] = run.narrow * masks
    return kept


def _width(feedforward: AnyFeedForward, d: int) -> int:
    """Channels of a token where the feed-forward is widest."""
    if isinstance(feedforward, FeedForwardConfig):
        return feedforward.d_ff
    shared = 0 if feedforward.shared is None else feedforward.shared.d_ff
    return max(feedforward.top_k * max(feedforward.expert.d_ff, d), shared)


def _mixture(
    mixture: MixtureConfig, d: int, run: Pass, adapted: Adapted | None, first: bool
) -> Kept:
    """Scores and weights; what the chosen experts keep of their copies of tokens; their results."""
    tokens, k = run.tokens, mixture.top_k
    divided = (k + 1) * mixture.router.normalise
    kept = Kept(
        {
            "router": _WIDE * tokens * (mixture.n_experts + divided + k),
            "experts' results": run.narrow * tokens * k * d,
        }
    )
    if adapted is None:
        kept["inputs of projections"] += _WIDE * tokens * d * (first or run.narrow < _WIDE)
    copies = replace(run, rows=run.rows * k)
    kept += _dense("feedforward.experts", mixture.expert, d, copies, adapted, True)
    if mixture.shared is not None:
        # In float32 the router has kept what it reads.
        own = run.narrow < _WIDE
        kept += _dense("feedforward.shared", mixture.shared, d, run, adapted, own)
        if mixture.shared_gate:
            kept += _inputs(["feedforward.shared_gate"], d, run, adapted) if own else Kept()
            kept["shared expert's gate"] += run.narrow * tokens * (1 + d)
    return kept


def _dense(
    name: str,
    feedforward: FeedForwardConfig,
    d: int,
    run: Pass,
    adapted: Adapted | None,
    first: bool,
) -> Kept:
    """`first`: whether nothing else has kept what it reads."""
    kept = Kept()
    wide = run.tokens * feedforward.d_ff // run.tensor
    if feedforward.kind == "mlp":
        reads = [f"{name}.up"]
    elif feedforward.fused:
        reads = [f"{name}.gate_up"]
    else:
        reads = [f"{name}.gate", f"{name}.up"]
    if first:
        kept += _inputs(reads, d, run, adapted)
    by_result = feedforward.activation in {"relu", "sigmoid"}
    activated = feedforward.activation != "identity"
    if feedforward.kind == "glu":
        kept["gate"] += run.narrow * wide * (not by_result or not activated)
        kept["activated gate"] += run.narrow * wide * activated
        kept["up"] += run.narrow * wide
        kept["bounded"] += run.narrow * wide * (2 * (feedforward.limit is not None))
    else:
        kept["up"] += (
            run.narrow * wide * (activated and not (by_result and not feedforward.dropout))
        )
    if feedforward.activation == "quick_gelu":
        kept["activated gate"] += run.narrow * wide  # its sigmoid
    if feedforward.dropout:
        kept["dropout"] += run.narrow * wide
    kept += _inputs([f"{name}.down"], feedforward.d_ff // run.tensor, run, adapted)
    return kept


def _inputs(names: list[str], width: int, run: Pass, adapted: Adapted | None) -> Kept:
    """What projections of one vector keep of it: float32 once, else a narrow copy for each.

    A frozen projection keeps nothing, an adapter what it reads; dropout gives each its own.
    """
    if adapted is None:
        copies = 1 if run.narrow == _WIDE else len(names)
        return Kept({"inputs of projections": run.narrow * copies * run.tokens * width})
    count = len(adapted.projections.intersection(names))
    if not count:
        return Kept()
    shared = run.narrow == _WIDE and not adapted.dropout
    kept = Kept(
        {
            "inputs of projections": run.narrow * (1 if shared else count) * run.tokens * width,
            "adapters": run.narrow * count * run.tokens * adapted.rank,
        }
    )
    if adapted.dropout:
        # Of a norm's result in float32, of all others as they are.
        type_ = run.narrow if names == _OUT or names[0].endswith(".down") else _WIDE
        kept["dropout"] = type_ * count * run.tokens * width
    return kept
