"""The torch decoder against the float64 specification, and the cache against the whole pass."""

import pytest
import torch

from armillary.config import NormConfig
from armillary.decoder import Decoder
from armillary.parts.kv_cache import KVCache
from support.checks import (
    CACHE,
    CHUNKINGS,
    LENGTH,
    PARENTS,
    SPECIFICATION,
    branch_gap,
    cache_gap,
    caches,
    gap,
    in_chunks,
    layout_gap,
    padded,
    specification_gap,
)
from support.models import EVERY_VARIANT as VARIANTS
from support.models import ORIGINAL_WINDOW, SCALINGS, build, config, layer, tokens


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_specification(name: str) -> None:
    decoder = build(VARIANTS[name])
    assert specification_gap(decoder, tokens(3, LENGTH)) <= SPECIFICATION


SAME_SWITCHES = {"plain", "rope default", "one kv head", "all kv heads"}
# Whose parameters are of another shape.
SAME_SWITCHES |= {name for name in VARIANTS if name.startswith("latent")}


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in SAME_SWITCHES])
def test_every_switch_changes_the_result(name: str) -> None:
    """Otherwise the comparison above would hold for a part that is not there."""
    decoder = build(VARIANTS[name])
    plain = build(VARIANTS["plain"])
    plain.load_state_dict(
        {key: decoder.state_dict().get(key, own) for key, own in plain.state_dict().items()}
    )
    ids = tokens(3, LENGTH)
    assert gap(decoder(ids), plain(ids)) > 1e-3


@pytest.mark.parametrize("name", ["plain", "window", "soft cap", "rope dynamic", "learned"])
def test_padding_on_either_side_is_that_of_the_specification(name: str) -> None:
    decoder = build(VARIANTS[name])
    ids, mask = tokens(3, LENGTH), padded(3, 4, -3)
    assert specification_gap(decoder, ids, mask=mask) <= SPECIFICATION
    assert torch.isfinite(decoder(ids, mask=mask)).all()


@pytest.mark.parametrize("name", ["plain", "window", "soft cap"])
def test_masks_over_pairs_are_those_of_the_specification(name: str) -> None:
    decoder = build(VARIANTS[name])
    ids = tokens(2, LENGTH)
    pairs = torch.rand(2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6
    pairs[0, 5] = False
    assert specification_gap(decoder, ids, mask=pairs) <= SPECIFICATION
    assert torch.equal(decoder(ids, mask=pairs[:, None].long()), decoder(ids, mask=pairs))


def test_documents_are_those_of_the_specification_and_of_each_alone() -> None:
    decoder = build(VARIANTS["plain"])
    ids = tokens(2, LENGTH)
    documents = torch.tensor([[0] * 5 + [1] * 8, [4] * 2 + [9] * 7 + [2] * 4])
    ours = decoder(ids, documents=documents)
    assert specification_gap(decoder, ids, documents=documents) <= SPECIFICATION
    assert gap(ours[:1, 5:], decoder(ids[:1, 5:])) <= CACHE
    assert gap(ours[1:, 2:9], decoder(ids[1:, 2:9])) <= CACHE


def test_interleaved_documents_are_those_of_the_specification() -> None:
    """A document that goes on after another keeps counting, with padding in the middle too."""
    documents = torch.tensor([[0, 1, 0, 1, 1, 0, 2, 0, 2, 1, 0, 0, 1], [3] * 6 + [0] * 3 + [3] * 4])
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, 4:6], mask[1, 7] = False, False
    for name in ("plain", "rope dynamic"):
        decoder = build(VARIANTS[name])
        arguments = {"documents": documents, "mask": mask}
        assert specification_gap(decoder, tokens(2, LENGTH), **arguments) <= SPECIFICATION


@pytest.mark.parametrize("name", ["plain", "partial interleaved", "rope yarn", "rope longrope"])
def test_explicit_positions_are_those_of_the_specification(name: str) -> None:
    """Any integers in any order, the same for all rows or one list per row."""
    decoder = build(VARIANTS[name])
    ids = tokens(2, 5)
    for positions in (
        torch.tensor([7, 3, 3, 60, 0]),
        torch.tensor([[1, 2, 9, 4, 5], [0, 8, 7, 6, 2]]),
    ):
        assert specification_gap(decoder, ids, positions=positions) <= SPECIFICATION


