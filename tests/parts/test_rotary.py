"""Rotation alone: worked values, invariants, layouts, precision, shapes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.testing import assert_close

from armillary.config import AttentionConfig, RotaryConfig
from armillary.parts.rotary import (
    convert_layout,
    frequencies,
    rotate,
    rotation,
    varies_with_length,
)
from armillary.rope_scaling import AnyRopeScaling, PositionInterpolation, trained_frequencies
from support.models import SCALINGS

LAYOUTS = ["half_split", "interleaved"]
POSITIONS = st.integers(-3000, 200_000)


def turned(
    x: torch.Tensor, position: int | list[int], config: RotaryConfig, **options: object
) -> torch.Tensor:
    """x (..., d), one vector or one per position, rotated in x's type."""
    positions = torch.tensor([position] if isinstance(position, int) else position)
    turn = rotation(config, positions, dtype=x.dtype, **options)
    return rotate(x.view(1, 1, len(positions), -1), turn).view(x.shape)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def near(values: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to the six decimals that the specification prints."""
    return bool((values - expected).abs().max() < 6e-7)


# --- Worked values ----------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 3])
def test_two_channels_a_quarter_turn_apart(shift: int) -> None:
    """θ = π/2: interpolating the one pair's θ = 1 by 2/π."""
    quarter = RotaryConfig(d_rotary=2, scaling=PositionInterpolation(factor=2 / math.pi))
    q, k = vector(1, 2), vector(2, 1)
    assert q @ k == 4
    rotated_q, rotated_k = turned(q, 1 + shift, quarter), turned(k, 2 + shift, quarter)
    if shift == 0:
        assert_close(rotated_q, vector(-2, 1))
        assert_close(rotated_k, vector(-2, -1))
    assert float(rotated_q @ rotated_k) == pytest.approx(3, abs=1e-12)
    assert float(rotated_q @ rotated_k / 2**0.5) == pytest.approx(2.1213, abs=5e-5)
    for rotated in (rotated_q, rotated_k):
        assert float(rotated @ rotated) == pytest.approx(5, abs=1e-12)


def test_four_channels_in_adjacent_pairs() -> None:
    config = RotaryConfig(d_rotary=4, layout="interleaved")
    q, k = vector(1, 2, 3, 4), vector(2, 1, 0, 1)
    rotated_q, rotated_k = turned(q, 1, config), turned(k, 3, config)
    assert near(rotated_q, vector(-1.142640, 1.922076, 2.959851, 4.029800))
    assert near(rotated_k, vector(-2.121105, -0.707752, -0.029996, 0.999550))
    product = rotated_q @ rotated_k
    assert near(product, vector(5.002509).squeeze())
    assert near(product / 2, vector(2.501254).squeeze())
    assert_close(q @ turned(k, 2, config), product, atol=1e-12, rtol=0)


def test_the_same_four_channels_as_halves_need_another_order() -> None:
    config = RotaryConfig(d_rotary=4, layout="half_split")
    q, k = vector(1, 2, 3, 4), vector(2, 1, 0, 1)
    without = turned(q, 1, config) @ turned(k, 3, config)
    assert near(without, vector(10.662288).squeeze())
    order = [0, 2, 1, 3]
    permuted = turned(q[order], 1, config) @ turned(k[order], 3, config)
    assert near(permuted, vector(5.002509).squeeze())


# --- Invariants -------------------------------------------------------------------------------

heads = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=8, max_size=8).map(
    lambda values: vector(*values)
)
configs = st.builds(
    RotaryConfig,
    d_rotary=st.sampled_from([2, 6, 8]),
    base=st.sampled_from([1.5, 100.0, 10000.0, 5e5]),
    layout=st.sampled_from(LAYOUTS),
)
close = {"atol": 1e-12, "rtol": 1e-12}


@given(heads, POSITIONS, configs)
def test_length_is_kept(q: torch.Tensor, m: int, config: RotaryConfig) -> None:
    assert_close(turned(q, m, config).norm(), q.norm(), **close)


@given(heads, heads, st.integers(0, 500), st.integers(0, 500), st.integers(-500, 500), configs)
def test_a_common_shift_leaves_the_product(
    q: torch.Tensor, k: torch.Tensor, m: int, n: int, shift: int, config: RotaryConfig
) -> None:
    """Up to the rounding of the angles, which are of the order of the position."""
    before = turned(q, m, config) @ turned(k, n, config)
    after = turned(q, m + shift, config) @ turned(k, n + shift, config)
    assert_close(after, before, atol=1e-12 * max(1.0, float(q.norm() * k.norm())), rtol=0)


