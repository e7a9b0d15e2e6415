"""Adapters: what they add, what trains, merged and back, saved and loaded."""

import json

import pytest
import torch
from torch import nn

from armillary.checkpoints.safetensors import read_safetensors
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.training.lora import (
    LoraConfig,
    LoraLinear,
    add_lora,
    load_lora,
    merge_lora,
    remove_lora,
    save_lora,
)
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.weights import to_write
from support.checks import gap
from support.models import build, config, layer, tokens

QV = ("layers.*.attention.q", "layers.*.attention.v")
MODEL = config(layer(attention={"qkv_bias": True}), layer())


def adapted(dtype=torch.float64, std=0.3, **settings):
    """A decoder with adapters that change something: B is random instead of 0."""
    decoder = build(MODEL, dtype=dtype, std=std)
    settings = LoraConfig(**({"rank": 3, "alpha": 5.0} | settings))
    add_lora(decoder, settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, std, generator=generator)
    return decoder


def bits(decoder):
    return {name: value.clone() for name, value in decoder.state_dict().items()}


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_patterns_choose_projections():
    decoder = build(MODEL)
    chosen = add_lora(decoder, LoraConfig(targets=QV))
    assert chosen == [f"layers.{i}.attention.{part}" for i in (0, 1) for part in "qv"]
    for name in chosen:
        assert isinstance(decoder.get_submodule(name), LoraLinear)
    assert type(decoder.layers[0].attention.k) is nn.Linear
    assert add_lora(build(MODEL), LoraConfig(targets=("layers.1.*.gate.weight",))) == [
        "layers.1.feedforward.gate"
    ]
    assert len(add_lora(build(MODEL), LoraConfig())) == 14


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest():
    decoder = build(MODEL)
    before = bits(decoder)
    with pytest.raises(UserError) as caught:
        add_lora(decoder, LoraConfig(targets=(*QV, "layers.*.attention.qq")))
    text = str(caught.value)
    assert "'layers.*.attention.qq' matches no projection" in text
    assert "did you mean 'layers.*.attention.q'?" in text
    assert "\n" not in text
    with pytest.raises(UserError, match="'head' matches no projection"):
        add_lora(decoder, LoraConfig(targets=("head",)))
    assert same(bits(decoder), before)
    assert all(parameter.requires_grad for parameter in decoder.parameters())


def test_training_begins_where_the_model_stands():
    decoder = build(MODEL)
    before = decoder(tokens(2, 5))
    add_lora(decoder, LoraConfig())
    assert torch.equal(decoder(tokens(2, 5)), before)
    assert decoder.layers[0].attention.q.lora_a.abs().max() > 0


def test_it_adds_alpha_over_rank_times_the_product():
    decoder = adapted(targets=("layers.0.attention.q",))
    q = decoder.layers[0].attention.q
    x = torch.randn(2, 7, 40, dtype=torch.float64)
    weight = q.weight + 5.0 / 3 * q.lora_b @ q.lora_a
    torch.testing.assert_close(q(x), x @ weight.T + q.bias, rtol=1e-12, atol=1e-12)


def test_only_the_adapters_train():
    decoder = adapted(torch.float32, targets=QV)
    optimizer = build_optimizer(decoder, OptimizerConfig(lr=0.1))
    before = bits(decoder)
    decoder(tokens(2, 5)).square().mean().backward()
    optimizer.step()
    for name, value in decoder.state_dict().items():
        assert torch.equal(value, before[name]) == ("lora_" not in name), name
    in_groups = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert len(in_groups) == 8
    assert all("lora_" in name for name in in_groups)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_merged_gives_what_adapted_gave(dtype, within):
    """Weights of a size at which float32 itself is good to 1e-6 across two layers."""
    decoder = adapted(dtype, std=0.05)
    ids = tokens(2, 9)
    separate = decoder(ids).detach()
    merge_lora(decoder)
    assert gap(decoder(ids), separate) <= within
    assert gap(build(MODEL, dtype=dtype, std=0.05)(ids), separate) > 1e-3


def test_a_merged_decoder_is_a_plain_one_and_goes_back_bit_for_bit():
    decoder = adapted()
    plain = build(MODEL)
    before = bits(decoder)
    parameters = dict(decoder.named_parameters())
    unmerge = merge_lora(decoder)
    assert list(decoder.state_dict()) == list(plain.state_dict())
    assert [tensor.name for tensor in to_write(decoder)] == [n for n, _ in plain.named_parameters()]
    assert not any(isinstance(module, LoraLinear) for module in decoder.modules())
    unmerge()
    assert same(bits(decoder), before)
    assert all(parameters[name] is parameter for name, parameter in decoder.named_parameters())


