"""What a decoder costs, from its configuration alone: parameters, shapes, cache bytes, FLOPs.

Knows nothing of files and devices, and builds no model. A layer is listed as the steps of the
specification (§7), in the order in which they happen.

Symbols: B batch, T length, d = d_model, h = n_heads, h_kv = n_kv_heads, d_h = d_head, f = d_ff,
V = vocab_size, L = max_positions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)
from armillary.errors import UserError

Shape = tuple[int, ...]

BYTES_OF = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_ACTIVATIONS = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU (tanh)",
    "relu": "ReLU",
    "sigmoid": "sigmoid",
    "identity": "no activation",
}


@dataclass(frozen=True)
class Weight:
    """A parameter by name, with its shape as it is stored: a matrix is (out, in), as in torch.

    `is_table` marks rows that are looked up; every other matrix is multiplied with.
    """

    name: str
    shape: Shape
    is_table: bool = False

    @property
    def count(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def is_multiplied(self) -> bool:
        """Whether each token costs a product with it."""
        return len(self.shape) == 2 and not self.is_table

    @property
    def written_shape(self) -> Shape:
        """As the specification writes it, x·W: a matrix that is multiplied with is (in, out)."""
        return self.shape[::-1] if self.is_multiplied else self.shape


@dataclass(frozen=True)
class Output:
    """A tensor that a step gives; `name` is empty where the step's own name says it."""

    shape: Shape
    name: str = ""


@dataclass(frozen=True)
class Step:
    """One line of the table: what happens, the weights that it holds, the tensors that it gives."""

    name: str
    weights: tuple[Weight, ...]
    outputs: tuple[Output, ...]

    @property
    def parameters(self) -> int:
        """Numbers in its own weights."""
        return sum(weight.count for weight in self.weights)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike, with the steps of one of them."""

    indices: tuple[int, ...]
    layer: LayerConfig
    steps: tuple[Step, ...]

    @property
    def parameters_each(self) -> int:
        """Parameters of one of these layers."""
        return sum(step.parameters for step in self.steps)

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return len(self.indices) * self.parameters_each


def layer_groups(config: DecoderConfig, batch: int, length: int) -> tuple[LayerGroup, ...]:
    """The kinds of layers in order of first use; steps are for B sequences of T tokens.

    Raises UserError as `check_sizes` does.
    """
    check_sizes(config, batch, length)
    indices: dict[LayerConfig, list[int]] = {}
    for index, layer in enumerate(config.layers):
        indices.setdefault(layer, []).append(index)
    return tuple(
        LayerGroup(tuple(where), layer, tuple(_layer_steps(config.d_model, layer, batch, length)))
        for layer, where in indices.items()
    )


def outer_steps(config: DecoderConfig, batch: int, length: int) -> tuple[Step, ...]:
    """What stands before and after the layers; a tied head holds no matrix of its own.

    Raises UserError as `check_sizes` does.
    """
    check_sizes(config, batch, length)
    V, d = config.vocab_size, config.d_model
    hidden = (Output((batch, length, d)),)
    scaled = "" if config.embedding_scale == 1 else f", times {config.embedding_scale:g}"
    dropped = _dropout(config.input_dropout)
    table = config.position_table
    steps = [
        Step(
            f"embedding{scaled}{'' if table else dropped}",
            (Weight("embedding.weight", (V, d), is_table=True),),
            hidden,
        )
    ]
    if table == "sinusoidal":
        steps.append(Step(f"add sinusoidal positions{dropped}", (), hidden))
    elif table == "learned":
        learned = Weight("position_table.weight", (config.max_positions, d), is_table=True)
        steps.append(Step(f"add learned positions{dropped}", (learned,), hidden))
    if config.final_norm is not None:
        steps.append(Step("final norm", _norm("final_norm", config.final_norm, d), hidden))
    steps.append(
        Step(
            ("head, tied to the embedding" if config.tie_head else "head")
            + ("" if config.logit_scale == 1 else f", times {config.logit_scale:g}")
            + _soft_cap("logits", config.final_soft_cap),
            _linear("head", V, d, config.head_bias)[1 if config.tie_head else 0 :],
            (Output((batch, length, V)),),
        )
    )
    return tuple(steps)


def check_sizes(config: DecoderConfig, batch: int, length: int) -> None:
    """Raises UserError for a batch or length below 1, or longer than a learned position table."""
    if batch < 1 or length < 1:
        raise UserError(f"batch is {batch} and length {length}; both must be at least 1")
    if config.position_table == "learned" and length > config.max_positions:
        raise UserError(
            f"length is {length}, but the learned position table ends at "
            f"{config.max_positions}; give a length up to that"
        )


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of the whole decoder, a tied head counted once."""
    in_layers = sum(group.parameters for group in layer_groups(config, 1, 1))
    return in_layers + sum(step.parameters for step in outer_steps(config, 1, 1))


def multiplied_parameters(config: DecoderConfig) -> int:
    """Entries of all matrices that each token is multiplied with.

    The head always counts, also where it is tied; looking a row up in a table costs no product.
    """
    total = config.vocab_size * config.d_model
    for group in layer_groups(config, 1, 1):
        weights = [weight for step in group.steps for weight in step.weights]
        total += len(group.indices) * sum(w.count for w in weights if w.is_multiplied)
    return total


