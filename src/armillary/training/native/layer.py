"""A whole decoder layer as one function with a gradient of its own, for bfloat16 on processors.

What it computes is `DecoderLayer` under bfloat16 autocast: the residual path in float32, products
of bfloat16 summed in float32. What it does otherwise, and what that saves:

* attention in blocks that stay in the cache, with float32 scores that never reach memory
* queries, keys and values from one product, gate and up from one
* for the backward pass it keeps the two normalised inputs, queries, keys and values, and what
  attention gave, all in bfloat16, and makes the rest again. Gate and up, which take a product, one
  in nine of the step, and are more than half of what there would be to keep, are kept by every
  second layer
* what no pass keeps lies in memory that all layers use in turns: fresh memory must be cleared by
  the system page by page, which takes a tenth as long as the products
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.config import LayerConfig
from armillary.decoder import DecoderLayer
from armillary.parts.attention import KeyValueStore
from armillary.parts.feedforward import GLU
from armillary.parts.mask import Visibility
from armillary.parts.norm import RMSNorm
from armillary.parts.rotary import Rotation
from armillary.training.native.build import kernels

# What kernels.c asks of sizes.
_BLOCK = 64
_WIDTH = 32
# A window that hides nothing.
_ALL = 1 << 40


def fits(layer: DecoderLayer, config: LayerConfig) -> bool:
    """Whether a layer is of the one kind that is known here.

    That is: pre-normalised with RMSNorm, one sub-layer after the other, rotated by halves over
    whole heads, SwiGLU, all widths multiples of 32; no biases, no query and key norms, no soft cap,
    no scaled results, no dropout, no adapters.
    """
    attention, feedforward = config.attention, config.feedforward
    rotary = attention.rotary
    plain = (
        config.residual == "sequential"
        and config.norm_placement == "pre"
        and config.residual_scale == 1
        and config.norm.kind == "rms"
        and rotary is not None
        and rotary.layout == "half_split"
        and rotary.d_rotary == attention.d_head
        and attention.qk_norm is None
        and attention.soft_cap is None
        and not (attention.qkv_bias or attention.out_bias or feedforward.bias)
        and feedforward.kind == "glu"
        and feedforward.activation == "silu"
        and not (config.dropout or attention.dropout or feedforward.dropout)
    )
    d_model = layer.attention.q.in_features
    widths = (d_model, attention.d_head, feedforward.d_ff)
    linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    n_linear = 4 + (2 if feedforward.fused else 3)
    adapted = len(linear) != n_linear or any(type(module) is not nn.Linear for module in linear)
    return plain and not adapted and all(width % _WIDTH == 0 for width in widths)


class NativeForward:
    """Stands for the forward of a layer that `fits`; the plain one serves what is not known here.

    That is: rows whose length is no multiple of 64, padding or a mask of the caller's own, caches,
    other types than bfloat16 autocast over float32, other devices, parameters cut over ranks.
    """

    def __init__(self, layer: DecoderLayer, scratch: "Scratch", keeps_wide: bool = False) -> None:
        self.layer = layer
        self.plain = layer.forward
        self.scratch = scratch
        self.keeps_wide = keeps_wide

    def __call__(
        self,
        x: Tensor,
        visibility: Visibility,
        turn: Rotation | None = None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """As `DecoderLayer.forward`."""
        if store is not None or turn is None or not self._knows(x, visibility):
            return self.plain(x, visibility, turn, store)
        attention, feedforward = self.layer.attention, self.layer.feedforward
        norms = (self.layer.norm1, self.layer.norm2)
        assert isinstance(feedforward, GLU)
        assert isinstance(norms[0], RMSNorm)
        assert isinstance(norms[1], RMSNorm)
        config = attention.config
        sizes = _Sizes(
            batch=x.shape[0],
            length=x.shape[1],
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            window=_ALL if config.window is None else config.window,
            scale=config.score_scale,
            eps=(norms[0].eps, norms[1].eps),
            offsets=(norms[0].offset, norms[1].offset),
            keeps_wide=self.keeps_wide,
        )
        wide = (
            [feedforward.gate_up.weight]
            if feedforward.fused
            else [feedforward.gate.weight, feedforward.up.weight]
        )
        out: Tensor = _Layer.apply(  # type: ignore[no-untyped-call]
            x,
            visibility.documents,
            turn,
            sizes,
            self.scratch,
            norms[0].weight,
            norms[1].weight,
            attention.out.weight,
            feedforward.down.weight,
            attention.q.weight,
            attention.k.weight,
            attention.v.weight,
            *wide,
        )
        return out

    def _knows(self, x: Tensor, visibility: Visibility) -> bool:
        attention = self.layer.attention
        return (
            _is_narrowed(x, self.layer)
            and attention.q.weight.shape[0] == attention.config.n_heads * attention.config.d_head
            and x.shape[1] % _BLOCK == 0
            and visibility.n_queries == visibility.n_keys
            and visibility.readable is None
            and visibility.allowed is None
        )


class NativeNorm:
    """Stands for the forward of a decoder's last RMSNorm, whose result is bfloat16 then.

    It is what the head's product would have made of it. The plain norm serves as in NativeForward.
    """

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm
        self.plain = norm.forward

    def __call__(self, x: Tensor) -> Tensor:
        """As `RMSNorm.forward`."""
        if not _is_narrowed(x, self.norm) or x.shape[-1] % _WIDTH:
            return self.plain(x)
        norm = self.norm
        out: Tensor = _Norm.apply(x, norm.weight, norm.eps, norm.offset)  # type: ignore[no-untyped-call]
        return out


def _is_narrowed(x: Tensor, module: nn.Module) -> bool:
    """Whether x and the module are whole and on the CPU, x float32, in a bfloat16 autocast.

    Sharded layers are gathered in bfloat16.
    """
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and all(
            type(parameter) is nn.Parameter and parameter.dtype in (torch.float32, torch.bfloat16)
            for parameter in module.parameters()
        )
    )


@dataclass(frozen=True)
class _Sizes:
    batch: int
    length: int
    heads: int
    kv_heads: int
    d_head: int
    window: int
    scale: float
    eps: tuple[float, float]
    offsets: tuple[float, float]
    keeps_wide: bool

    @property
    def rows(self) -> int:
        return self.batch * self.length

    @property
    def of_attention(self) -> tuple[int, ...]:
        """The last arguments of the attention kernels."""
        return self.batch, self.length, self.heads, self.kv_heads, self.d_head


class _Layer(torch.autograd.Function):
    """x (B, T, d) float32 → the same; N = B·T below.

    Matrices come as out, down, q, k, v and gate, up (or both in one), float32 as parameters are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        documents: Tensor | None,
        turn: Rotation,
        sizes: _Sizes,
        scratch: "Scratch",
        norm1: Tensor,
        norm2: Tensor,
        out: Tensor,
        down: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *wide: Tensor,
    ) -> Tensor:
        scale1, scale2 = norm1.float() + sizes.offsets[0], norm2.float() + sizes.offsets[1]
        documents = None if documents is None else documents.long().contiguous()
        angles = turn.cos.float().contiguous(), turn.sin.float().contiguous()
        d, width = x.shape[-1], sizes.heads * sizes.d_head
        qkv_width = width + 2 * k.shape[0]
        scaled1, scaled2, joined, qkv = _rows(sizes.rows, d, d, width, qkv_width)
        log_sum = torch.empty(sizes.batch, sizes.heads, sizes.length)
        normed, product = scratch.rows("normed", scaled1), scratch.rows("product", scaled1)
        u, rstd1 = _add_and_norm(x.contiguous(), None, scale1, sizes.eps[0], scaled1, normed)
        torch.mm(normed, scratch.narrow(q, k, v).T, out=qkv)
        _turn(qkv, angles, 1.0, sizes)
        kernels().attention(
            qkv, documents, sizes.window, sizes.scale, joined, log_sum, *sizes.of_attention
        )
        torch.mm(joined, scratch.narrow(out).T, out=product)
        u, rstd2 = _add_and_norm(u, product, scale2, sizes.eps[1], scaled2, normed)
        gate_up, active = _wide_rows(scratch, sizes, down)
        kept = _rows(sizes.rows, gate_up.shape[1])[0] if sizes.keeps_wide else None
        gate_up = torch.mm(normed, scratch.narrow(*wide).T, out=gate_up if kept is None else kept)
        kernels().swiglu(gate_up, active, *active.shape)
        torch.mm(active, scratch.narrow(down).T, out=product)
        y = u.add_(product.view_as(u))
        ctx.save_for_backward(
            scaled1, rstd1, qkv, joined, log_sum, scaled2, rstd2, kept, documents, *angles,
            scale1, scale2, out, down, q, k, v, *wide,
        )  # fmt: skip
        ctx.sizes, ctx.scratch = sizes, scratch
        ctx.dtype = norm1.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, ...]:
        sizes: _Sizes = ctx.sizes
        scratch: Scratch = ctx.scratch
        (
            scaled1, rstd1, qkv, joined, log_sum, scaled2, rstd2, kept, documents, cos, sin,
            scale1, scale2, out, down, q, k, v, *wide,
        ) = ctx.saved_tensors  # fmt: skip
        of_y = of_y.contiguous()
        normed, product = scratch.rows("normed", scaled1), scratch.rows("product", scaled1)
        narrow = scratch.rows("narrow", scaled1).copy_(of_y.view_as(scaled1))
        _rescale(scaled2, scale2, normed)
        of_gate_up, active = _wide_rows(scratch, sizes, down)
        if kept is None:
            torch.mm(normed, scratch.narrow(*wide).T, out=of_gate_up)
        else:
            of_gate_up.copy_(kept)
        torch.mm(narrow, scratch.narrow(down), out=active)
        kernels().swiglu_backward(of_gate_up, active, *active.shape)
        (of_down,) = scratch.products(narrow, active, [down])
        of_wide = scratch.products(of_gate_up, normed, wide)
        torch.mm(of_gate_up, scratch.narrow(*wide), out=product)
        of_u = torch.empty_like(of_y)
        of_norm2 = _norm_backward(product, scaled2, rstd2, scale2, of_y, of_u)

        narrow.copy_(of_u.view_as(scaled1))
        (of_out,) = scratch.products(narrow, joined, [out])
        # The feed-forward is done with its memory.
        of_joined = torch.mm(narrow, scratch.narrow(out), out=scratch.rows("active", joined))
        of_qkv = scratch.rows("wide", qkv)
        kernels().attention_backward(
            of_joined, qkv, joined, log_sum, documents, sizes.window, sizes.scale,
            of_qkv, *sizes.of_attention,
        )  # fmt: skip
        _turn(of_qkv, (cos, sin), -1.0, sizes)
        _rescale(scaled1, scale1, normed)
        of_q, of_k, of_v = scratch.products(of_qkv, normed, [q, k, v])
        torch.mm(of_qkv, scratch.narrow(q, k, v), out=product)
        of_norm1 = _norm_backward(product, scaled1, rstd1, scale1, of_u, of_u)
        return (
            of_u, None, None, None, None, of_norm1.to(ctx.dtype), of_norm2.to(ctx.dtype),
            of_out, of_down, of_q, of_k, of_v, *of_wide,
        )  # fmt: skip


