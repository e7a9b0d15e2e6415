import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RotaryConfig,
)
from armillary.decoder import Decoder
from armillary.diagnosis.size import (
    active_parameters,
    attention_flops,
    cache_bytes,
    cache_bytes_per_token,
    forward_flops,
    layer_groups,
    multiplied_parameters,
    outer_steps,
    parameter_count,
    prefill_bytes,
    prefill_flops,
    ranges_text,
)
from armillary.errors import UserError
from armillary.parts.kv_cache import KVCache
from support.models import EVERY_VARIANT, config, layer, mixture
from support.tensor_memory import TensorMemory

# Every part switched, alone, and some that go together.
SWITCHED = EVERY_VARIANT | {
    "layer norm without bias": config(layer(norm=NormConfig(kind="layer"))),
    "parallel post norm": config(layer(residual="parallel", norm_placement="post")),
    "fused without bias": config(layer(feedforward={"fused": True})),
    "glu with bias": config(layer(feedforward={"bias": True})),
    "different layers": config(
        *[layer(attention={"window": 4}), layer(feedforward={"kind": "mlp"})] * 2,
        layer(residual="parallel"),
    ),
}
ONE_LAYER = DecoderConfig(
    vocab_size=16,
    d_model=8,
    max_positions=32,
    layers=(
        LayerConfig(
            attention=AttentionConfig(
                n_heads=2, n_kv_heads=2, d_head=4, rotary=RotaryConfig(d_rotary=4)
            ),
            feedforward=FeedForwardConfig(d_ff=16),
        ),
    ),
)


@pytest.mark.parametrize("name", SWITCHED)
def test_parameters_are_those_of_the_decoder(name):
    model = SWITCHED[name]
    with torch.device("meta"):
        built = {
            ours.replace("head_bias", "head.bias"): tuple(parameter.shape)
            for ours, parameter in Decoder(model).named_parameters()
        }
    counted = {w.name: w.shape for step in outer_steps(model, 1, 1) for w in step.weights}
    for group in layer_groups(model, 1, 1):
        weights = [weight for step in group.steps for weight in step.weights]
        counted |= {f"layers.{i}.{w.name}": w.shape for i in group.indices for w in weights}
    assert counted == built
    assert parameter_count(model) == sum(math.prod(shape) for shape in built.values())


def test_steps_and_shapes_of_the_specification():
    """The table of spec §7, in its order."""
    (group,) = layer_groups(ONE_LAYER, batch=2, length=3)
    assert [
        (
            step.name,
            [weight.written_shape for weight in step.weights],
            [(output.name, output.shape) for output in step.outputs],
        )
        for step in group.steps
    ] == [
        ("norm 1", [(8,)], [("", (2, 3, 8))]),
        ("q, k, v projections", [(8, 8)] * 3, [("", (2, 3, 8))] * 3),
        ("split heads, rotate q and k", [], [("", (2, 2, 3, 4))] * 3),
        ("causal attention", [], [("scores", (2, 2, 3, 3)), ("result", (2, 2, 3, 4))]),
        ("join heads, output projection, residual", [(8, 8)], [("", (2, 3, 8))]),
        ("norm 2", [(8,)], [("", (2, 3, 8))]),
        ("gate and up", [(8, 16)] * 2, [("", (2, 3, 16))] * 2),
        ("SiLU, product, down", [(16, 8)], [("", (2, 3, 8))]),
        ("residual", [], [("", (2, 3, 8))]),
    ]
    assert group.parameters_each == 256 + 384 + 16 == 656


def test_matrices_are_written_in_out_and_tables_as_they_are():
    (group,) = layer_groups(config(layer()), 1, 1)
    shapes = {w.name: w.written_shape for step in group.steps for w in step.weights}
    assert shapes["attention.q.weight"] == (40, 60)
    assert shapes["attention.k.weight"] == (40, 20)
    assert shapes["feedforward.down.weight"] == (24, 40)
    outside = outer_steps(config(layer(), position_table="learned"), 1, 1)
    shapes = {w.name: w.written_shape for step in outside for w in step.weights}
    assert shapes["embedding.weight"] == (61, 40)
    assert shapes["position_table.weight"] == (64, 40)
    assert shapes["head.weight"] == (40, 61)


