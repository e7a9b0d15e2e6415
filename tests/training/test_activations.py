"""What the tables say is kept is what autograd keeps."""

import pytest
import torch

from armillary import Decoder
from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LatentConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RotaryConfig,
    RouterConfig,
)
from armillary.training.activations import Adapted, Kept, Pass, layer_kept, outside_kept
from armillary.training.lora import LoraConfig, add_lora
from armillary.training.precision import Precision

ROWS = 3
D = 40


def decoder_of(attention=None, feedforward=None, layer=None, **outside) -> DecoderConfig:
    sizes = {"n_heads": 6, "n_kv_heads": 2, "d_head": 10, "rotary": RotaryConfig(d_rotary=6)}
    if not isinstance(feedforward, MixtureConfig):
        feedforward = FeedForwardConfig(**{"d_ff": 24, **(feedforward or {})})
    one = LayerConfig(
        attention=AttentionConfig(**{**sizes, **(attention or {})}),
        feedforward=feedforward,
        **(layer or {}),
    )
    return DecoderConfig(vocab_size=61, d_model=D, max_positions=2048, layers=(one, one), **outside)


def mixture(**entries) -> MixtureConfig:
    given = {"n_experts": 6, "top_k": 2, "expert": FeedForwardConfig(d_ff=14)} | entries
    return MixtureConfig(**given)


LAYER_NORM = NormConfig(kind="layer", bias=True)
SHARED = FeedForwardConfig(d_ff=18)
SIGMOID = RouterConfig(score="sigmoid", normalise=False, selection_bias=True)
BOUNDED = FeedForwardConfig(d_ff=14, activation="quick_gelu", limit=7.0, up_offset=1.0, bias=True)
VARIANTS = {
    "plain": decoder_of(),
    "biases": decoder_of({"qkv_bias": True, "out_bias": True}, {"bias": True}),
    "qk norm": decoder_of({"qk_norm": NormConfig()}),
    "qk norm, cast after": decoder_of({"qk_norm": NormConfig(cast_before_weight=False)}),
    "qk layer norm": decoder_of({"qk_norm": LAYER_NORM}),
    "window": decoder_of({"window": 20}),
    "soft cap": decoder_of({"soft_cap": 20.0}),
    "latent": decoder_of(
        {
            "n_kv_heads": 6,
            "latent": LatentConfig(kv_rank=12, q_rank=14, d_rope=6, d_value=8),
        }
    ),
    "sinks": decoder_of({"sinks": True}),
    "attention dropout": decoder_of({"dropout": 0.1}),
    "mlp": decoder_of(feedforward={"kind": "mlp", "activation": "gelu"}),
    "relu mlp": decoder_of(feedforward={"kind": "mlp", "activation": "relu"}),
    "relu mlp, dropout": decoder_of(
        feedforward={"kind": "mlp", "activation": "relu", "dropout": 0.1}
    ),
    "reglu": decoder_of(feedforward={"activation": "relu"}),
    "bilinear": decoder_of(feedforward={"activation": "identity"}),
    "fused": decoder_of(feedforward={"fused": True}),
    "feed-forward dropout": decoder_of(feedforward={"dropout": 0.1}),
    "dropout": decoder_of(layer={"dropout": 0.1}, input_dropout=0.1),
    "post": decoder_of(layer={"norm_placement": "post"}),
    "sandwich": decoder_of(layer={"norm_placement": "sandwich"}),
    "parallel": decoder_of(layer={"residual": "parallel"}),
    "shared norm": decoder_of(layer={"residual": "parallel_shared_norm"}),
    "layer norm": decoder_of(layer={"norm": LAYER_NORM}, final_norm=LAYER_NORM),
    "no final norm": decoder_of(final_norm=None),
    "quick gelu": decoder_of(feedforward={"activation": "quick_gelu"}),
    "bounded": decoder_of(feedforward={"limit": 7.0, "up_offset": 1.0}),
    "experts": decoder_of(feedforward=mixture()),
    "experts, shared": decoder_of(
        feedforward=mixture(shared=SHARED, shared_gate=True, router=SIGMOID)
    ),
    "experts, bounded": decoder_of(feedforward=mixture(expert=BOUNDED)),
    "experts, shared norm": decoder_of(
        feedforward=mixture(shared=SHARED), layer={"residual": "parallel_shared_norm"}
    ),
}