class _Norm(torch.autograd.Function):
    """x (..., d) float32 → its RMSNorm in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        scaled = torch.empty_like(x, dtype=torch.bfloat16).view(-1, x.shape[-1])
        scale, normed = weight.float() + offset, torch.empty_like(scaled)
        _, rstd = _add_and_norm(x.contiguous(), None, scale, eps, scaled, normed)
        ctx.save_for_backward(scaled, rstd, scale)
        ctx.dtype = weight.dtype
        return normed.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        scaled, rstd, scale = ctx.saved_tensors
        of_x = torch.empty_like(of_normed, dtype=torch.float32)
        of_weight = _norm_backward(of_normed.contiguous(), scaled, rstd, scale, None, of_x)
        return of_x, of_weight.to(ctx.dtype), None, None


def loss_kernel(
    logits: Tensor, labels: Tensor, z_loss: float, wanted: bool
) -> tuple[Tensor, Tensor]:
    """A `Kernel` of `armillary.training.loss`."""
    losses, log_sums = (torch.empty(labels.numel()) for _ in range(2))
    kernels().cross_entropy(
        logits, labels.contiguous(), float(z_loss), int(wanted), losses, log_sums, *logits.shape
    )
    return losses, log_sums


def _rows(n: int, *widths: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """A matrix (n, width) for each width, in one piece of memory straight from the system.

    The system has it back when the last of them is gone; memory of the C library would stay with
    the process, full of holes that fit nothing.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, dtype.itemsize * n * sum(widths), flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=dtype)
    pieces = torch.split(whole, [n * width for width in widths])
    return [piece.view(n, width) for piece, width in zip(pieces, widths, strict=True)]