@pytest.mark.parametrize("length", [4, 30])
@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_a_fixed_rotary_length_is_that_of_the_specification(name: str, length: int) -> None:
    decoder = build(VARIANTS[name])
    assert specification_gap(decoder, tokens(2, LENGTH), rotary_length=length) <= SPECIFICATION


@pytest.mark.parametrize("heads", [(6, 2), (8, 2), (32, 4)])
@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_converted_weights_give_the_logits_of_the_other_layout(
    layout: str, heads: tuple[int, int]
) -> None:
    """Cases 12 and 14, biases and q/k norms too; 32 // 4 is not 4, and 8 // 2 is not 2."""
    changed = layer(
        rotary={"layout": layout, "d_rotary": 6},
        attention={
            "n_heads": heads[0],
            "n_kv_heads": heads[1],
            "qkv_bias": True,
            "qk_norm": NormConfig(kind="layer", bias=True),
        },
    )
    decoder = build(config(changed, changed))
    assert layout_gap(decoder, tokens(2, LENGTH)) <= SPECIFICATION


def test_the_last_logits_alone_are_the_last_of_all() -> None:
    decoder = build(VARIANTS["final soft cap"])
    ids = tokens(2, 5)
    assert gap(decoder(ids, logits="last"), decoder(ids)[:, -1:]) <= CACHE


