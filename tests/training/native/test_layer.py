"""The layer with kernels in C is the plain layer: as near to float64 as plain bfloat16 is."""

import copy

import pytest
import torch

from armillary.config import NormConfig, RotaryConfig
from armillary.decoder import Decoder
from armillary.parts.kv_cache import KVCache
from armillary.training.checkpointing import checkpoint_layers
from armillary.training.compilation import compile_objective
from armillary.training.lora import LoraConfig, add_lora
from armillary.training.loss import IGNORED
from armillary.training.native.build import NotBuiltError, kernels
from armillary.training.native.layer import fits, loss_kernel
from armillary.training.objective import Objective
from armillary.training.precision import Precision
from support.models import VOCABULARY, config, layer

try:
    kernels()
except NotBuiltError as error:
    pytest.skip(f"the kernels cannot be built here: {error}", allow_module_level=True)

BATCH, LENGTH, WIDTH = 2, 192, 64
CPU = torch.device("cpu")


def wide_layer(attention=None, feedforward=None, rotary=None, **entries):
    """A layer of sizes that the kernels take, all unequal: 6 heads on 2 of width 32, d_ff 96."""
    turn = RotaryConfig(**({"d_rotary": 32, "base": 100.0} | (rotary or {})))
    heads = {"d_head": 32, "rotary": turn} | (attention or {})
    sizes = {} if "kind" in (feedforward or {}) else {"d_ff": 96}
    return layer(attention=heads, feedforward=sizes | (feedforward or {}), **entries)


def wide_config(*layers, **entries):
    return config(*(layers or [wide_layer()] * 2), **({"d_model": WIDTH} | entries))