class Scratch:
    """bfloat16 matrices that the passes of layers use one after the other, and that none keeps.

    One for the layers of one objective, which run one at a time.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def rows(self, name: str, like: Tensor) -> Tensor:
        """The matrix of a name, in the shape of another; what was in it is not kept."""
        return self.matrix(name, *like.shape)

    def matrix(self, name: str, n: int, width: int) -> Tensor:
        """The matrix (n, width) of a name."""
        found = self._memory.get(name)
        if found is None or found.numel() < n * width:
            self._memory.pop(name, None)
            found = self._memory[name] = _rows(n, width)[0].view(-1)
        return found[: n * width].view(n, width)

    def narrow(self, *matrices: Tensor) -> Tensor:
        """Matrices one below the other, in bfloat16; good until the next are asked for."""
        n, width = sum(len(matrix) for matrix in matrices), matrices[0].shape[1]
        whole = self.matrix("weights", n, width)
        for part, matrix in zip(_split(whole, matrices), matrices, strict=True):
            part.copy_(matrix)
        return whole

    def products(self, of_rows: Tensor, rows: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The gradients (in, out) of matrices that `narrow` joined, in their types.

        Shapes: of_rows (N, all out), rows (N, in).
        """
        whole = self.matrix("weights", of_rows.shape[1], rows.shape[1])
        torch.mm(of_rows.T, rows, out=whole)
        (made,) = _rows(whole.shape[0], whole.shape[1], dtype=matrices[0].dtype)
        return list(_split(made.copy_(whole), matrices))