# --- The cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("name", VARIANTS)
def test_cached_is_the_whole_pass(
    name: str, chunking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every variant and cache kind, with a padded row; windows are made to wrap."""
    monkeypatch.setattr("armillary.parts.layer_store.WINDOW_SLACK", 2)
    monkeypatch.setattr("armillary.parts.layer_store._GROWTH", 2)
    decoder = build(VARIANTS[name])
    ids, mask = tokens(2, LENGTH), padded(2, 0, 2)
    for kind, cache in caches(decoder.config, 2).items():
        assert cache_gap(decoder, cache, ids, CHUNKINGS[chunking], mask) <= CACHE, kind


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_a_cache_of_fixed_rotary_length_is_the_whole_pass_of_that_length(name: str) -> None:
    decoder = build(VARIANTS[name])
    ids = tokens(2, LENGTH)
    whole = decoder(ids, rotary_length=[20, 30])
    cache = KVCache(decoder.config, 2, rotary_length=[20, 30])
    got = [logits for _, logits in in_chunks(decoder, cache, ids, [3, 1, 4, 5])]
    assert gap(torch.cat(got, 1), whole) <= CACHE


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_keeping_keys_across_a_change_of_frequencies_would_be_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above must notice a cache that mixes keys of two settings (case 39)."""
    monkeypatch.setattr(KVCache, "_is_stale", lambda *_: False)
    decoder = build(VARIANTS[name])
    ids = tokens(1, LENGTH)
    cache = KVCache(decoder.config)
    assert cache_gap(decoder, cache, ids, [ORIGINAL_WINDOW - 1, 6]) > 1e-2


@pytest.mark.parametrize("name", [name for name in VARIANTS if "dynamic" not in name])
def test_branches_are_whole_passes_over_the_text_of_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every variant and cache kind, with a padded row; windows are made to wrap."""
    monkeypatch.setattr("armillary.parts.layer_store.WINDOW_SLACK", 2)
    monkeypatch.setattr("armillary.parts.layer_store._GROWTH", 2)
    decoder = build(VARIANTS[name])
    length = 20
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.bool)
    mask[1, :2] = False
    for kind, cache in {
        "fixed": KVCache(decoder.config, 2, capacity=length),
        "growing": KVCache(decoder.config, 2),
        "windowed": KVCache(decoder.config, 2, windowed=True),
    }.items():
        assert branch_gap(decoder, cache, ids, mask) <= CACHE, kind


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_branches_of_a_fixed_rotary_length_are_whole_passes_of_that_length(name: str) -> None:
    decoder = build(VARIANTS[name])
    for length in (5, 30):
        cache = KVCache(decoder.config, 2, rotary_length=length)
        assert branch_gap(decoder, cache, tokens(2, LENGTH)) <= CACHE


def test_branches_may_follow_nothing() -> None:
    decoder = build(VARIANTS["mixed layers"])
    ids = tokens(2, len(PARENTS))
    hidden = decoder.branches(ids, PARENTS, KVCache(decoder.config, 2))
    assert gap(hidden[:, 2], decoder.hidden(ids[:, :3])[:, -1]) <= CACHE
    assert gap(hidden[:, 5], decoder.hidden(ids[:, 4:6])[:, -1]) <= CACHE


def test_a_branch_does_not_see_another() -> None:
    decoder = build(VARIANTS["plain"])
    ids, cache = tokens(1, LENGTH), KVCache(decoder.config)
    decoder(ids[:, :5], cache=cache)
    first = decoder.branches(ids[:, 5:], PARENTS, cache)
    other = ids.clone()
    other[:, 5 + 3] += 1
    second = decoder.branches(other[:, 5:] % 61, PARENTS, cache)
    changed = [
        number for number in range(8) if not torch.equal(first[:, number], second[:, number])
    ]
    assert changed == [3, 6]


def test_prefill_in_chunks_is_the_whole_prompt() -> None:
    decoder = build(VARIANTS["window"])
    ids = tokens(2, LENGTH)
    cache = KVCache(decoder.config, 2)
    last = decoder.prefill(ids, cache, chunk=4)
    assert gap(last, decoder(ids)[:, -1:]) <= CACHE
    assert cache.length == LENGTH


def test_prefill_takes_at_least_a_token_at_a_time() -> None:
    decoder = build(VARIANTS["plain"])
    for chunk in (0, -4):
        with pytest.raises(ValueError, match=f"chunk is {chunk}"):
            decoder.prefill(tokens(1, 3), KVCache(decoder.config), chunk=chunk)


def test_a_length_seen_before_leaves_no_trace() -> None:
    """Case 40: a short text after a long one is as if the long one had never been."""
    for name in SCALINGS:
        decoder = build(VARIANTS[f"rope {name}"])
        short = decoder(tokens(1, 5))
        decoder(tokens(1, 40))
        assert torch.equal(decoder(tokens(1, 5)), short)


def test_queries_in_blocks_give_what_all_at_once_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix over all pairs is held; the block's size must not show."""
    ids, mask = tokens(2, LENGTH), padded(2, 0, 5)
    for name in ("plain", "window", "soft cap and window"):
        decoder = build(VARIANTS[name])
        whole = decoder(ids, mask=mask)
        monkeypatch.setattr("armillary.parts.attention.QUERY_BLOCK", 4)
        assert gap(decoder(ids, mask=mask)[mask], whole[mask]) <= CACHE
        monkeypatch.undo()


# --- Compiled ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("q/k norm", "soft cap and window", "mixed layers", "sinusoidal"),
        *(f"rope {rule}" for rule in SCALINGS),
    ],
)
def test_a_whole_pass_compiles_to_one_graph(name: str) -> None:
    """Its frequencies are exact too: compiled NumPy code may compute in float32 on the way.

    A rule that varies is told the length, which would else depend on what the mask holds.
    """
    decoder = build(VARIANTS[name])
    torch.compiler.reset()
    compiled = torch.compile(decoder, backend="eager", fullgraph=True)
    ids, mask = tokens(2, LENGTH), padded(2, 0, 4)
    ours, plain = (run(ids, mask=mask, rotary_length=LENGTH) for run in (compiled, decoder))
    assert gap(ours[mask], plain[mask]) <= CACHE