@pytest.mark.parametrize(
    ("one_layer", "steps"),
    [
        (
            layer(attention={"qk_norm": NormConfig()}),
            ["split heads, norm q and k", "rotate q and k"],
        ),
        (
            layer(rotary={"d_rotary": 6}, attention={"qk_norm": NormConfig()}),
            ["split heads, norm q and k", "rotate q and k (6 of 10 channels)"],
        ),
        (layer(attention={"rotary": None}), ["split heads"]),
        (
            layer(attention={"window": 4, "soft_cap": 20.0, "dropout": 0.1}),
            ["causal attention, window 4, scores capped at 20, dropout 0.1"],
        ),
        (
            layer(norm_placement="sandwich"),
            [
                "norm 1",
                "join heads, output projection",
                "post norm 1, residual",
                "norm 2",
                "post norm 2",
                "residual",
            ],
        ),
        (layer(dropout=0.1), ["join heads, output projection, dropout 0.1, residual"]),
        (
            layer(residual="parallel"),
            [
                "join heads, output projection",
                "norm 2, of the layer's input",
                "residual, of both sub-layers",
            ],
        ),
        (layer(residual="parallel_shared_norm"), ["norm 1, read by both sub-layers"]),
        (layer(feedforward={"kind": "mlp", "activation": "relu"}), ["up", "ReLU, down"]),
        (layer(feedforward={"fused": True}), ["gate and up in one", "SiLU, product, down"]),
    ],
)
def test_what_a_layer_switches_on_is_a_step(one_layer, steps):
    (group,) = layer_groups(config(one_layer), 1, 5)
    names = [step.name for step in group.steps]
    assert [name for name in names if name in steps] == steps


def test_post_norm_reads_the_input_unnormalised():
    (group,) = layer_groups(config(layer(norm_placement="post")), 1, 5)
    names = [step.name for step in group.steps]
    assert "norm 1" not in names
    assert "norm 2" not in names
    assert "post norm 1, residual" in names


@pytest.mark.parametrize("name", SWITCHED)
def test_every_step_ends_in_the_shape_that_the_next_reads(name):
    """A layer gives what it was given; so do the steps outside, up to the vocabulary."""
    model = SWITCHED[name]
    for group in layer_groups(model, 2, 5):
        assert group.steps[-1].outputs[-1].shape == (2, 5, 40)
    shapes = [step.outputs[-1].shape for step in outer_steps(model, 2, 5)]
    assert shapes[:-1] == [(2, 5, 40)] * (len(shapes) - 1)
    assert shapes[-1] == (2, 5, 61)


def test_equal_layers_are_one_group_wherever_they_stand():
    local, full = layer(attention={"window": 4}), layer()
    groups = layer_groups(config(local, full, local, local), 1, 1)
    assert [group.indices for group in groups] == [(0, 2, 3), (1,)]
    assert groups[0].parameters == 3 * groups[0].parameters_each


def test_smollm2_and_llama_3_have_the_sizes_that_are_published():
    smollm2 = DecoderConfig.uniform(
        vocab_size=49152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        d_ff=1536,
        max_positions=8192,
        tie_head=True,
    )
    assert parameter_count(smollm2) == 134_515_008
    llama = DecoderConfig.uniform(
        vocab_size=128256,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_ff=14336,
        max_positions=8192,
    )
    assert parameter_count(llama) == 8_030_261_248


def test_a_tied_head_is_counted_once_and_multiplied_with():
    untied, tied = config(layer()), config(layer(), tie_head=True)
    assert parameter_count(untied) - parameter_count(tied) == 61 * 40
    assert multiplied_parameters(untied) == multiplied_parameters(tied)


def test_cache_bytes_are_those_that_a_cache_allocates():
    model = config(layer(), layer(attention={"rotary": None}))
    cache = KVCache(model, batch=3, capacity=7)
    Decoder(model).to(torch.bfloat16)(torch.zeros(3, 5, dtype=torch.int64), cache=cache)
    allocated = sum(store.nbytes for store in cache.layers)
    assert cache_bytes(model, "bfloat16", length=7, batch=3) == allocated
    # cases.md 63: key/value heads, never query heads
    assert cache_bytes_per_token(model, "bfloat16") == 2 * 2 * 2 * 10 * 2


def test_a_window_bounds_its_layer_of_the_cache():
    model = config(layer(attention={"window": 4}), layer())
    each = 2 * 2 * 10 * 4
    assert cache_bytes(model, "float32", 3) == 2 * 3 * each
    assert cache_bytes(model, "float32", 9) == (4 + 9) * each
    assert cache_bytes_per_token(model, "float32", 4) == 2 * each
    assert cache_bytes_per_token(model, "float32", 5) == each