@given(heads, heads, POSITIONS, configs)
def test_at_one_position_the_product_is_the_unrotated_one(
    q: torch.Tensor, k: torch.Tensor, m: int, config: RotaryConfig
) -> None:
    product = turned(q, m, config) @ turned(k, m, config)
    assert_close(product, q @ k, atol=1e-12 * max(1.0, float(q.norm() * k.norm())), rtol=0)


def test_equal_distances_with_other_contents_score_otherwise() -> None:
    config = RotaryConfig(d_rotary=8)
    q, k = random(8), random(2, 8, seed=1)
    scores = [turned(q, 5, config) @ turned(key, 3, config) for key in k]
    assert abs(scores[0] - scores[1]) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_score_depends_on_the_distance_alone(layout: str) -> None:
    """Case 9: frequencies in one order, rotation in the other, would break this."""
    config = RotaryConfig(d_rotary=64, layout=layout)
    q, k = (random(64, seed=seed, dtype=torch.float32) for seed in (0, 1))
    scores = [float(turned(q, p, config) @ turned(k, p + 3, config)) for p in (0, 7, 1000)]
    assert max(scores) - min(scores) < 1e-4
    assert abs(scores[0] - float(q @ k)) > 0.1


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rotation_can_be_undone(layout: str, name: str) -> None:
    """The attention factor too."""
    config = RotaryConfig(d_rotary=10, base=100.0, layout=layout, scaling=SCALINGS[name])
    x = random(2, 3, 5, 12)
    turn = rotation(config, torch.tensor([4, 0, 9, 9, 77]), lengths=78, dtype=x.dtype)
    assert not torch.allclose(rotate(x, turn), x)
    assert_close(rotate(rotate(x, turn), turn, inverse=True), x, **close)


# --- Frequencies and which channels turn ------------------------------------------------------


@pytest.mark.parametrize("position", [1, 600, 3000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_partial_rotation_has_the_pairs_and_angles_of_its_own_width(
    layout: str, position: int
) -> None:
    """Case 15: head width 96, rotary width 24; pair i turns at 10000^(−2i/24)."""
    config = RotaryConfig(d_rotary=24, layout=layout)
    unit = torch.eye(96, dtype=torch.float64)
    rotated = turned(unit, [position] * 96, config)
    for i in range(12):
        a, b = (i, i + 12) if layout == "half_split" else (2 * i, 2 * i + 1)
        angle = position * 10000 ** (-2 * i / 24)
        expected = torch.zeros(2, 96, dtype=torch.float64)
        expected[0, [a, b]] = vector(math.cos(angle), math.sin(angle))
        expected[1, [a, b]] = vector(-math.sin(angle), math.cos(angle))
        assert_close(rotated[[a, b]], expected, atol=1e-12, rtol=0)
    assert torch.equal(rotated[24:], unit[24:])


def test_partial_rotation_means_the_first_channels() -> None:
    """Case 17: pairs over the whole head, most of them still, is another convention."""
    x = random(8)
    ours = turned(x, 1, RotaryConfig(d_rotary=4))
    angles = vector(1.0, 0.01, 0.0, 0.0)
    first, second = x[:4], x[4:]
    whole_head = torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ]
    )
    assert (ours - whole_head).abs().max() > 0.1


def test_a_convention_or_a_width_that_is_not_known_is_refused() -> None:
    """Cases 17 and 18: nothing is overwritten by a default."""
    with pytest.raises(ValidationError, match="partial_rotary_factor"):
        RotaryConfig(d_rotary=4, partial_rotary_factor=0.5)
    with pytest.raises(ValidationError, match="d_rotary"):
        RotaryConfig()
    with pytest.raises(ValidationError, match="layout"):
        RotaryConfig(d_rotary=4, layout="proportional")
    with pytest.raises(ValidationError, match="d_rotary is 5"):
        RotaryConfig(d_rotary=5)
    with pytest.raises(ValidationError, match="d_rotary 12 is more than a head's width d_head 10"):
        AttentionConfig(n_heads=6, n_kv_heads=2, d_head=10, rotary=RotaryConfig(d_rotary=12))


