"""Every parameter of a decoder, drawn at random: what tests put into a configuration.

Written from the list of parameter names, apart from the library, so that a name or a shape that
slips there is noticed here. The spread is raised, since near-zero weights hide faults.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def random_weights(
    config: Mapping[str, Any], seed: int = 0, std: float = 0.3
) -> dict[str, np.ndarray]:
    """Float64 arrays for the plain dict of a configuration; norm weights lie around 1."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(config):
        weights[name] = std * generator.standard_normal(shape)
        if "norm" in name and name.endswith("weight"):
            weights[name] += 1.0
    return weights


def parameter_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of each parameter, in the order of the computation."""
    V, d = config["vocab_size"], config["d_model"]
    yield "embedding.weight", (V, d)
    if config["position_table"] == "learned":
        yield "position_table.weight", (config["max_positions"], d)
    layers = [layer for layer in config["layers"] for _ in range(layer.get("repeat", 1))]
    for number, layer in enumerate(layers):
        for name, shape in _layer_shapes(layer, d):
            yield f"layers.{number}.{name}", shape
    if config["final_norm"] is not None:
        yield from _norm_shapes("final_norm", config["final_norm"], d)
    if not config["tie_head"]:
        yield "head.weight", (V, d)
    if config["head_bias"]:
        yield "head.bias", (V,)


def _layer_shapes(layer: Mapping[str, Any], d: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention, feedforward = layer["attention"], layer["feedforward"]
    h, h_kv, d_h = attention["n_heads"], attention["n_kv_heads"], attention["d_head"]
    if layer["norm_placement"] != "post":
        yield from _norm_shapes("norm1", layer["norm"], d)
        if layer["residual"] != "parallel_shared_norm":
            yield from _norm_shapes("norm2", layer["norm"], d)
    if layer["norm_placement"] != "pre":
        yield from _norm_shapes("post_norm1", layer["norm"], d)
        yield from _norm_shapes("post_norm2", layer["norm"], d)

    for which, count in (("q", h), ("k", h_kv), ("v", h_kv)):
        yield from _linear_shapes(f"attention.{which}", count * d_h, d, attention["qkv_bias"])
    yield from _linear_shapes("attention.out", d, h * d_h, attention["out_bias"])
    if attention["qk_norm"] is not None:
        shared = attention["qk_norm_over"] == "head"
        for which, count in (("q", h), ("k", h_kv)):
            width = d_h if shared else count * d_h
            yield from _norm_shapes(f"attention.{which}_norm", attention["qk_norm"], width)

    f, bias = feedforward["d_ff"], feedforward["bias"]
    if feedforward["fused"]:
        yield from _linear_shapes("feedforward.gate_up", 2 * f, d, bias)
    else:
        if feedforward["kind"] == "glu":
            yield from _linear_shapes("feedforward.gate", f, d, bias)
        yield from _linear_shapes("feedforward.up", f, d, bias)
    yield from _linear_shapes("feedforward.down", d, f, bias)


def _linear_shapes(
    name: str, width_out: int, width_in: int, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width_out, width_in)
    if bias:
        yield f"{name}.bias", (width_out,)


def _norm_shapes(
    name: str, norm: Mapping[str, Any], width: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if norm["bias"]:
        yield f"{name}.bias", (width,)