def cache_bytes_per_token(config: DecoderConfig, dtype: str, length: int = 1) -> int:
    """Bytes by which the `length`-th token of a sequence makes the cache grow.

    K and V of each key/value head: Σ over layers of 2·h_kv·d_h·bytes; a layer with a window that
    is already full grows no more. `dtype` is a key of BYTES_OF.
    """
    return cache_bytes(config, dtype, length) - cache_bytes(config, dtype, length - 1)


def cache_bytes(config: DecoderConfig, dtype: str, length: int, batch: int = 1) -> int:
    """Bytes that a cache must hold after T tokens of each of B sequences.

    A layer with a window keeps no more than that; room that a cache keeps spare is not counted.
    """
    numbers = sum(
        2 * layer.attention.n_kv_heads * layer.attention.d_head * keys_read(layer.attention, length)
        for layer in config.layers
    )
    return batch * numbers * BYTES_OF[dtype]


def attention_flops(config: DecoderConfig, length: int) -> int:
    """Σ over layers of 4·h·d_h·n: a score and a weighted sum for each of the n keys read.

    n is `length`, or a layer's window where that is less. Projections are not in it.
    """
    return sum(
        4 * layer.attention.n_heads * layer.attention.d_head * keys_read(layer.attention, length)
        for layer in config.layers
    )


def forward_flops(config: DecoderConfig, length: int) -> int:
    """FLOPs of the `length`-th token: 2 × multiplied parameters + `attention_flops`.

    A multiplication and an addition are two. Norms, rotations and activations are left out.
    Source: Chowdhery et al. 2022, appendix B; a training step costs about three times as much.
    """
    return 2 * multiplied_parameters(config) + attention_flops(config, length)


def prefill_flops(config: DecoderConfig, length: int) -> int:
    """FLOPs of taking a prompt of `length` tokens in, with logits for the last one only.

    What causal attention masks is not counted, though kernels compute some of it.
    """
    head = config.vocab_size * config.d_model
    products = 2 * (length * (multiplied_parameters(config) - head) + head)
    return products + sum(
        4 * layer.attention.n_heads * layer.attention.d_head * _keys_read_in_all(layer, length)
        for layer in config.layers
    )


def _keys_read_in_all(layer: LayerConfig, length: int) -> int:
    """Σ of `keys_read` over the first `length` tokens."""
    filling = keys_read(layer.attention, length)
    return filling * (filling + 1) // 2 + (length - filling) * filling


def prefill_bytes(config: DecoderConfig, dtype: str, length: int, chunk: int = 512) -> int:
    """Bytes of activations at the end of a prompt that is taken in by chunks of one sequence.

    At the widest place of a layer, beside the residual and what leads there: queries, keys and
    values before and after rotation with the mask over all keys (booleans, again for each query of
    a group, and the numbers that kernels on the CPU make of them), or the feed-forward's gate, its
    activation, up and their product. Weights and cache are not in it.
    """
    tokens, size = min(chunk, length), BYTES_OF[dtype]
    widest = 0
    for layer in config.layers:
        heads, wide = layer.attention, layer.feedforward
        width = 2 * config.d_model + 2 * (heads.n_heads + 2 * heads.n_kv_heads) * heads.d_head
        masked = tokens * width * size + _mask_bytes(heads, tokens, length, size)
        products = 5 * config.d_model + (4 if wide.kind == "glu" else 2) * wide.d_ff
        widest = max(widest, masked, tokens * products * size)
    return widest + config.vocab_size * size


def _mask_bytes(attention: AttentionConfig, tokens: int, length: int, size: int) -> int:
    keys = min(length, keys_read(attention, length) + tokens - 1)
    if tokens == length == keys:
        return 0  # plainly causal
    group = attention.n_heads // attention.n_kv_heads
    repeated = group if group > 1 else 0
    return tokens * keys * (1 + repeated + group * size)


def keys_read(attention: AttentionConfig, length: int) -> int:
    """How many positions the `length`-th token reads, itself among them."""
    return length if attention.window is None else min(length, attention.window)


def _layer_steps(d: int, layer: LayerConfig, batch: int, length: int) -> Iterator[Step]:
    hidden = (Output((batch, length, d)),)
    norm, placement = layer.norm, layer.norm_placement
    sequential = layer.residual == "sequential"
    shared = layer.residual == "parallel_shared_norm"
    normed_before, normed_after = placement != "post", placement != "pre"
    dropped = _dropout(layer.dropout)
    if layer.residual_scale != 1:
        dropped += f", times {layer.residual_scale:g}"

    if normed_before:
        name = "norm 1, read by both sub-layers" if shared else "norm 1"
        yield Step(name, _norm("norm1", norm, d), hidden)
    added = f"{dropped}, residual" if sequential else dropped
    output_projection, *attention = reversed(
        list(_attention_steps(d, layer.attention, batch, length))
    )
    yield from reversed(attention)
    if normed_after:
        yield output_projection
        yield Step(f"post norm 1{added}", _norm("post_norm1", norm, d), hidden)
    else:
        yield Step(
            output_projection.name + added, output_projection.weights, output_projection.outputs
        )

    if normed_before and not shared:
        name = "norm 2" if sequential else "norm 2, of the layer's input"
        yield Step(name, _norm("norm2", norm, d), hidden)
    yield from _feedforward_steps(d, layer.feedforward, batch, length)
    if normed_after:
        yield Step("post norm 2", _norm("post_norm2", norm, d), hidden)
    residual = "residual" if sequential else "residual, of both sub-layers"
    yield Step(f"{dropped}, {residual}".removeprefix(", "), (), hidden)


