"""What the engine says that it computes: no more than the plans do, and nothing by default."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
)
from armillary.engine import coverage
from armillary.engine.coverage import COMPUTED, Every, NoKernelError, check_computed
from armillary.engine.decoder import EngineDecoder
from support.engine import engine, in_chunks, text
from support.models import EVERY_VARIANT, config, layer

DROPOUTS = {"dropout", "input_dropout"}
"""What only training does."""


class Mirrored(AttentionConfig):
    """Attention as it may become: with a setting that the lists know nothing of."""

    mirrored: bool = False


class Widened(FeedForwardConfig):
    """A feed-forward with a value that the lists know nothing of, and a setting with no default."""

    activation: Literal["silu", "clipped"] = "silu"  # type: ignore[assignment]
    n_experts: int


class Multiplied(DecoderConfig):
    """A decoder with another setting."""

    residual_multiplier: float = 1.0


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the classes of the configuration had learned those settings, and the lists had not."""
    more: dict[type[BaseModel], Any] = {
        kind: COMPUTED[kind.__mro__[1]] for kind in (Mirrored, Widened, Multiplied)
    }
    monkeypatch.setattr(coverage, "COMPUTED", {**COMPUTED, **more})


def attention(**entries: Any) -> Mirrored:
    return Mirrored(**({"n_heads": 6, "n_kv_heads": 2, "d_head": 10} | entries))


def with_attention(*parts: AttentionConfig) -> DecoderConfig:
    return config(*(LayerConfig(attention=part, feedforward=layer().feedforward) for part in parts))


def refusal(of: DecoderConfig) -> str:
    with pytest.raises(NoKernelError) as caught:
        check_computed(of)
    assert "\n" not in str(caught.value)
    return str(caught.value).removesuffix(" in the numba engine")


# --- What is not known is not computed -----------------------------------------------------------


@pytest.mark.usefixtures("learned")
def test_a_setting_that_is_not_known_is_computed_at_its_default_alone() -> None:
    plain, odd = attention(), attention(mirrored=True)
    check_computed(with_attention(plain, plain))
    assert refusal(with_attention(odd)) == "layer 0: attention.mirrored has no kernel"


@pytest.mark.usefixtures("learned")
def test_layers_that_miss_the_same_are_told_together() -> None:
    plain, odd = attention(), attention(mirrored=True)
    said = refusal(with_attention(plain, odd, odd, odd, plain, odd))
    assert said == "layers 1-3: attention.mirrored; layer 5: attention.mirrored have no kernel"


@pytest.mark.usefixtures("learned")
def test_a_value_that_is_not_known_and_a_setting_without_a_default_have_no_kernel() -> None:
    odd = Widened(d_ff=24, activation="clipped", n_experts=1)
    said = refusal(config(LayerConfig(attention=layer().attention, feedforward=odd)))
    parts = "feedforward.activation clipped, feedforward.n_experts"
    assert said == f"layer 0: {parts} has no kernel"


@pytest.mark.usefixtures("learned")
def test_a_setting_of_the_decoder_itself_is_told_without_layers() -> None:
    entries = dict(config())
    check_computed(Multiplied(**entries))
    said = refusal(Multiplied(**entries, residual_multiplier=0.5))
    assert said == "residual_multiplier has no kernel"


def test_a_part_of_another_class_has_no_kernel() -> None:
    """What derives from a known class may read the settings that it inherits in another way."""
    assert refusal(with_attention(attention())) == "layer 0: attention (Mirrored) has no kernel"


def test_a_known_setting_with_something_else_in_it_has_no_kernel() -> None:
    odd = layer().attention
    object.__setattr__(odd, "window", (3, 4))
    assert refusal(with_attention(odd)) == "layer 0: attention.window (3, 4) has no kernel"


def test_the_engine_refuses_before_it_reads_a_weight() -> None:
    with pytest.raises(NoKernelError, match="attention"):
        EngineDecoder(with_attention(attention()), {}, threads=1)


# --- What is known is computed -------------------------------------------------------------------


def networks(of: FeedForwardConfig | MixtureConfig) -> Iterator[BaseModel]:
    """A feed-forward, or a mixture and what is in it."""
    yield of
    if isinstance(of, MixtureConfig):
        yield from filter(None, (of.router, of.expert, of.shared))


def parts(of: DecoderConfig) -> Iterator[BaseModel]:
    """Every configuration in one."""
    yield of
    for value in of.layers:
        yield value
        yield from (value.attention, value.norm)
        yield from networks(value.feedforward)
        attention = value.attention
        yield from filter(None, (attention.rotary, attention.qk_norm, attention.latent))
    if of.final_norm is not None:
        yield of.final_norm


def test_all_that_the_decoders_tests_compute_is_said_to_be_computed() -> None:
    for of in EVERY_VARIANT.values():
        check_computed(of)


@pytest.mark.parametrize(
    "kind",
    COMPUTED,
)
def test_all_that_is_said_to_be_computed_is_held_to_the_specification(
    kind: type[BaseModel],
) -> None:
    """`test_decoder.py` compares these very configurations: no name or value is only listed."""
    met = [part for of in EVERY_VARIANT.values() for part in parts(of) if type(part) is kind]
    for name, computed in COMPUTED[kind].items():
        values = {str(getattr(part, name)) for part in met}
        if isinstance(computed, Every):
            assert values - {str(kind.model_fields[name].default)} or name in DROPOUTS, name
        else:
            assert values == {str(value) for value in computed}, name


def test_what_only_training_does_changes_no_logits() -> None:
    plain = config()
    changed = layer(attention={"dropout": 0.5}, feedforward={"dropout": 0.5}, dropout=0.5)
    dropping = config(changed, changed, input_dropout=0.5)
    logits = [in_chunks(engine(of, threads=1), text(9), [9]) for of in (plain, dropping)]
    np.testing.assert_array_equal(*logits)
