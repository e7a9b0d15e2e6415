import math

import pytest
import torch
from torch.testing import assert_close

from armillary.parts.positions import LearnedPositions, SinusoidalPositions


def test_sine_and_cosine_alternate() -> None:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) = cos of the same angle."""
    table = SinusoidalPositions(6)(torch.tensor([0, 1, 9]), torch.float64)
    for row, position in enumerate([0, 1, 9]):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-15)
            assert table[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-15)


def test_any_position_can_be_computed_and_none_depends_on_the_others() -> None:
    module = SinusoidalPositions(8)
    far = module(torch.tensor([1_000_000, 3]), torch.float64)
    assert_close(far[1:], module(torch.tensor([3]), torch.float64), atol=0, rtol=0)
    assert far[0, 0].item() == pytest.approx(math.sin(1_000_000), abs=1e-9)


def test_far_neighbours_differ_in_low_precision() -> None:
    """Angles are wide; only sine and cosine are cast (case 4)."""
    table = SinusoidalPositions(16)(torch.arange(65536, 65600), torch.bfloat16)
    assert table.dtype == torch.bfloat16
    assert len(table.unique(dim=0)) == 64


def test_a_table_may_have_positions_of_its_own_for_each_row() -> None:
    positions = torch.tensor([[0, 1], [5, 2]])
    table = SinusoidalPositions(4)(positions)
    assert table.shape == (2, 2, 4)
    assert_close(table[1], SinusoidalPositions(4)(positions[1]))


def test_a_sinusoidal_table_is_no_part_of_the_model_file() -> None:
    module = SinusoidalPositions(4)
    assert not list(module.parameters())
    assert not list(module.buffers())
    with pytest.raises(ValueError, match="d is 5"):
        SinusoidalPositions(5)


def test_a_learned_table_gives_its_rows() -> None:
    table = LearnedPositions(5, 3)
    table.weight.data.normal_()
    assert torch.equal(table(torch.tensor([[4, 0]])), table.weight[[4, 0]].unsqueeze(0))
    assert table(torch.tensor([1]), torch.bfloat16).dtype == torch.bfloat16
    assert table(torch.empty(0, dtype=torch.long)).shape == (0, 3)


@pytest.mark.parametrize("position", [5, -1])
def test_a_learned_table_has_nothing_outside(position: int) -> None:
    with pytest.raises(ValueError, match=f"position {position} is outside .* holds 0 to 4"):
        LearnedPositions(5, 3)(torch.tensor([0, position]))


def test_only_the_rows_read_get_gradients() -> None:
    table = LearnedPositions(4, 2)
    table(torch.tensor([1, 1])).sum().backward()
    assert torch.equal(
        table.weight.grad, torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [0.0] * 2])
    )
