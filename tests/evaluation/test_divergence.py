"""How far weights are apart: what two whole passes say, with a layer in memory at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints.quantize import choose_encodings, write_encoded
from armillary.config import DecoderConfig
from armillary.errors import UserError
from armillary.evaluation import divergence
from armillary.evaluation.divergence import Window, cut_windows, measure
from armillary.evaluation.perplexity import Document
from armillary.weights import build_filled, to_write
from support.models import VARIANTS, VOCABULARY, build, config, layer
from support.tensor_memory import TensorMemory


def saved(directory, config, seed=0, std=0.3):
    decoder = build(config, dtype=torch.float32, seed=seed, std=std)
    save_armillary(directory, config, to_write(decoder))
    return open_checkpoint(directory)


def windows(count, length, documents=None):
    rng = np.random.default_rng(0)
    return [
        Window(f"d{n % (documents or count)}", tuple(rng.integers(0, VOCABULARY, length).tolist()))
        for n in range(count)
    ]


def whole(checkpoint, parts):
    decoder = build_filled(checkpoint.config, checkpoint.tensors)
    with torch.no_grad():
        return decoder(torch.tensor([part.ids for part in parts]))[:, :-1].log_softmax(-1)


@pytest.mark.parametrize(
    "name", ["plain", "tied head with bias", "learned", "rope longrope", "rope dynamic"]
)
def test_it_is_what_whole_passes_of_both_say(tmp_path, monkeypatch, name):
    monkeypatch.setattr(divergence, "_POSITIONS", 7)
    monkeypatch.setattr(divergence, "_TOKENS", 30)  # two windows of 12
    before = saved(tmp_path / "a", VARIANTS[name])
    after = saved(tmp_path / "b", VARIANTS[name], std=0.2)
    parts = windows(9, 12)
    steps = []
    found = measure(before, after, parts, progress=lambda *step: steps.append(step))
    p, q = whole(before, parts).double(), whole(after, parts).double()
    targets = torch.tensor([part.ids for part in parts])[:, 1:, None]
    nats = [-each.gather(-1, targets).mean().item() for each in (p, q)]
    assert (found.tokens, found.windows) == (99, 9)
    assert found.before.value == pytest.approx(nats[0], rel=1e-5)
    assert found.after.value == pytest.approx(nats[1], rel=1e-5)
    assert found.rise.value == pytest.approx(nats[1] - nats[0], rel=1e-4)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    assert found.kl.value == pytest.approx(kl, rel=1e-4)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert found.same_top.value == pytest.approx(same)
    for each in (found.before, found.rise, found.kl, found.same_top):
        assert each.low < each.value < each.high
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert {total for _, total in steps} == {len(steps)}


def test_the_same_weights_are_no_distance_apart(tmp_path):
    one = saved(tmp_path / "a", config())
    found = measure(one, one, windows(3, 12))
    assert (found.rise.value, found.kl.value, found.same_top.value) == (0, 0, 1)


def test_the_direction_of_the_divergence_is_from_before_to_after(tmp_path):
    one, other = saved(tmp_path / "a", config()), saved(tmp_path / "b", config(), seed=1)
    parts = windows(3, 12)
    there, back = measure(one, other, parts), measure(other, one, parts)
    assert there.rise.value == pytest.approx(-back.rise.value)
    assert there.kl.value != pytest.approx(back.kl.value, rel=1e-2)


def test_intervals_are_by_document_where_there_are_enough(tmp_path):
    one, other = saved(tmp_path / "a", config()), saved(tmp_path / "b", config(), seed=1)
    for documents, units in ((None, 16), (8, 8), (7, 16)):
        found = measure(one, other, windows(16, 12, documents))
        assert found.kl.count == found.before.count == units


def test_weights_that_come_back_in_the_other_layout_are_the_same_model(tmp_path):
    turned = layer(rotary={"layout": "interleaved"})
    before = saved(tmp_path / "a", config(turned, turned))
    encodings = dict.fromkeys(before.tensors, "F32")
    write_encoded(tmp_path / "b.gguf", before, encodings)
    after = open_checkpoint(tmp_path / "b.gguf")
    assert after.config != before.config
    assert abs(measure(before, after, windows(2, 12)).kl.value) < 1e-7


def test_no_more_than_a_layer_and_the_heads_are_in_memory(tmp_path):
    """Eight layers of 1.6 MB each; embeddings and heads are small beside them."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 128, "n_layers": 8, "n_heads": 4, "d_ff": 896}
    big = DecoderConfig.uniform(**sizes, max_positions=64)
    before = saved(tmp_path / "a", big)
    write_encoded(tmp_path / "b", before, choose_encodings(before, "Q4_0")[0])
    with TensorMemory() as memory:
        measure(before, open_checkpoint(tmp_path / "b"), windows(2, 12))
    one_layer = sum(
        tensor.nbytes for name, tensor in before.tensors.items() if name.startswith("layers.0.")
    )
    assert one_layer < memory.peak < 2 * one_layer


def test_what_a_layer_makes_on_its_way_is_that_of_a_few_windows(tmp_path, monkeypatch):
    """64 windows of 32 at once would take 2.9 MB for every step of a feed-forward of 352."""
    monkeypatch.setattr(divergence, "_TOKENS", 128)
    before = saved(tmp_path / "a", config(layer(feedforward={"d_ff": 352})))
    with TensorMemory() as memory:
        measure(before, before, windows(64, 32))
    assert memory.peak < 64 * 32 * 352 * 4


def test_quantising_costs_more_the_fewer_bits_there_are(tmp_path):
    wide = config(*[layer(feedforward={"d_ff": 64})] * 2, d_model=64)
    before = saved(tmp_path / "a", wide)
    costs = []
    for target in ("BF16", "Q8_0", "Q4_1", "Q4_0"):
        write_encoded(tmp_path / target, before, choose_encodings(before, target)[0])
        costs.append(measure(before, open_checkpoint(tmp_path / target), windows(4, 32)).kl.value)
    assert 0 < costs[0] < costs[1] < costs[2] < costs[3]


def test_windows_follow_each_other_in_turn_from_each_document():
    documents = [
        Document("a", tuple(range(10))),
        Document("b", tuple(range(20, 27))),
        Document("c", (50, 51)),
    ]
    found = cut_windows(documents, [7], 4, 9)
    assert found == [
        Window("a", (7, 0, 1, 2)),
        Window("b", (7, 20, 21, 22)),
        Window("a", (7, 3, 4, 5)),
        Window("b", (7, 23, 24, 25)),
        Window("a", (7, 6, 7, 8)),
    ]
    assert cut_windows(documents, [7], 4, 2) == found[:2]


def test_windows_that_cannot_be_are_refused():
    documents = [Document("a", (1, 2, 3))]
    with pytest.raises(UserError, match="no document has 5 tokens"):
        cut_windows(documents, [7], 6, 1)
    with pytest.raises(ValueError, match="a window of 1 tokens has no room"):
        cut_windows([replace(documents[0])], [7], 1, 1)