def documents(kind):
    """Two rows of documents: none, packed with a border inside a block, or mixed up."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(-1, 4, (BATCH, LENGTH), generator=generator)
    return {"none": None, "packed": drawn.sort(-1).values, "mixed": drawn}[kind]


def build(model, std=0.15):
    decoder = Decoder(model)
    decoder.initialise(std, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.4, 0.4, parameter.numel()))
    return decoder


def run(decoder, how, kind="none", length=LENGTH, **entries):
    """The loss and all gradients, by name: "exact" in float64, "plain" or "native" in bfloat16."""
    decoder = copy.deepcopy(decoder)
    precision = Precision("float32" if how == "exact" else "bfloat16")
    objective = Objective(decoder.double() if how == "exact" else decoder, **entries)
    if how == "native":
        assert "kernels" in compile_objective(objective, torch.bfloat16, CPU)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, length), generator=generator)
    labels[0, 5:9] = IGNORED
    groups = documents(kind)
    places = torch.stack([torch.arange(length), torch.arange(length).flip(0)])
    with precision.autocast():
        loss = objective(tokens, labels, None if groups is None else groups[:, :length], places)
    (loss.total / loss.count).backward()
    gradients = {name: p.grad.double() for name, p in decoder.named_parameters()}
    return {"loss": (loss.total / loss.count).detach().double()} | gradients


VARIANTS = {
    "plain": wide_config(),
    "window": wide_config(wide_layer(attention={"window": 70}), wide_layer()),
    "window of one": wide_config(wide_layer(attention={"window": 1})),
    "scale": wide_config(wide_layer(attention={"scale": 0.3})),
    "one kv head": wide_config(wide_layer(attention={"n_kv_heads": 1})),
    "all kv heads": wide_config(wide_layer(attention={"n_kv_heads": 6})),
    "wide heads": wide_config(
        wide_layer(attention={"d_head": 64}, rotary={"d_rotary": 64}),
    ),
    "fused": wide_config(wide_layer(feedforward={"fused": True})),
    "offset": wide_config(
        wide_layer(norm=NormConfig(offset=1.0, cast_before_weight=False)),
        final_norm=NormConfig(offset=1.0, cast_before_weight=False),
    ),
    "tied head": wide_config(tie_head=True),
    "bias and soft cap after it": wide_config(head_bias=True, final_soft_cap=5.0),
    "other eps": wide_config(wide_layer(norm=NormConfig(eps=0.1))),
}


def off(result, exact):
    """How far each is from the exact one, relative to its size.

    Queries and keys of a token that reads itself alone have no gradient but rounding: relative to
    the largest.
    """
    sizes = {name: float(value.norm()) for name, value in exact.items()}
    largest = max(sizes.values())
    return {
        name: float((value - exact[name]).norm())
        / (sizes[name] if sizes[name] > 1e-6 * largest else largest)
        for name, value in result.items()
    }


@pytest.mark.parametrize(
    ("variant", "kind"),
    [(name, "none") for name in VARIANTS] + [("plain", "packed"), ("window", "mixed")],
)
def test_it_is_no_farther_from_the_truth_than_plain_bfloat16(variant, kind):
    decoder = build(VARIANTS[variant])
    exact = run(decoder, "exact", kind)
    plain, native = (off(run(decoder, how, kind), exact) for how in ("plain", "native"))
    for name, error in native.items():
        # One draw of rounding errors beside another; each wrong factor is 10 times as far off.
        assert error < 1.5 * plain[name] + 2e-3, name
    assert sum(native.values()) < 1.15 * sum(plain.values())


def test_the_loss_has_its_z_term_and_chunks():
    decoder = build(wide_config())
    exact = run(decoder, "exact", z_loss=0.3, chunk=50)
    errors = off(run(decoder, "native", z_loss=0.3, chunk=50), exact)
    assert max(errors.values()) < 0.03
    assert max(off(run(decoder, "native"), exact).values()) > 0.1  # and it matters


def test_a_step_is_the_same_bits_each_time_checkpointed_or_not():
    decoder = build(wide_config())
    once = run(decoder, "native")
    again = run(decoder, "native")
    checkpoint_layers(decoder)
    computed_twice = run(decoder, "native")
    for name, value in once.items():
        assert torch.equal(again[name], value), name
        assert torch.equal(computed_twice[name], value), name


def test_checkpointed_layers_keep_their_input_alone():
    decoder = build(wide_config())
    objective = Objective(decoder)
    checkpoint_layers(decoder)
    compile_objective(objective, torch.bfloat16, CPU)
    row = 4 * WIDTH * BATCH * LENGTH
    assert kept_bytes(objective) < 2 * row + 60_000


def kept_bytes(objective):
    """What is kept for the backward pass besides parameters."""
    parameters = {parameter.data_ptr() for parameter in objective.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with keeping, Precision("bfloat16").autocast():
        objective.decoder.hidden(tokens)
    return sum(kept.values())


def test_it_keeps_little_for_the_backward_pass():
    objective = Objective(build(wide_config()))
    plain = kept_bytes(objective)
    compile_objective(objective, torch.bfloat16, CPU)
    native = kept_bytes(objective)
    numbers = 2 * WIDTH + (6 + 2 * 2) * 32 + 6 * 32  # two inputs, q, k, v and what attention gave
    wide = 2 * 96  # gate and up, of one layer in two
    assert native < 2 * (2 * numbers + wide) * BATCH * LENGTH * 1.2
    assert native < plain / 2.5


def test_two_objectives_do_not_share_what_layers_use_in_turns():
    """And one of another size takes its own memory."""
    objectives = [Objective(build(wide_config())) for _ in range(2)]
    for objective in objectives:
        compile_objective(objective, torch.bfloat16, CPU)
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 61
    with Precision("bfloat16").autocast():
        losses = [objective(tokens, tokens).total for objective in objectives]
        shorter = objectives[0](tokens[:, :64], tokens[:, :64]).total
    for loss in (*reversed(losses), shorter):
        loss.backward()
    first, second = (dict(objective.named_parameters()) for objective in objectives)
    with Precision("bfloat16").autocast():
        alone = Objective(build(wide_config()))
        compile_objective(alone, torch.bfloat16, CPU)
        alone(tokens, tokens).total.backward()
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter.grad, second[name].grad), name
        assert not torch.equal(parameter.grad, first[name].grad), name


@pytest.mark.parametrize("what", ["float32", "padding", "length", "cache"])
def test_what_it_does_not_know_is_computed_by_the_plain_layer(what):
    decoder = build(wide_config())
    native = copy.deepcopy(decoder)
    compile_objective(Objective(native), torch.bfloat16, CPU)
    length = 70 if what == "length" else 128
    tokens = torch.arange(2 * length).reshape(2, length) % VOCABULARY
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :3] = False

    def hidden(of):
        with Precision("float32" if what == "float32" else "bfloat16").autocast():
            if what == "cache":
                return of(tokens, cache=KVCache(of.config, batch=2)).float()
            return of.project(of.hidden(tokens, mask=mask if what == "padding" else None)).float()

    # The last norm is rounded before the head's product rather than by it: the same bits.
    assert torch.equal(hidden(native), hidden(decoder))


def test_a_copy_computes_with_its_own_weights():
    objective = Objective(build(wide_config()))
    compile_objective(objective, torch.bfloat16, CPU)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with Precision("bfloat16").autocast(), torch.no_grad():
        before = objective.decoder.hidden(tokens)
        other = copy.deepcopy(objective)
        other.decoder.layers[0].attention.v.weight.zero_()
        assert not torch.equal(other.decoder.hidden(tokens), before)
        assert torch.equal(objective.decoder.hidden(tokens), before)


UNKNOWN = {
    "post norm": {"norm_placement": "post"},
    "parallel": {"residual": "parallel"},
    "layer norm": {"norm": NormConfig(kind="layer")},
    "dropout": {"dropout": 0.1},
    "interleaved": {"rotary": {"layout": "interleaved"}},
    "partly rotated": {"rotary": {"d_rotary": 16}},
    "no rotation": {"attention": {"rotary": None}},
    "q/k norm": {"attention": {"qk_norm": NormConfig()}},
    "soft cap": {"attention": {"soft_cap": 2.0}},
    "biases": {"attention": {"qkv_bias": True}},
    "out bias": {"attention": {"out_bias": True}},
    "attention dropout": {"attention": {"dropout": 0.1}},
    "mlp": {"feedforward": {"kind": "mlp", "d_ff": 96}},
    "gelu": {"feedforward": {"activation": "gelu"}},
    "feed-forward bias": {"feedforward": {"bias": True}},
    "feed-forward dropout": {"feedforward": {"dropout": 0.1}},
    "sinks": {"attention": {"sinks": True}},
    "bounded": {"feedforward": {"limit": 7.0}},
    "offset": {"feedforward": {"up_offset": 1.0}},
    "experts": {"feedforward": {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"d_ff": 32}}},
    "odd width": {"feedforward": {"d_ff": 24}},
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_other_layers_do_not_fit(what):
    other = wide_config(wide_layer(**UNKNOWN[what]))
    assert not fits(Decoder(other).layers[0], other.layers[0])


def test_layers_with_adapters_do_not_fit():
    model = wide_config()
    decoder = Decoder(model)
    assert fits(decoder.layers[0], model.layers[0])
    add_lora(decoder, LoraConfig(targets=("layers.0.attention.q",), rank=2))
    assert not fits(decoder.layers[0], model.layers[0])
    assert fits(decoder.layers[1], model.layers[1])


@pytest.mark.parametrize("size", [16, 61, 130])
def test_the_loss_of_a_chunk_of_any_vocabulary(size):
    generator = torch.Generator().manual_seed(4)
    logits = (4 * torch.randn(9, size, generator=generator)).bfloat16()
    labels = torch.randint(size, (9,), generator=generator)
    labels[0] = size - 1
    wide = logits.double().requires_grad_()
    sums = wide.logsumexp(-1)
    expected = sums - wide.gather(-1, labels[:, None])[:, 0]
    (expected + 0.2 * sums.square()).sum().backward()
    untouched = logits.clone()
    losses, log_sums = loss_kernel(untouched, labels, 0.2, False)
    assert torch.equal(untouched, logits)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_sums.double(), sums.detach(), rtol=1e-5, atol=1e-5)
    loss_kernel(logits, labels, 0.2, True)
    torch.testing.assert_close(logits.double(), wide.grad, rtol=2**-8, atol=1e-5)


def test_numbers_that_are_none_are_not_hidden():
    for bad in (float("nan"), float("inf")):
        logits = torch.zeros(1, 32).bfloat16()
        logits[0, 3] = bad
        losses, _ = loss_kernel(logits, torch.tensor([1]), 0.0, True)
        assert not losses.isfinite().any()
        assert not logits.isfinite().all()
    decoder = build(wide_config())
    with torch.no_grad():
        decoder.layers[0].attention.k.weight[3, 3] = float("nan")
    assert run(decoder, "native")["loss"].isnan()
