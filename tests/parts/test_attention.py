"""Attention against a plain softmax, on every path, and what it must not hold in memory."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from armillary.config import AttentionConfig, NormConfig, RotaryConfig
from armillary.parts.attention import Attention, attend
from armillary.parts.mask import Visibility
from armillary.parts.norm import LayerNorm, RMSNorm
from armillary.parts.rotary import rotate, rotation
from support.tensor_memory import TensorMemory

SMALL_BLOCK = 3


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def heads(
    n_heads: int = 6, n_kv_heads: int = 2, queries: int = 7, keys: int = 7, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(2, n_heads, queries, 10, seed=1, **options),
        random(2, n_kv_heads, keys, 10, seed=2, **options),
        random(2, n_kv_heads, keys, 10, seed=3, **options),
    )


def oracle(
    q: Tensor, k: Tensor, v: Tensor, may_read: Tensor, scale: float, soft_cap: float | None = None
) -> Tensor:
    """One query of one head at a time; may_read (B, T, S)."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            for t in range(q.shape[2]):
                reads = may_read[row, t].nonzero().squeeze(-1)
                if len(reads) == 0:
                    continue
                scores = k[row, head // group, reads] @ q[row, head, t] * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                weights = torch.exp(scores - scores.max())
                out[row, head, t] = weights / weights.sum() @ v[row, head // group, reads]
    return out


def causal(queries: int, keys: int, window: int | None = None) -> Tensor:
    query = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)[None]
    pairs = key <= query
    if window is not None:
        pairs &= query - key < window
    return pairs.expand(2, queries, keys)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(6, 2), (8, 2), (6, 6), (6, 1)])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 99])