@pytest.mark.parametrize(
    "name", ["plain", "qkv bias", "one kv head", "fused glu", "mlp relu", "tied head"]
)
def test_flops_of_a_pass_are_those_that_torch_counts(name):
    """Torch counts scores for all pairs, as if each of the T tokens read T positions."""
    model = SWITCHED[name]
    decoder, tokens = Decoder(model), torch.zeros(2, 7, dtype=torch.int64)
    assert counted_flops(decoder, tokens) == 2 * 7 * forward_flops(model, 7)


def test_flops_of_a_token_after_others_are_those_that_torch_counts():
    model = config(layer(), layer(attention={"window": 4}))
    decoder, cache = Decoder(model), KVCache(model, batch=1, capacity=16)
    decoder(torch.zeros(1, 8, dtype=torch.int64), cache=cache)
    ninth = torch.zeros(1, 1, dtype=torch.int64)
    assert counted_flops(decoder, ninth, cache=cache) == forward_flops(model, 9)


def counted_flops(decoder: Decoder, tokens: torch.Tensor, **options: object) -> int:
    # Of the attention kernels on a CPU, torch counts only the one made of plain products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        decoder(tokens, **options)
    return counter.get_total_flops()


def test_attention_flops_stop_growing_at_the_window():
    model = config(layer(attention={"window": 4}), layer())
    assert attention_flops(model, 9) == 4 * 6 * 10 * (4 + 9)


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
def test_sizes_below_one_are_refused(batch, length):
    with pytest.raises(UserError, match=f"batch is {batch} and length {length}"):
        layer_groups(ONE_LAYER, batch, length)


def test_a_learned_table_bounds_the_length():
    model = config(layer(), position_table="learned")
    layer_groups(model, 1, 64)
    with pytest.raises(UserError, match="length is 65, but the learned position table ends at 64"):
        layer_groups(model, 1, 65)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0], "0"),
        ([0, 1], "0–1"),
        (range(30), "0–29"),
        ([0, 2, 3, 4, 9], "0, 2–4, 9"),
        ([1, 3], "1, 3"),
        ([1, 3, 5, 7], "1, 3, 5, 7"),
        ([1, 3, 5, 7, 9], "1, 3, …, 9"),
        ([0, 2, 4, 6, 9], "0, 2, 4, 6, 9"),
    ],
)
def test_layer_numbers_in_short(indices, text):
    assert ranges_text(list(indices)) == text


def test_prefill_flops_are_those_of_its_tokens_with_one_row_of_logits():
    mixed = config(layer(attention={"window": 4}), layer())
    head = 2 * mixed.vocab_size * mixed.d_model
    for length in (1, 3, 4, 11):
        each = sum(forward_flops(mixed, n) for n in range(1, length + 1))
        assert prefill_flops(mixed, length) == each - (length - 1) * head


@pytest.mark.parametrize("name", ["grouped", "all heads", "wide", "window", "mlp"])
def test_prefill_bytes_are_what_its_tensors_take(name):
    """Within a quarter, at the mask's widest and at the feed-forward's."""
    wide = config(*[layer(feedforward={"d_ff": 600})] * 2, max_positions=700)
    models = {
        "grouped": config(max_positions=700),
        "all heads": config(*[layer(attention={"n_kv_heads": 6})] * 2, max_positions=700),
        "wide": wide,
        "window": config(*[layer(attention={"window": 100})] * 2, max_positions=700),
        "mlp": config(*[layer(feedforward={"kind": "mlp", "d_ff": 2000})] * 2, max_positions=700),
    }
    model = models[name]
    decoder = Decoder(model).eval()
    cache = KVCache(model, capacity=700)
    tokens = torch.zeros(1, 700, dtype=torch.long)
    with torch.no_grad(), TensorMemory([*decoder.parameters(), tokens]) as memory:
        decoder.prefill(tokens, cache, chunk=128)
    assert prefill_bytes(model, "float32", 700, 128) == pytest.approx(
        memory.peak - cache.nbytes, rel=1 / 4
    )


def test_of_experts_a_token_has_to_do_with_those_it_picks():
    """6 experts of 3 · 40 · 14 weights, 2 picked; another shared one of 3 · 40 · 18."""
    each, shared = 3 * 40 * 14, 3 * 40 * 18
    dense = config(layer(feedforward={"d_ff": 14}))
    mixed = config(layer(feedforward=mixture(shared={"d_ff": 18})))
    router = 6 * 40
    assert parameter_count(mixed) - parameter_count(dense) == 5 * each + shared + router
    assert active_parameters(mixed) - active_parameters(dense) == each + shared + router
    assert active_parameters(dense) == parameter_count(dense)
    assert multiplied_parameters(mixed) - multiplied_parameters(dense) == each + shared + router
