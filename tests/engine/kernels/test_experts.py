"""Experts: who takes a row, slots sorted by them, products in slots, and their sum."""

from typing import Any

import numpy as np
import pytest

from armillary import reference
from armillary.config import MixtureConfig
from armillary.engine.buffers import Slots
from armillary.engine.formats import FORMATS, ROWS
from armillary.engine.program import aligned
from armillary.engine.tiling import WHOLE_ROWS, multiplied_as, panel_bytes, row_stride
from support.kernels import call, count, drawn, library_for, machines, spaced
from support.models import mixture
from support.quantised import PLAIN, QUANTISED, packed, stored

THREADS = pytest.mark.parametrize("threads", [1, 2, 3])
HERE = "this machine"
GROUPED = {"n_experts": 12, "top_k": 3}
ROUTERS: dict[str, MixtureConfig] = {
    name: MixtureConfig.model_validate(mixture(**entries))
    for name, entries in {
        "softmax": {},
        "scores as they are": {"router": {"normalise": False, "scale": 2.5}},
        "sigmoid": {"router": {"score": "sigmoid", "scale": 0.7}},
        "all of them": {"top_k": 6},
        "bias of the choice": {"router": {"score": "sigmoid", "selection_bias": True}},
        "in groups": GROUPED | {"router": {"n_groups": 4, "top_groups": 2}},
        "in one group": GROUPED | {"router": {"n_groups": 2, "selection_bias": True}},
    }.items()
}


