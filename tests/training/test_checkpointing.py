"""Layers that are computed again give the same bits, dropout included, and keep less."""

import copy

import pytest
import torch

from armillary.parts.kv_cache import KVCache
from armillary.training.checkpointing import checkpoint_layers
from armillary.training.lora import LoraConfig, add_lora, merge_lora
from support.models import build, config, layer, tokens
from support.tensor_memory import TensorMemory

DROPPING = config(
    *[layer(attention={"dropout": 0.2}, feedforward={"dropout": 0.2}, dropout=0.3)] * 2,
    input_dropout=0.1,
)


def run(decoder, **arguments):
    """The result and all gradients of a pass in training, with the dropout of one seed."""
    decoder.train()
    decoder.zero_grad()
    torch.manual_seed(3)
    hidden = decoder.hidden(tokens(2, 9), **arguments)
    hidden.square().sum().backward()
    gradients = [p.grad.flatten() for p in decoder.parameters() if p.grad is not None]
    return torch.cat([hidden.detach().flatten(), *gradients])


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_the_same_bits_dropout_included(packed):
    decoder = build(DROPPING)
    documents = {"documents": torch.tensor([[0] * 4 + [1] * 5] * 2)} if packed else {}
    kept = run(decoder, **documents)
    names = list(decoder.state_dict())
    checkpoint_layers(decoder)
    assert torch.equal(run(decoder, **documents), kept)
    assert list(decoder.state_dict()) == names
    again = run(decoder, **documents)
    torch.manual_seed(4)
    assert torch.equal(again, kept)


def calls(decoder):
    """How often the first layer is computed in a pass forward and backward."""
    count = []
    handle = decoder.layers[0].attention.register_forward_hook(lambda *_: count.append(1))
    run(decoder)
    handle.remove()
    return len(count)


def test_it_can_be_asked_for_twice_and_taken_back():
    decoder = build(config())
    assert calls(decoder) == 1
    checkpoint_layers(decoder)
    checkpoint_layers(decoder)
    assert calls(decoder) == 2
    checkpoint_layers(decoder, enabled=False)
    assert calls(decoder) == 1


def test_a_copy_computes_with_its_own_weights():
    decoder = build(config())
    checkpoint_layers(decoder)
    other = copy.deepcopy(decoder)
    before = run(decoder)
    with torch.no_grad():
        for parameter in decoder.layers.parameters():
            parameter.zero_()
    assert torch.equal(run(other), before)
    assert not torch.equal(run(decoder), before)


def test_without_gradients_and_with_a_cache_nothing_changes():
    decoder = build(config())
    ids = tokens(1, 6)
    with torch.no_grad():
        whole = decoder(ids)
    checkpoint_layers(decoder)
    with torch.no_grad():
        assert torch.equal(decoder(ids), whole)
    cached = decoder(ids, cache=KVCache(decoder.config, 1))
    torch.testing.assert_close(cached, whole)


def test_adapters_train_under_it():
    decoder = build(config())
    add_lora(decoder, LoraConfig(dropout=0.4))
    kept = run(decoder)
    checkpoint_layers(decoder)
    assert torch.equal(run(decoder), kept)
    merge_lora(decoder)


def peak(decoder):
    decoder.zero_grad()
    with TensorMemory() as memory:
        decoder.hidden(tokens(4, 32)).sum().backward()
    return memory.peak


def test_less_is_kept():
    """Of six layers, the inputs of each and the activations of one."""
    decoder = build(config(*[layer()] * 6))
    everything = peak(decoder)
    checkpoint_layers(decoder)
    assert peak(decoder) < everything / 2