@pytest.mark.parametrize("queries", [7, 3, 1])
@pytest.mark.parametrize("block", [512, SMALL_BLOCK])
def test_it_is_the_softmax_of_plain_attention(
    n_heads: int,
    n_kv_heads: int,
    queries: int,
    window: int | None,
    soft_cap: float | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole passes, chunks and single steps (cases 49 and 52), grouped or not, capped or not."""
    monkeypatch.setattr("armillary.parts.attention.QUERY_BLOCK", block)
    q, k, v = heads(n_heads, n_kv_heads, queries)
    ours = attend(q, k, v, Visibility(queries, 7, window=window), scale=0.4, soft_cap=soft_cap)
    theirs = oracle(q, k, v, causal(queries, 7, window), 0.4, soft_cap)
    assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("queries", [7, 3, 2])
def test_the_triangle_of_a_kernel_is_aligned_to_the_lower_right(
    queries: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 49, where no mask is held; `is_causal` alone would be aligned to the upper left."""
    monkeypatch.setattr("armillary.parts.attention._flash_takes", lambda *_: True)
    q, k, v = (part.to(device) for part in heads(queries=queries, keys=7))
    ours = attend(q, k, v, Visibility(queries, 7), scale=0.4).cpu()
    theirs = oracle(*heads(queries=queries, keys=7), causal(queries, 7, None), 0.4, None)
    assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("queries", [64, 20, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_device_computes_in_any_type(dtype: torch.dtype, queries: int, device: str) -> None:
    """Whichever kernel is taken: whole passes, blocks after others, single steps."""
    exact = heads(queries=queries, keys=64)
    q, k, v = (part.to(device, dtype) for part in exact)
    ours = attend(q, k, v, Visibility(queries, 64), scale=0.4)
    assert (ours.dtype, ours.device.type) == (dtype, device)
    theirs = oracle(*exact, causal(queries, 64, None), 0.4, None)
    assert_close(ours.cpu().double(), theirs, atol=8 * torch.finfo(dtype).eps, rtol=0)


@given(st.data(), st.sampled_from([None, 0.7]), st.none() | st.integers(1, 6))
def test_any_mask_combined_with_order_and_window(
    data: st.DataObject, soft_cap: float | None, window: int | None
) -> None:
    q, k, v = heads(queries=5, keys=6)
    pairs = torch.tensor(data.draw(st.lists(st.booleans(), min_size=60, max_size=60))).view(2, 5, 6)
    readable = torch.tensor(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).view(2, 6)
    visibility = Visibility(5, 6, window=window, readable=readable, allowed=pairs[:, None])
    ours = attend(q, k, v, visibility, scale=0.4, soft_cap=soft_cap)
    may_read = causal(5, 6, window) & pairs & readable[:, None]
    assert_close(ours, oracle(q, k, v, may_read, 0.4, soft_cap), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_queries_that_stand_in_runs_get_what_they_get_among_all(
    window: int | None, soft_cap: float | None
) -> None:
    q, k, v = heads(queries=8, keys=8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2, 2]])
    visibility = Visibility(8, 8, window, documents=documents)
    whole = attend(q, k, v, visibility, scale=0.3, soft_cap=soft_cap)
    runs = [range(2), range(5, 8)]
    some = torch.cat([q[:, :, run.start : run.stop] for run in runs], dim=2)
    found = attend(some, k, v, visibility.at(runs), scale=0.3, soft_cap=soft_cap)
    assert_close(found, whole[:, :, [0, 1, 5, 6, 7]], rtol=0, atol=1e-14)


@pytest.mark.parametrize("visibility", [Visibility(4, 4), Visibility(4, 4, window=2)])
@pytest.mark.parametrize("soft_cap", [None, 50.0])
def test_consecutive_query_heads_share_a_key_value_head(
    visibility: Visibility, soft_cap: float | None
) -> None:
    """Case 61: 8 heads on 2 of constant value 1 and 2; tiled, they would alternate."""
    q, k, _ = heads(8, 2, 4, 4)
    v = (
        torch.stack([torch.full((4, 10), 1.0), torch.full((4, 10), 2.0)])
        .double()
        .expand(2, 2, 4, 10)
    )
    out = attend(q, k, v, visibility, scale=0.3, soft_cap=soft_cap)
    assert_close(out[:, :4], torch.ones_like(out[:, :4]))
    assert_close(out[:, 4:], torch.full_like(out[:, 4:], 2.0))


def test_heads_that_do_not_divide_are_refused_by_the_configuration() -> None:
    """Cases 61 and 62: with both numbers, before anything is built."""
    with pytest.raises(ValidationError, match="n_heads 8 is no multiple of n_kv_heads 3"):
        AttentionConfig(n_heads=8, n_kv_heads=3, d_head=4)


def test_every_kernel_of_torch_gives_the_same() -> None:
    """Case 50: one combined mask is passed, never a mask beside is_causal."""
    q, k, v = heads()
    readable = torch.ones(2, 7, dtype=torch.bool)
    readable[0, :2] = False
    for visibility in (Visibility(7, 7), Visibility(7, 7, window=3, readable=readable)):
        results = []
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                results.append(attend(q, k, v, visibility, scale=0.3))
        assert_close(results[0], results[1], atol=1e-12, rtol=0)


# --- Nothing to read --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [512, 2])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["readable", "allowed"])
def test_a_query_with_nothing_to_read_gives_zeros_and_no_gradient(
    how: str,
    dtype: torch.dtype,
    soft_cap: float | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 47: a 4 × 4 causal mask with row 0 cleared, forward and backward, on both paths."""
    monkeypatch.setattr("armillary.parts.attention.QUERY_BLOCK", block)
    q, k, v = (part.requires_grad_() for part in heads(queries=4, keys=4, dtype=dtype))
    if how == "readable":
        readable = torch.ones(2, 4, dtype=torch.bool)
        readable[:, 0] = False
        visibility = Visibility(4, 4, readable=readable)
    else:
        allowed = torch.ones(2, 1, 4, 4, dtype=torch.bool)
        allowed[:, :, 0] = False
        visibility = Visibility(4, 4, allowed=allowed)
    out = attend(q, k, v, visibility, scale=0.3, soft_cap=soft_cap)
    assert not out[:, :, 0].any()
    assert out[:, :, 1:].all()
    out.float().square().sum().backward()
    for part in (q, k, v):
        assert torch.isfinite(part.grad).all()
    assert not q.grad[:, :, 0].any()
    assert q.grad[:, :, 2:].any()
    if how == "readable":
        assert not k.grad[:, :, 0].any()
        assert not v.grad[:, :, 0].any()


# --- Dropout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "soft_cap"),
    [(None, None), (40, None), (None, 3.0)],
    ids=["plain", "masked", "capped"],
)
def test_dropout_falls_on_the_weights(window: int | None, soft_cap: float | None) -> None:
    """With the identity for values the result is the weights: 0, or what they were / (1 − p)."""
    length, p = 48, 0.25
    q, k = random(1, 2, length, length, seed=1), random(1, 1, length, length, seed=2)
    v = torch.eye(length, dtype=torch.float64)[None, None]
    visibility = Visibility(length, length, window=window)
    whole = attend(q, k, v, visibility, scale=0.1, soft_cap=soft_cap)
    torch.manual_seed(0)
    dropped = attend(q, k, v, visibility, scale=0.1, soft_cap=soft_cap, dropout=p)
    kept = dropped != 0
    assert_close(dropped[kept], (whole / (1 - p))[kept], atol=1e-12, rtol=0)
    share = 1 - float(kept.sum() / (whole != 0).sum())
    assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / int((whole != 0).sum())))


def test_recomputed_blocks_drop_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is computed again for its gradients must not draw anew."""
    monkeypatch.setattr("armillary.parts.attention.QUERY_BLOCK", 3)
    q, k, v = (part.requires_grad_() for part in heads(queries=8, keys=8))
    out = attend(q, k, v, Visibility(8, 8, window=6), scale=0.3, soft_cap=2.0, dropout=0.5)
    # out = W·v, so (Wᵀ·out)·v is out·out exactly when both passes have the same weights W.
    (gradient,) = torch.autograd.grad(out, v, out.detach())
    assert_close((gradient * v).sum(), out.square().sum())


def test_dropout_is_off_outside_training() -> None:
    config = AttentionConfig(n_heads=6, n_kv_heads=2, d_head=10, dropout=0.5)
    module = Attention(40, config).double()
    x = random(1, 5, 40)
    module.eval()
    assert torch.equal(module(x, Visibility(5, 5)), module(x, Visibility(5, 5)))
    module.train()
    assert not torch.equal(module(x, Visibility(5, 5)), module(x, Visibility(5, 5)))


# --- Memory -----------------------------------------------------------------------------------


def peak(
    length: int,
    soft_cap: float | None,
    gradients: bool = False,
    window: int | None = None,
    padded: bool = False,
) -> int:
    q = random(1, 2, length, 4, dtype=torch.float32).requires_grad_(gradients)
    k, v = (random(1, 1, length, 4, dtype=torch.float32).requires_grad_(gradients) for _ in "kv")
    readable = torch.ones(1, length, dtype=torch.bool) if padded else None
    with TensorMemory() as memory:
        visibility = Visibility(length, length, window=window, readable=readable)
        out = attend(q, k, v, visibility, scale=0.5, soft_cap=soft_cap)
        if gradients:
            out.sum().backward()
    return memory.peak


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_twice_the_length_takes_twice_the_memory(
    soft_cap: float | None, padded: bool, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 51: four times would mean that a matrix over all pairs is held somewhere."""
    monkeypatch.setattr("armillary.parts.attention.QUERY_BLOCK", 32)
    short, long = (peak(n, soft_cap, gradients, padded=padded) for n in (512, 1024))
    assert long < 2.3 * short
    assert long < 1024 * 1024 * 2  # bytes: a quarter of the scores of two heads


def test_a_window_costs_what_it_reads() -> None:
    """8192 positions: a boolean matrix over all pairs would be 64 MiB, scores 512 MiB."""
    assert peak(8192, 2.0, window=64) < 24 << 20


# --- The module -------------------------------------------------------------------------------


def module(**options: object) -> Attention:
    """6 heads of width 10 on 2, in a model of width 40 ≠ 6 · 10; every parameter random."""
    config = AttentionConfig(**({"n_heads": 6, "n_kv_heads": 2, "d_head": 10} | options))
    built = Attention(40, config).double()
    for number, parameter in enumerate(built.parameters()):
        parameter.data.copy_(0.3 * random(*parameter.shape, seed=number) + (parameter.dim() == 1))
    return built


OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "out_bias": True},
    "q/k norm": {"qk_norm": NormConfig(eps=1e-3)},
    "rotation": {"rotary": RotaryConfig(d_rotary=6, base=100.0)},
    "norm, then rotation": {
        "qk_norm": NormConfig(eps=1e-3),
        "rotary": RotaryConfig(d_rotary=10, layout="interleaved"),
    },
    "scale": {"scale": 0.9},
    "window": {"window": 2},
    "soft cap": {"soft_cap": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_module_is_its_formula(name: str) -> None:
    """Project, normalise, rotate, attend, join, project back: in this order."""
    built = module(**OPTIONS[name])
    config = built.config
    x = random(2, 5, 40)
    positions = torch.arange(5)
    turn = None if config.rotary is None else rotation(config.rotary, positions, dtype=x.dtype)

    def split(which: torch.nn.Linear, count: int) -> Tensor:
        flat = x @ which.weight.T + (0 if which.bias is None else which.bias)
        return torch.stack([flat[..., 10 * i : 10 * i + 10] for i in range(count)], dim=1)

    q, k, v = split(built.q, 6), split(built.k, 2), split(built.v, 2)
    if config.qk_norm is not None:
        q, k = built.q_norm(q), built.k_norm(k)
    if turn is not None:
        q, k = rotate(q, turn), rotate(k, turn)
    scale = 10**-0.5 if config.scale is None else config.scale
    mixed = oracle(q, k, v, causal(5, 5, config.window), scale, config.soft_cap)
    joined = torch.cat([mixed[:, head] for head in range(6)], dim=-1)
    expected = joined @ built.out.weight.T + (0 if built.out.bias is None else built.out.bias)
    assert_close(built(x, Visibility(5, 5), turn), expected, atol=1e-12, rtol=0)


def test_the_width_of_a_head_is_its_own() -> None:
    """Case 19: hidden 40, heads 4 of width 16, 2 for keys and values."""
    built = Attention(40, AttentionConfig(n_heads=4, n_kv_heads=2, d_head=16))
    shapes = {name: tuple(value.shape) for name, value in built.state_dict().items()}
    assert shapes == {
        "q.weight": (64, 40),
        "k.weight": (32, 40),
        "v.weight": (32, 40),
        "out.weight": (40, 64),
    }
    with pytest.raises(RuntimeError, match="size mismatch"):
        built.load_state_dict({"q.weight": torch.zeros(40, 40)}, strict=False)


def test_optional_parameters_are_there_when_asked_for() -> None:
    built = module(qkv_bias=True, out_bias=True, qk_norm=NormConfig(kind="layer", bias=True))
    assert {name for name, _ in built.named_parameters() if "bias" in name} == {
        "q.bias",
        "k.bias",
        "v.bias",
        "out.bias",
        "q_norm.bias",
        "k_norm.bias",
    }
    assert isinstance(built.q_norm, LayerNorm)
    assert isinstance(module(qk_norm=NormConfig()).k_norm, RMSNorm)
    assert built.q_norm.weight.shape == (10,)


def test_a_batch_gives_each_row_what_it_gets_alone() -> None:
    """Case 65, in float32."""
    built = module(rotary=RotaryConfig(d_rotary=10)).float()
    x = random(8, 5, 40, dtype=torch.float32)
    turn = rotation(built.config.rotary, torch.arange(5))
    alone = torch.cat([built(row[None], Visibility(5, 5), turn) for row in x])
    assert (built(x, Visibility(5, 5), turn) - alone).abs().max() < 1e-4


def test_under_autocast_it_computes_nearly_the_same() -> None:
    """The rotation stays exact; only products are narrow."""
    built = module(rotary=RotaryConfig(d_rotary=10), qk_norm=NormConfig(), window=3).float()
    x = random(2, 5, 40, dtype=torch.float32)
    turn = rotation(built.config.rotary, torch.arange(5))
    exact = built(x, Visibility(5, 5), turn)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = built(x, Visibility(5, 5), turn)
    assert (narrow - exact).abs().max() < 0.05 * exact.abs().max()