def _attention_steps(d: int, attention: AttentionConfig, batch: int, length: int) -> Iterator[Step]:
    h, h_kv, d_h = attention.n_heads, attention.n_kv_heads, attention.d_head
    parts = [("q", h), ("k", h_kv), ("v", h_kv)]
    projections = [
        _linear(f"attention.{name}", heads * d_h, d, attention.qkv_bias) for name, heads in parts
    ]
    yield Step(
        "q, k, v projections",
        # Matrices first, then biases, so that equal shapes stand beside each other.
        tuple(weight for kind in zip(*projections, strict=True) for weight in kind),
        tuple(Output((batch, length, heads * d_h)) for _, heads in parts),
    )

    heads_apart = tuple(Output((batch, heads, length, d_h)) for _, heads in parts)
    rotation = _rotation(attention)
    if attention.qk_norm is None:
        yield Step(f"split heads{rotation and f', {rotation}'}", (), heads_apart)
    else:
        q_norm, k_norm = (
            _norm(f"attention.{name}_norm", attention.qk_norm, attention.qk_norm_width(heads))
            for name, heads in (("q", h), ("k", h_kv))
        )
        yield Step("split heads, norm q and k", q_norm + k_norm, heads_apart)
        if rotation:
            yield Step(rotation, (), heads_apart[:2])

    window = "" if attention.window is None else f", window {attention.window}"
    yield Step(
        f"causal attention{window}{_soft_cap('scores', attention.soft_cap)}"
        f"{_dropout(attention.dropout)}",
        (),
        (
            Output((batch, h, length, length), "scores"),
            Output((batch, h, length, d_h), "result"),
        ),
    )
    yield Step(
        "join heads, output projection",
        _linear("attention.out", d, h * d_h, attention.out_bias),
        (Output((batch, length, d)),),
    )


def _feedforward_steps(
    d: int, feedforward: FeedForwardConfig, batch: int, length: int
) -> Iterator[Step]:
    f, bias = feedforward.d_ff, feedforward.bias
    wide = Output((batch, length, f))
    up = _linear("feedforward.up", f, d, bias)
    if feedforward.kind == "mlp":
        yield Step("up", up, (wide,))
    elif feedforward.fused:
        gate_up = _linear("feedforward.gate_up", 2 * f, d, bias)
        yield Step("gate and up in one", gate_up, (Output((batch, length, 2 * f)),))
    else:
        gate = _linear("feedforward.gate", f, d, bias)
        both = tuple(weight for kind in zip(gate, up, strict=True) for weight in kind)
        yield Step("gate and up", both, (wide, wide))
    product = ", product" if feedforward.kind == "glu" else ""
    yield Step(
        f"{_ACTIVATIONS[feedforward.activation]}{product}{_dropout(feedforward.dropout)}, down",
        _linear("feedforward.down", d, f, bias),
        (Output((batch, length, d)),),
    )


def _norm(name: str, norm: NormConfig, d: int) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", (d,))
    return (weight, Weight(f"{name}.bias", (d,))) if norm.bias else (weight,)


def _linear(name: str, n_out: int, n_in: int, bias: bool) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", (n_out, n_in))
    return (weight, Weight(f"{name}.bias", (n_out,))) if bias else (weight,)


def _rotation(attention: AttentionConfig) -> str:
    if attention.rotary is None:
        return ""
    d_rotary, d_h = attention.rotary.d_rotary, attention.d_head
    partial = "" if d_rotary == d_h else f" ({d_rotary} of {d_h} channels)"
    return f"rotate q and k{partial}"


def _soft_cap(of: str, cap: float | None) -> str:
    return "" if cap is None else f", {of} capped at {cap:g}"


def _dropout(probability: float) -> str:
    return f", dropout {probability:g}" if probability else ""


def ranges_text(indices: Sequence[int]) -> str:
    """Increasing numbers in short: 0–29, or 0–4, 6–10, or 0, 2, …, 24 when evenly spaced."""
    gap = indices[1] - indices[0] if len(indices) > 1 else 1
    if (
        gap > 1
        and len(indices) > 4
        and list(indices) == list(range(indices[0], indices[-1] + 1, gap))
    ):
        return f"{indices[0]}, {indices[1]}, …, {indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def layers_text(indices: Sequence[int]) -> str:
    """The layers of these numbers: layer 3, layers 0–29."""
    return f"layer{'s' if len(indices) > 1 else ''} {ranges_text(indices)}"