@pytest.mark.parametrize("name", SCALINGS)
def test_the_attention_factor_touches_the_rotated_channels_only(name: str) -> None:
    rule = SCALINGS[name]
    x = random(12)
    rotated = turned(x, 6, RotaryConfig(d_rotary=10, scaling=rule), lengths=7)
    assert_close(rotated[:10].norm(), x[:10].norm() * rule.attention_factor(), **close)
    assert torch.equal(rotated[10:], x[10:])


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [8, 9, 30])
def test_angles_are_position_times_the_rules_frequency(name: str, length: int) -> None:
    rule = SCALINGS[name]
    config = RotaryConfig(d_rotary=10, base=100.0, scaling=rule)
    positions = torch.tensor([0, 3, 25])
    turn = rotation(config, positions, lengths=length, dtype=torch.float64)
    angles = positions.numpy()[:, None] * rule.frequencies(100.0, 10, length)
    factor = rule.attention_factor()
    np.testing.assert_allclose(turn.cos[0].numpy(), factor * np.cos(angles), atol=1e-12)
    np.testing.assert_allclose(turn.sin[0].numpy(), factor * np.sin(angles), atol=1e-12)


def test_rules_that_vary_with_the_length_are_known() -> None:
    assert {name for name, rule in SCALINGS.items() if varies_with_length(rule)} == {
        "dynamic",
        "longrope",
    }


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_each_row_may_have_a_length_of_its_own(name: str) -> None:
    config = RotaryConfig(d_rotary=10, base=100.0, scaling=SCALINGS[name])
    positions = torch.tensor([[0, 1, 7], [5, 19, 2]])
    rows = rotation(config, positions, lengths=[8, 20])
    assert torch.equal(rows.cos[0], rotation(config, positions[0], lengths=8).cos[0])
    assert torch.equal(rows.cos[1], rotation(config, positions[1], lengths=20).cos[0])
    assert not torch.equal(rows.cos[1], rotation(config, positions[1], lengths=8).cos[0])
    shared = rotation(config, positions[0], lengths=[8, 20])
    assert shared.cos.shape == (2, 3, 5)


# --- Positions --------------------------------------------------------------------------------


def test_positions_may_be_any_integers_in_any_order() -> None:
    config = RotaryConfig(d_rotary=8)
    x = random(1, 2, 4, 8)
    order = [3, 0, 2, 1]
    positions = torch.tensor([0, 1, 50, 7])
    forward = rotate(x, rotation(config, positions, dtype=x.dtype))
    shuffled = rotate(x[:, :, order], rotation(config, positions[order], dtype=x.dtype))
    assert torch.equal(shuffled, forward[:, :, order])


def test_each_row_may_have_positions_of_its_own() -> None:
    config = RotaryConfig(d_rotary=8)
    x = random(2, 3, 4, 8)
    positions = torch.tensor([[0, 1, 2, 3], [9, 4, 4, 0]])
    rows = rotate(x, rotation(config, positions, dtype=x.dtype))
    for row in range(2):
        alone = rotate(x[row : row + 1], rotation(config, positions[row], dtype=x.dtype))
        assert torch.equal(rows[row : row + 1], alone)


def test_an_offset_is_not_forgotten() -> None:
    """Case 7: offset 5 differs from offset 0, and equals rows 5 and on of a longer call."""
    config = RotaryConfig(d_rotary=8)
    x = random(1, 1, 3, 8)
    at_0, at_5 = (
        rotate(x, rotation(config, torch.arange(start, start + 3), dtype=x.dtype))
        for start in (0, 5)
    )
    assert not torch.allclose(at_0, at_5)
    longer = rotation(config, torch.arange(8), dtype=x.dtype)
    repeated = torch.cat([x, x[:, :, :2], x], dim=2)
    assert torch.equal(rotate(repeated, longer)[:, :, 5:], at_5)


@pytest.mark.parametrize("longest_first", [True, False])
def test_longer_first_or_last_gives_the_same_values(longest_first: bool) -> None:
    config = RotaryConfig(d_rotary=8)
    lengths = [4000, 7] if longest_first else [7, 4000]
    tables = {length: rotation(config, torch.arange(length)) for length in lengths}
    assert torch.equal(tables[4000].cos[:, :7], tables[7].cos)
    assert torch.equal(tables[4000].sin[:, :7], tables[7].sin)


# --- Precision --------------------------------------------------------------------------------


def test_autocast_does_not_touch_the_angles() -> None:
    """Case 1: as a matrix product under autocast they would be off by 14.4 rad at 4095."""
    config = RotaryConfig(d_rotary=64)
    positions = torch.arange(4096)
    with torch.autocast("cpu", torch.bfloat16):
        turn = rotation(config, positions)
        x = rotate(random(1, 1, 4096, 64, dtype=torch.float32), turn)
    angles = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    assert turn.cos.dtype == turn.sin.dtype == x.dtype == torch.float32
    assert np.abs(turn.cos[0].numpy() - np.cos(angles)).max() < 1e-3
    assert np.abs(turn.sin[0].numpy() - np.sin(angles)).max() < 1e-3
    without = rotation(config, positions)
    assert torch.equal(turn.cos, without.cos)
    assert torch.equal(turn.sin, without.sin)