def _split(whole: Tensor, matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.split(whole, [len(matrix) for matrix in matrices])


def _wide_rows(scratch: Scratch, sizes: _Sizes, down: Tensor) -> tuple[Tensor, Tensor]:
    """Room for gate and up (N, 2f), the gate first, and for an (N, f)."""
    f = down.shape[1]
    return scratch.matrix("wide", sizes.rows, 2 * f), scratch.matrix("active", sizes.rows, f)


def _add_and_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, scaled: Tensor, normed: Tensor
) -> tuple[Tensor, Tensor]:
    """x + y (B, T, d) and its 1/RMS (N); fills `scaled` and `normed`, (N, d), see kernels.c."""
    u = x if y is None else torch.empty_like(x)
    rstd = torch.empty(scaled.shape[0])
    kernels().add_and_norm(x, y, weight, eps, u, scaled, normed, rstd, *scaled.shape)
    return u, rstd


def _rescale(scaled: Tensor, weight: Tensor, normed: Tensor) -> None:
    kernels().rescale(scaled, weight, normed, *scaled.shape)


def _norm_backward(
    of_normed: Tensor,
    scaled: Tensor,
    rstd: Tensor,
    weight: Tensor,
    past: Tensor | None,
    of_u: Tensor,
) -> Tensor:
    """Fill `of_u` with past + the gradient through the norm; return the weight's."""
    of_weight = torch.zeros_like(weight)
    kernels().norm_backward(of_normed, scaled, rstd, weight, past, of_u, of_weight, *scaled.shape)
    return of_weight


def _turn(qkv: Tensor, angles: tuple[Tensor, Tensor], sign: float, sizes: _Sizes) -> None:
    """Rotate queries and keys in place, or back."""
    kernels().turn(
        qkv, *angles, sign, sizes.batch, sizes.length, angles[0].shape[0],
        sizes.heads + sizes.kv_heads, sizes.d_head, qkv.shape[1],
    )  # fmt: skip