def measured(decoder: Decoder, length: int, documents: bool, precision: str) -> int:
    """Bytes that autograd saves in a forward pass, besides weights and their narrow copies."""
    weights = list(decoder.parameters())
    theirs = {weight.untyped_storage().data_ptr() for weight in weights}
    # Of a stack of experts each is copied by itself.
    matrices = [w.shape[-2:] if w.dim() == 3 else w.shape for w in weights]
    shapes = {tuple(shape) for matrix in matrices for shape in (matrix, matrix[::-1])}
    tokens = torch.arange(ROWS * length).reshape(ROWS, length) % 61
    numbers = (torch.arange(length) // 7).expand(ROWS, length).contiguous()
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_copy = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in theirs and not is_copy and tensor.dtype != torch.int64:
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, Precision(precision).autocast():
        hidden = decoder.hidden(tokens, documents=numbers if documents else None)
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def planned(config: DecoderConfig, run: Pass, adapted: Adapted | None = None) -> int:
    kept = outside_kept(config, run, adapted is None)
    for layer in config.layers:
        kept += layer_kept(layer, config.d_model, run, adapted)
    return kept.total()


LONG = [(name, 520) for name in ("plain", "window", "soft cap", "attention dropout")]


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "length"), [*((name, 96) for name in VARIANTS), *LONG])
def test_it_is_what_autograd_keeps(variant, length, precision, documents):
    """520 tokens are more than attention scores at once."""
    decoder = Decoder(VARIANTS[variant]).train()
    run = Pass(ROWS, length, documents, narrow=4 if precision == "float32" else 2)
    kept = measured(decoder, length, documents, precision)
    assert planned(decoder.config, run) == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", [("attention.q",), ("attention.out", "feedforward.down")])
def test_frozen_layers_keep_what_adapters_need(names, precision, dropout):
    # Before the first adapter nothing is kept; with many layers that is little.
    config = VARIANTS["plain"].model_copy(update={"layers": VARIANTS["plain"].layers * 6})
    decoder = Decoder(config).train()
    targets = tuple(f"layers.*.{name}" for name in names)
    add_lora(decoder, LoraConfig(targets=targets, rank=3, dropout=dropout))
    run = Pass(ROWS, 96, narrow=4 if precision == "float32" else 2)
    kept = measured(decoder, 96, False, precision)
    adapted = Adapted(frozenset(names), rank=3, dropout=dropout > 0)
    assert planned(config, run, adapted) == pytest.approx(kept, rel=0.1)
    assert planned(config, run) > 1.1 * kept


def test_one_layer_by_hand():
    """6 heads of 10 on 2, d 40, f 24; 2 rows of 5 tokens, in bfloat16."""
    kept = layer_kept(VARIANTS["plain"].layers[0], D, Pass(rows=2, length=5, narrow=2))
    tokens = 10
    assert kept == Kept(
        {
            "inputs of norms": 2 * tokens * 40 * 4,
            "norms": 2 * tokens * (40 + 1) * 4,
            "inputs of projections": tokens * (5 * 40 + 60 + 24) * 2,
            "queries": tokens * 60 * 2,
            "keys and values": tokens * 2 * 20 * 2,
            "attention's result": tokens * 60 * 2,
            "scores": tokens * 6 * 4,
            "gate": tokens * 24 * 2,
            "activated gate": tokens * 24 * 2,
            "up": tokens * 24 * 2,
        }
    )


def test_tensor_and_context_parallel_share_out_what_they_should():
    layer = VARIANTS["plain"].layers[0]
    whole = layer_kept(layer, D, Pass(2, 4096, documents=True))
    heads = layer_kept(layer, D, Pass(2, 4096, documents=True, tensor=2))
    for name in ("queries", "keys and values", "gate", "up"):
        assert heads[name] * 2 == whole[name]
    for name in ("inputs of norms", "norms"):
        assert heads[name] == whole[name]
    part = layer_kept(layer, D, Pass(2, 4096, documents=True, context=2))
    assert part["queries"] * 2 == whole["queries"]
    assert part["inputs of norms"] * 2 == whole["inputs of norms"]
    assert part["keys and values"] == whole["keys and values"]  # gathered