@pytest.mark.parametrize("capacity", [LENGTH, None])
def test_compiled_steps_are_not_compiled_again_for_each_token(capacity: int | None) -> None:
    """Case 66: counters that the cache keeps would be guards of the compiled step."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    decoder = build(VARIANTS["plain"])
    torch.compiler.reset()
    compiled = torch.compile(decoder, backend=counting)
    ids, cache = tokens(1, LENGTH), KVCache(decoder.config, 1, capacity)
    whole = decoder(ids)
    decoder.prefill(ids[:, :2], cache)
    for t in range(2, LENGTH):
        logits = compiled(ids[:, t : t + 1], cache=cache)
        assert gap(logits, whole[:, t : t + 1]) <= CACHE
    assert len(graphs) <= 2


# --- Parameters -------------------------------------------------------------------------------


def test_initialisation_is_as_stated() -> None:
    decoder = Decoder(config(layer(norm_placement="sandwich"), *[layer()] * 7))
    decoder.initialise(std=0.05, generator=torch.Generator().manual_seed(0))
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith(("out.weight", "down.weight")):
            assert float(parameter.detach().std()) == pytest.approx(0.05 / 4, rel=0.1), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.05, rel=0.1), name


def test_a_norm_with_an_offset_starts_as_one() -> None:
    decoder = Decoder(VARIANTS["norm offset"])
    assert not decoder.final_norm.weight.any()


def test_casting_a_model_does_not_touch_the_frequencies() -> None:
    """Case 2: a table kept as a buffer would be cast with the model."""
    decoder = build(VARIANTS["rope yarn"], dtype=torch.float32)
    ids = tokens(1, 9)
    before = decoder(ids)
    assert torch.equal(decoder.double().float()(ids), before)
    assert not list(decoder.buffers())
    assert not [name for name in decoder.state_dict() if "rot" in name or "freq" in name]


def test_what_device_tensors_are_made_on_by_default_does_not_matter() -> None:
    """A caller may have set a default device; meta stands for any other than the model's."""
    decoder = build(VARIANTS["rope yarn"], dtype=torch.float32)
    ids, mask = tokens(2, LENGTH), padded(2, 0, 4)
    cache = KVCache(decoder.config, 2)
    with torch.device("meta"):
        whole = decoder(ids, mask=mask)
        last = decoder.prefill(ids, cache, mask=mask, chunk=5)
    assert gap(whole[:, -1:], last) <= 1e-4


def test_a_decoder_made_on_the_meta_device_computes_the_same_once_filled() -> None:
    """Case 5: nothing but the parameters has to be filled."""
    whole = build(VARIANTS["rope llama3"])
    with torch.device("meta"):
        empty = Decoder(whole.config)
    empty.load_state_dict(whole.state_dict(), assign=True)
    ids = tokens(1, 9)
    assert torch.equal(empty.eval()(ids), whole(ids))


def test_dropout_works_in_training_only() -> None:
    dropped = layer(attention={"dropout": 0.5}, feedforward={"dropout": 0.5}, dropout=0.5)
    decoder = build(config(dropped, dropped, input_dropout=0.5))
    ids = tokens(2, 6)
    assert torch.equal(decoder(ids), decoder(ids))
    decoder.train()
    assert not torch.equal(decoder(ids), decoder(ids))


def test_gradients_reach_every_parameter_and_none_is_nan() -> None:
    for name, variant in VARIANTS.items():
        decoder = build(variant)
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[1, :3] = False
        decoder(tokens(2, 6), mask=mask)[mask].square().sum().backward()
        for key, parameter in decoder.named_parameters():
            if not parameter.requires_grad:
                assert key.endswith("router.selection_bias")
                continue
            assert parameter.grad is not None, (name, key)
            assert torch.isfinite(parameter.grad).all(), (name, key)


def test_a_token_changes_nothing_before_it() -> None:
    for name, variant in VARIANTS.items():
        decoder = build(variant)
        ids = tokens(1, 7)
        changed = ids.clone()
        changed[0, 4] = (ids[0, 4] + 1) % 61
        before, after = decoder(ids), decoder(changed)
        # Experts multiply the tokens that chose them together, which moves the last bits.
        rounding = 1e-12 if "experts" in name else 0.0
        torch.testing.assert_close(before[:, :4], after[:, :4], atol=rounding, rtol=0, msg=name)
        assert not torch.allclose(before[:, 4:], after[:, 4:]), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": torch.arange(4)}, r"positions of shape \(4,\)"),
        ({"positions": torch.zeros(2, 5)}, "integers"),
        ({"mask": torch.ones(2, 4)}, "mask of shape"),
        ({"mask": torch.full((2, 5), -1.0)}, "only 0 and 1"),
        ({"documents": torch.zeros(5, dtype=torch.long)}, "documents of shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, object], message: str) -> None:
    decoder = build(VARIANTS["plain"])
    with pytest.raises(ValueError, match=message):
        decoder(tokens(2, 5), **arguments)


def test_a_learned_table_has_no_position_beyond_its_size() -> None:
    decoder = build(
        config(layer(attention={"rotary": None}), position_table="learned", max_positions=6)
    )
    decoder(tokens(1, 6))
    with pytest.raises(ValueError, match="position 6 is outside the learned table"):
        decoder(tokens(1, 7))
