import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from armillary.config import NormConfig
from armillary.parts.norm import LayerNorm, RMSNorm, build_norm

TINY = 1e-300  # ε → 0


def rms(d: int, eps: float = TINY) -> RMSNorm:
    return RMSNorm(d, eps=eps).double()


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


vectors = st.lists(
    st.floats(-1e3, 1e3, allow_subnormal=False).filter(lambda x: abs(x) > 1e-3),
    min_size=5,
    max_size=5,
).map(lambda values: rows(*values))


def test_the_worked_values() -> None:
    """x = [1, 3]: RMSNorm does not take the mean off, LayerNorm does."""
    x = rows(1, 3)
    assert_close(rms(2)(x), rows(0.447214, 1.341641), atol=5e-7, rtol=0)
    assert_close(rms(2)(x + 1), rows(2, 4) / 10**0.5)
    assert_close(rms(2)(x + 1), rows(0.632456, 1.264911), atol=5e-7, rtol=0)
    layer_norm = LayerNorm(2, eps=1e-30).double()
    assert_close(layer_norm(x), rows(-1, 1))
    assert_close(layer_norm(x + 1), rows(-1, 1))


@given(vectors, st.floats(1e-3, 1e3))
def test_a_positive_rescaling_changes_nothing(x: torch.Tensor, factor: float) -> None:
    assert_close(rms(5)(x * factor), rms(5)(x), atol=1e-12, rtol=0)


@given(vectors)
def test_the_root_mean_square_becomes_one(x: torch.Tensor) -> None:
    assert_close(rms(5)(x).square().mean(), torch.tensor(1.0).double(), atol=1e-12, rtol=0)


@given(vectors, st.floats(-1e3, 1e3))
def test_layer_norm_ignores_a_shift(x: torch.Tensor, shift: float) -> None:
    norm = LayerNorm(5, eps=1.0).double()
    assert_close(norm(x + shift), norm(x), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_zero_gives_zero_and_finite_gradients(kind: str) -> None:
    norm = build_norm(NormConfig(kind=kind), 6)
    x = torch.zeros(2, 6, requires_grad=True)
    out = norm(x)
    assert torch.equal(out, torch.zeros(2, 6))
    out.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_each_vector_has_a_statistic_of_its_own() -> None:
    """Over the last dimension only: no other token, row or head has a part in it."""
    x = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    for norm in (RMSNorm(7), LayerNorm(7)):
        assert_close(norm(x)[1, 2], norm(x[1, 2]))


def test_eps_stands_inside_the_root() -> None:
    """Case 69: outside it, 0.909 would come out."""
    x = torch.full((8,), 1e-4)
    assert_close(RMSNorm(8, eps=1e-5)(x), torch.full((8,), 0.0316), atol=5e-5, rtol=0)


@pytest.mark.parametrize("cast_before_weight", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_has_the_inputs_type(
    dtype: torch.dtype, offset: float, cast_before_weight: bool
) -> None:
    """Case 67: a float32 weight does not widen what follows."""
    x = torch.ones(2, 6, dtype=dtype)
    config = NormConfig(offset=offset, cast_before_weight=cast_before_weight)
    assert build_norm(config, 6)(x).dtype == dtype
    assert LayerNorm(6)(x).dtype == dtype


def test_the_statistic_is_wide() -> None:
    """The squares of these overflow float16, and their mean would be inf."""
    x = torch.full((4,), 1000.0, dtype=torch.float16)
    assert_close(RMSNorm(4).half()(x), torch.ones(4).half())
    x[0] = -1000.0
    assert torch.isfinite(LayerNorm(4).half()(x)).all()


def test_who_casts_first_shows_in_low_precision() -> None:
    """Case 68: Llama casts before the weight, Gemma after; in 26 % of elements that differs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=generator).bfloat16()
    weight = (1 + 0.1 * torch.randn(64, generator=generator)).bfloat16()
    results = []
    for cast_before_weight in (True, False):
        norm = RMSNorm(64, cast_before_weight=cast_before_weight).bfloat16()
        norm.weight.data.copy_(weight)
        results.append(norm(x))
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(results[0], (wide.bfloat16() * weight))
    assert torch.equal(results[1], (wide * weight.float()).bfloat16())
    assert float((results[0] != results[1]).float().mean()) == pytest.approx(0.26, abs=0.02)


@pytest.mark.parametrize("cast_before_weight", [True, False])
def test_the_offset_is_added_in_float32(cast_before_weight: bool) -> None:
    """Case 68: in bfloat16, 1 + 15.8125 is 16.75, and √2 times that would be 23.625 here."""
    norm = RMSNorm(2, TINY, offset=1.0, cast_before_weight=cast_before_weight).bfloat16()
    norm.weight.data.fill_(15.8125)
    assert norm(torch.tensor([1, 0], dtype=torch.bfloat16)).tolist() == [23.75, 0]


def test_an_offset_starts_as_one_and_is_added() -> None:
    norm = RMSNorm(3, offset=1.0)
    plain = RMSNorm(3)
    x = torch.tensor([1.0, -2.0, 5.0])
    assert_close(norm(x), plain(x))
    norm.weight.data += 0.5
    plain.weight.data += 0.5
    assert_close(norm(x), plain(x))
    assert norm.weight[0].item() == 0.5


def test_a_configuration_is_built_as_it_says() -> None:
    norm = build_norm(NormConfig(eps=1e-3, offset=1.0, cast_before_weight=False), 6)
    assert isinstance(norm, RMSNorm)
    assert (norm.eps, norm.offset, norm.cast_before_weight) == (1e-3, 1.0, False)
    assert repr(norm) == "RMSNorm(6, eps=0.001, offset=1.0)"
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    with_bias = build_norm(NormConfig(kind="layer", bias=True), 6)
    assert [name for name, _ in with_bias.named_parameters()] == ["weight", "bias"]
    assert build_norm(NormConfig(kind="layer"), 6).bias is None


def test_no_norm_keeps_running_statistics() -> None:
    assert not list(RMSNorm(4).buffers())
    assert not list(LayerNorm(4).buffers())


@pytest.mark.parametrize("norm", [RMSNorm(4), LayerNorm(4)])
@pytest.mark.parametrize("width", [1, 5])
def test_another_width_is_refused(norm: torch.nn.Module, width: int) -> None:
    """Width 1 would broadcast against the weight."""
    with pytest.raises(ValueError, match=f"width {width}, but the norm was made for 4"):
        norm(torch.ones(2, width))