@pytest.mark.parametrize("rule", SCALINGS.values(), ids=SCALINGS)
def test_float32_frequencies_are_the_exact_ones_but_for_rounding(rule: AnyRopeScaling) -> None:
    """Of the exponent, which the power multiplies by ln b, and of the power and the division."""
    config = RotaryConfig(d_rotary=10, scaling=rule)
    narrow, exact = (
        frequencies(config, 1000, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(
        narrow.double(), exact, rtol=(math.log(config.base) + 2) * 2**-24, atol=0.0
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_float32_angles_are_those_of_trained_frequencies_compiled_too(name: str) -> None:
    """To the last bit: the engine has the same, and compiled NumPy code may round otherwise."""
    config = RotaryConfig(d_rotary=10, base=150000.0, scaling=SCALINGS[name])
    positions = torch.arange(5000)
    theta = trained_frequencies(config.scaling, config.base, 10, 300).astype(np.float32)
    angles = positions.float()[:, None] * torch.from_numpy(theta)
    torch.compiler.reset()
    compiled = torch.compile(rotation, backend="eager", fullgraph=True)
    for run in (rotation, compiled):
        found = run(config, positions, lengths=300)
        factor = config.scaling.attention_factor()
        assert torch.equal(found.cos[0], angles.cos() * factor)
        assert torch.equal(found.sin[0], angles.sin() * factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_cos_and_sin_are_cast(dtype: torch.dtype) -> None:
    """Cases 2 and 3: each is the nearest narrow number to that of float32, at any position."""
    config = RotaryConfig(d_rotary=64)
    positions = torch.tensor([257, 2049, 4095, 131_071])
    narrow = rotation(config, positions, dtype=dtype)
    wide = rotation(config, positions, dtype=torch.float32)
    assert torch.equal(narrow.cos, wide.cos.to(dtype))
    assert torch.equal(narrow.sin, wide.sin.to(dtype))
    assert rotate(torch.ones(1, 1, 4, 64, dtype=dtype), narrow).dtype == dtype


def distinct(config: RotaryConfig, positions: torch.Tensor, dtype: torch.dtype) -> int:
    turn = rotation(config, positions, dtype=dtype)
    return len(torch.cat([turn.cos[0], turn.sin[0]], dim=-1).unique(dim=0))


def test_no_two_positions_collide() -> None:
    """Case 3: positions held in bfloat16 would leave 769 and 1409 rows."""
    assert distinct(RotaryConfig(d_rotary=64), torch.arange(4096), torch.float32) == 4096
    assert distinct(RotaryConfig(d_rotary=4), torch.arange(131_072), torch.float32) == 131_072


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_positions_do_not_collapse(dtype: torch.dtype) -> None:
    """Case 4: beyond 65,536, bfloat16 holds every 512th integer only."""
    assert distinct(RotaryConfig(d_rotary=64), torch.arange(65536, 65600), dtype) == 64


# --- Shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_may_stand_before_or_after_the_positions(layout: str) -> None:
    """Said by the caller: h = T = 4, so that nobody could guess it."""
    turn = rotation(RotaryConfig(d_rotary=6, layout=layout), torch.arange(4), dtype=torch.float64)
    x = random(2, 4, 4, 8)
    bhtd = rotate(x, turn)
    bthd = rotate(x.transpose(1, 2), turn, order="bthd")
    assert_close(bthd.transpose(1, 2), bhtd, atol=0, rtol=0)
    assert not torch.allclose(rotate(x, turn, order="bthd"), bhtd)


@pytest.mark.parametrize("batch", [1, 4])
def test_positions_never_line_up_with_the_batch(batch: int) -> None:
    """For B = 1 or B = T, tables of shape (T, 1, 1, d) would broadcast along the batch."""
    x = random(1, 2, 4, 8).expand(batch, 2, 4, 8)
    rotated = rotate(x, rotation(RotaryConfig(d_rotary=8), torch.arange(4), dtype=x.dtype))
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    assert not torch.allclose(rotated[:, :, 1], x[:, :, 1])
    assert torch.equal(rotated, rotated[:1].expand_as(rotated))


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (2, 4, 3, 8), (2, 3, 1, 8), (2, 4, 8)])
def test_the_count_of_positions_is_that_of_the_input(shape: tuple[int, ...]) -> None:
    turn = rotation(RotaryConfig(d_rotary=8), torch.arange(4))
    with pytest.raises(ValueError, match="4 positions"):
        rotate(torch.zeros(shape), turn)


def test_rows_of_positions_are_those_of_the_batch() -> None:
    turn = rotation(RotaryConfig(d_rotary=8), torch.zeros(3, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="3 rows and 4 positions"):
        rotate(torch.zeros(2, 5, 4, 8), turn)


def test_a_narrow_head_is_refused() -> None:
    turn = rotation(RotaryConfig(d_rotary=8), torch.arange(4))
    with pytest.raises(ValueError, match="x has 6 channels, but 8 are to be rotated"):
        rotate(torch.zeros(2, 3, 4, 6), turn)


@pytest.mark.parametrize(
    "positions", [torch.zeros(3), torch.tensor(3), torch.zeros(1, 1, 3, dtype=torch.long)]
)
def test_positions_of_another_kind_are_refused(positions: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="positions must be integers of shape"):
        rotation(RotaryConfig(d_rotary=8), positions)


def test_a_length_that_is_needed_must_be_given() -> None:
    config = RotaryConfig(d_rotary=10, scaling=SCALINGS["dynamic"])
    with pytest.raises(ValueError, match="'dynamic' depends on the text's length"):
        rotation(config, torch.arange(3))
    with pytest.raises(ValueError, match="3 lengths for 2 rows"):
        rotation(config, torch.zeros(2, 4, dtype=torch.long), lengths=[1, 2, 3])


# --- The other layout -------------------------------------------------------------------------


def test_layouts_agree_on_permuted_channels_and_not_otherwise() -> None:
    """Case 11: at equal positions both agree anyway, so one token proves nothing."""
    q, k = random(1, 1, 6, 8), random(1, 1, 6, 8, seed=1)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def scores(layout: str, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        turn = rotation(RotaryConfig(d_rotary=8, layout=layout), torch.arange(6), dtype=q.dtype)
        return rotate(q, turn) @ rotate(k, turn).transpose(-1, -2)

    interleaved = scores("interleaved", q, k)
    assert_close(scores("half_split", q[..., order], k[..., order]), interleaved, atol=1e-6, rtol=0)
    unpermuted = (scores("half_split", q, k) - interleaved).abs()
    assert unpermuted.max() > 1
    assert unpermuted.diagonal(dim1=-2, dim2=-1).max() < 1e-12


@pytest.mark.parametrize(
    ("n_heads", "d_rotary"), [(6, 4), (2, 4), (1, 4), (32, 6), (4, 6), (3, 64)]
)
@pytest.mark.parametrize("rank", [None, 1, 40])
def test_conversions_undo_each_other_bit_by_bit(
    n_heads: int, d_rotary: int, rank: int | None
) -> None:
    """Case 13: matrices, biases, q/k-norm vectors (one head), low-rank adapters' rows."""
    d_head = d_rotary + 2
    rows = n_heads * d_head
    weight = random(rows) if rank is None else random(rows, rank)
    sizes = {"n_heads": n_heads, "d_head": d_head, "d_rotary": d_rotary}
    for to, back in (LAYOUTS, reversed(LAYOUTS)):
        converted = convert_layout(weight, to=to, **sizes)
        assert not torch.equal(converted, weight)
        assert torch.equal(convert_layout(converted, to=back, **sizes), weight)


def test_a_low_rank_adapter_is_converted_by_its_rows() -> None:
    """Case 13: (W + B·A) permuted is W permuted plus B permuted times A."""
    sizes = {"n_heads": 6, "d_head": 10, "d_rotary": 8, "to": "half_split"}
    weight, b, a = random(60, 40), random(60, 3, seed=1), random(3, 40, seed=2)
    whole = convert_layout(weight + b @ a, **sizes)
    parts = convert_layout(weight, **sizes) + convert_layout(b, **sizes) @ a
    assert_close(parts, whole, **close)


def test_the_count_of_heads_must_be_the_matrixs_own() -> None:
    """Case 12: keys have h_kv heads, neither h nor h / h_kv."""
    keys = random(2 * 10, 40)
    for wrong in (6, 3):
        with pytest.raises(ValueError, match=f"20 rows, but {wrong} heads of 10 channels"):
            convert_layout(keys, n_heads=wrong, d_head=10, d_rotary=10, to="half_split")