def route(
    of: MixtureConfig, logits: np.ndarray, bias: np.ndarray | None = None, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The experts (R, k) that the kernel chooses, and what each counts."""
    router, rows = of.router, len(logits)
    inside = spaced(logits)
    compared = spaced(np.full((rows, of.n_experts + router.n_groups), np.nan, np.float32))
    chosen = np.full((rows, of.top_k), -1, np.int64)
    weights = np.full((rows, of.top_k), np.nan, np.float32)
    call(
        f"route_{router.score}",
        threads=threads,
        logits=inside,
        stride=inside.strides[0],
        experts=of.n_experts,
        top_k=of.top_k,
        groups=router.n_groups,
        top_groups=router.top_groups,
        normalise=int(router.normalise),
        scale=router.scale,
        selection_bias=bias,
        compared=compared,
        compared_stride=compared.strides[0],
        chosen=chosen,
        weights=weights,
        rows=count(rows),
    )
    assert np.isnan(compared[:, of.n_experts + router.n_groups :]).all()
    return chosen, weights


def specified(of: MixtureConfig, logits: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """What each expert counts for one row, (E,)."""
    weights = {"r.weight": np.diag(logits.astype(float))}
    if bias is not None:
        weights["r.selection_bias"] = bias
    found: np.ndarray = reference.route(
        of.model_dump(mode="json"), weights, "r", np.ones(of.n_experts)
    )
    return found


@THREADS
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_it_is_specified(name: str, threads: int) -> None:
    of = ROUTERS[name]
    bias = 0.3 * drawn(of.n_experts, seed=3) if of.router.selection_bias else None
    logits = 2 * drawn(50, of.n_experts)
    chosen, weights = route(of, logits, bias, threads)
    for row, own in enumerate(logits):
        expected = specified(of, own, bias)
        assert set(chosen[row]) == set(np.flatnonzero(expected)), row
        np.testing.assert_allclose(weights[row], expected[chosen[row]], rtol=2e-6)


def test_of_equal_scores_the_first_wins() -> None:
    chosen, weights = route(ROUTERS["softmax"], np.array([[0, 1, 1, 0, 1, 0], [3] * 6], np.float32))
    np.testing.assert_array_equal(chosen, [[1, 2], [0, 1]])
    np.testing.assert_array_equal(weights, 0.5)


def test_the_likeliest_comes_first() -> None:
    chosen, _ = route(ROUTERS["softmax"], np.array([[0, 1, 2, 3, 4, 2]], np.float32))
    np.testing.assert_array_equal(chosen, [[4, 3]])


@pytest.mark.parametrize("name", ROUTERS)
def test_what_is_no_number_still_chooses_as_many_experts(name: str) -> None:
    """Nothing may be written beyond the slots, whatever a broken checkpoint computes."""
    of = ROUTERS[name]
    logits = drawn(4, of.n_experts)
    logits[0], logits[1, ::2], logits[2, 3], logits[3, 1] = np.nan, np.nan, np.inf, -np.inf
    chosen, _ = route(of, logits, None)
    assert all(len(set(row)) == of.top_k for row in chosen)
    assert chosen.min() >= 0
    assert chosen.max() < of.n_experts


# --- Slots ------------------------------------------------------------------------------------


def slots_for(chosen: np.ndarray, experts: int, threads: int = 1) -> Slots:
    """The rows' choices (R, k) sorted by the kernel."""
    rows, top_k = chosen.shape
    slots = Slots.of(experts, top_k, rows)
    slots.starts[:] = -1
    call(
        "dispatch",
        threads=threads,
        chosen=chosen,
        experts=experts,
        top_k=top_k,
        starts=slots.starts,
        row_of=slots.row_of,
        slot_of=slots.slot_of,
        rows=count(rows),
    )
    return slots


def choices(rows: int, experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """Distinct experts for each row; some experts may have none."""
    generator = np.random.default_rng(seed)
    return np.array([generator.permutation(experts)[:top_k] for _ in range(rows)])


@THREADS
def test_slots_are_the_choices_sorted_by_expert(threads: int) -> None:
    for rows, experts, top_k in ((1, 6, 2), (16, 6, 2), (40, 9, 3), (3, 40, 1), (5, 4, 4)):
        chosen = choices(rows, experts, top_k)
        slots, flat = slots_for(chosen, experts, threads), chosen.reshape(-1)
        order = np.argsort(flat, kind="stable")
        np.testing.assert_array_equal(slots.row_of[: len(flat)], order // top_k)
        np.testing.assert_array_equal(slots.slot_of[: len(flat)][order], np.arange(len(flat)))
        starts = np.searchsorted(flat[order], np.arange(experts + 1))
        np.testing.assert_array_equal(slots.starts[: experts + 1], starts)
        assert slots.rows[0] == rows * top_k


@THREADS
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_shared", [False, True])
def test_what_experts_gave_is_summed(with_shared: bool, gated: bool, threads: int) -> None:
    rows, top_k, n = 5, 3, 41
    slots = slots_for(choices(rows, 7, top_k), 7)
    given, weights = spaced(drawn(rows * top_k, n)), drawn(rows, top_k, seed=1)
    shared, gate = spaced(drawn(rows, n, seed=2)), spaced(drawn(rows, 1, seed=3))
    out = np.full_like(shared, np.nan)
    call(
        "mix",
        threads=threads,
        given=given,
        given_stride=given.strides[0],
        top_k=top_k,
        slot_of=slots.slot_of,
        weights=weights,
        shared=shared if with_shared else None,
        gate=gate if gated else None,
        gate_stride=gate.strides[0],
        n=n,
        out=out,
        stride=out.strides[0],
        rows=count(rows),
    )
    places = slots.slot_of[: rows * top_k].reshape(rows, top_k)
    expected = (weights[..., None] * given[places, :n].astype(float)).sum(1)
    if with_shared:
        by = 1 / (1 + np.exp(-gate[:, :1].astype(float))) if gated else 1
        expected += by * shared[:, :n]
    np.testing.assert_allclose(out[:, :n], expected, atol=2e-6)
    assert np.isnan(out[:, n:]).all()


# --- Products ---------------------------------------------------------------------------------


def stacked(
    name: str, experts: int, n: int, k: int
) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """Weights of each expert, and the order of its rows: of some, none."""
    weights = [stored(name, drawn(n, k, seed=expert)) for expert in range(experts)]
    generator = np.random.default_rng(9)
    return weights, [generator.permutation(n) if e % 2 else None for e in range(experts)]


def told(weights: list[np.ndarray], orders: list[np.ndarray | None]) -> dict[str, Any]:
    """Where they lie, for a kernel."""
    return {
        "weights": np.array([each.ctypes.data for each in weights]),
        "row_bytes": weights[0].shape[1],
        "order": np.array([0 if each is None else each.ctypes.data for each in orders]),
        "n": len(weights[0]),
    }


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, ROWS) for name in (*PLAIN, *QUANTISED)] + [(name, 70) for name in QUANTISED],
)
def test_each_expert_multiplies_its_own_slots(machine: str, name: str, rows: int) -> None:
    """To the last bit what `product` makes of one expert's rows with its weights.

    Formats of blocks take more than ROWS in another way.
    """
    experts, n, k, threads = 5, 37, 64, 2
    weights, orders = stacked(name, experts, n, k)
    bias = drawn(experts, n, seed=7)
    chosen = choices(rows, 4, 2)
    chosen[chosen == 3] = 4  # expert 3 has none
    slots = slots_for(chosen, experts)
    x = drawn(2 * rows, k, seed=8)
    activations = packed(x) if name in QUANTISED else x
    out = spaced(np.full((len(x), n), np.nan, np.float32))
    shared = {"k": k, "x_stride": activations.strides[0], "x_private": 0, "adds": 0}
    shared |= {"out_stride": out.strides[0], "scratch_bytes": panel_bytes(k)}
    shared |= {"scratch": np.full(threads * panel_bytes(k), 0xFF, np.uint8)}
    code = library_for(machine)
    call(
        f"experts_product_{name}",
        code=code,
        threads=threads,
        **told(weights, orders),
        x=activations,
        bias=bias,
        out=out,
        starts=slots.starts,
        experts=experts,
        **shared,
    )
    assert slots.starts[3] == slots.starts[4]
    for expert in range(experts):
        own = slice(slots.starts[expert], slots.starts[expert + 1])
        expected = spaced(np.full((own.stop - own.start, n), np.nan, np.float32))
        call(
            f"product_{name}",
            code=code,
            weights=weights[expert],
            row_bytes=weights[expert].shape[1],
            order=orders[expert],
            n=n,
            x=np.ascontiguousarray(activations[own]),
            bias=bias[expert],
            out=expected,
            rows=count(len(expected)),
            **shared,
        )
        np.testing.assert_array_equal(out[own], expected)


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("name", ["F32", "BF16"])
def test_each_expert_multiplies_its_own_slots_in_tiles(machine: str, name: str) -> None:
    """To the last bit what `matmul` makes of one expert's rows; no tile ends where another does."""
    experts, n, k, rows = 5, 61, 96, 30
    weights, orders = stacked(name, experts, n, k)
    bias = drawn(experts, n, seed=7)
    slots = slots_for(choices(rows, experts, 2), experts)
    number = multiplied_as(FORMATS[name], machines()[machine])
    x = spaced(drawn(slots.most, k, seed=8), row_stride("F32", k) // 4 - k)
    out = np.full((slots.most, row_stride("F32", n) // 4), np.nan, np.float32)
    scratch = np.full(2 * panel_bytes(k), 0xFF, np.uint8)
    code = library_for(machine)
    shared = {"k": k, "adds": 0, "scratch": scratch, "scratch_bytes": panel_bytes(k)}
    shared |= {"out_stride": out.strides[0]}
    from_ = x
    if number == "BF16":
        from_ = aligned(slots.most * row_stride("BF16", k)).reshape(slots.most, -1)
        sizes = {"x_stride": x.strides[0], "k": k, "out_stride": from_.strides[0]}
        call("narrow", code=code, x=x, out=from_, rows=count(slots.most), **sizes)
    call(
        f"experts_matmul_{name}",
        code=code,
        threads=2,
        **told(weights, orders),
        x=from_,
        x_stride=from_.strides[0],
        bias=bias,
        out=out,
        starts=slots.starts,
        experts=experts,
        **shared,
    )
    for expert in range(experts):
        first, last = slots.starts[expert : expert + 2]
        lines = -(-(last - first) // WHOLE_ROWS) * WHOLE_ROWS
        expected = np.full((lines, out.shape[1]), np.nan, np.float32)
        own = np.zeros((lines, from_.shape[1]), from_.dtype)
        own[: last - first] = from_[first:last]
        call(
            f"matmul_{name}",
            code=code,
            weights=weights[expert],
            row_bytes=weights[expert].shape[1],
            order=orders[expert],
            n=n,
            x=own,
            x_stride=own.strides[0],
            bias=bias[expert],
            out=expected,
            rows=count(last - first),
            **shared,
        )
        np.testing.assert_array_equal(out[first:last, :n], expected[: last - first, :n])