def test_the_merged_weight_is_rounded_once_from_float32():
    decoder = adapted(torch.float32, targets=("layers.0.attention.q",))
    decoder.layers[0].attention.q.weight.data = decoder.layers[0].attention.q.weight.bfloat16()
    q = decoder.layers[0].attention.q
    assert q.lora_a.dtype == torch.float32
    expected = (q.weight.float() + 5.0 / 3 * (q.lora_b @ q.lora_a)).bfloat16()
    merge_lora(decoder)
    assert torch.equal(decoder.layers[0].attention.q.weight, expected)


def test_float32_adapters_train_beside_frozen_bfloat16_weights():
    decoder = build(MODEL, dtype=torch.bfloat16)
    add_lora(decoder, LoraConfig(targets=QV))
    build_optimizer(decoder, OptimizerConfig())
    decoder(tokens(2, 5)).float().square().mean().backward()
    assert decoder.layers[0].attention.q.lora_b.grad.dtype == torch.float32
    assert decoder.layers[0].attention.q.lora_b.grad.abs().max() > 0


def test_removed_leaves_the_weights_as_they_were():
    decoder = adapted()
    remove_lora(decoder)
    assert same(bits(decoder), bits(build(MODEL)))


def test_dropout_falls_on_the_adapters_inputs_in_training_alone():
    decoder = adapted(targets=("layers.0.attention.q",), dropout=0.5)
    q = decoder.layers[0].attention.q
    x = torch.ones(200, 40, dtype=torch.float64)
    assert torch.equal(q(x), q(x))
    decoder.train()
    drawn = q(x)
    assert not torch.equal(drawn[0], drawn[1])
    quiet = q.eval()(x)
    torch.testing.assert_close(drawn.mean(0), quiet[0], rtol=0, atol=1.0)
    add = LoraConfig(dropout=0.5)
    trained = build(MODEL).train()
    add_lora(trained, add)
    assert trained.layers[0].attention.q.dropout.training


def test_adapters_come_once():
    decoder = adapted()
    with pytest.raises(UserError, match="has adapters already"):
        add_lora(decoder, LoraConfig())
    merge_lora(decoder)
    for use in (merge_lora, remove_lora):
        with pytest.raises(UserError, match="has no adapters"):
            use(decoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_and_loaded_are_the_same_bits(tmp_path, dtype):
    decoder = adapted(dtype, targets=QV, dropout=0.1)
    save_lora(tmp_path / "adapter", decoder)
    stored = read_safetensors(tmp_path / "adapter" / "adapter.safetensors")
    assert sorted(stored) == sorted(
        f"layers.{i}.attention.{part}.lora_{ab}" for i in (0, 1) for part in "qv" for ab in "ab"
    )
    other = build(MODEL, dtype=dtype)
    loaded = load_lora(tmp_path / "adapter", other)
    assert loaded == LoraConfig(targets=QV, rank=3, alpha=5.0, dropout=0.1)
    assert same(bits(other), bits(decoder))
    assert [n for n, p in other.named_parameters() if p.requires_grad] == [
        n for n, p in decoder.named_parameters() if p.requires_grad
    ]
    save_lora(tmp_path / "adapter", other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_an_adapter_of_another_decoder_is_refused(tmp_path):
    save_lora(tmp_path / "adapter", adapted())
    deeper = build(config(*[layer()] * 3))
    with pytest.raises(CheckpointError, match=r"layers\.2\.attention\.k\.lora_a is missing"):
        load_lora(tmp_path / "adapter", deeper)
    with pytest.raises(CheckpointError, match=r"layers\.1\..* has no place in this decoder"):
        load_lora(tmp_path / "adapter", build(config(layer())))
    wider = config(*[layer(feedforward={"d_ff": 25})] * 2)
    with pytest.raises(CheckpointError, match=r"\(24, 3\), the decoder needs \(25, 3\)"):
        load_lora(tmp_path / "adapter", build(wider))
    assert not any("lora" in name for name in deeper.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is no adapter of armillary"),
        ({"rank": 0}, "rank is 0; it must be"),
        ({"rang": 3}, "rang"),
        ({"targets": ["layers.*.qq"]}, "matches no projection"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, change, message):
    save_lora(tmp_path / "adapter", adapted())
    path = tmp_path / "adapter" / "adapter.json"
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    manifest = tmp_path / "adapter" / "manifest.json"
    entries = json.loads(manifest.read_text())
    entries["files"]["adapter.json"]["bytes"] = len(text)
    manifest.write_text(json.dumps(entries))
    with pytest.raises(UserError, match=message):
        load_lora(tmp_path / "adapter", build(MODEL))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank is 0; it must be a whole number, 1 or more"),
        ({"alpha": 0}, "alpha is 0; it must be a number above 0"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be a number at least 0 and below 1"),
        ({"targets": "q"}, "targets is 'q'; it must be a list of patterns"),
        ({"targets": ()}, "targets is empty; name the projections that get adapters"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError) as caught:
        LoraConfig(**settings)
    assert str(caught.value) == message
