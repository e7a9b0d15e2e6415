"""Next-token cross-entropy from hidden states, in chunks: all logits never exist at once.

A loss is a local sum and the count of tokens in it. Means are not returned, since the mean of
means over micro-batches or ranks of unequal size is not the mean: divide each sum by the count of
the whole step before `backward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from armillary.decoder import Decoder

# The label of a position that nothing is to be learned from; torch's own choice.
IGNORED = -100

# (logits (C, V) bfloat16, labels (C,), z_loss, whether the gradient is wanted) → each row's
# cross-entropy and log Σ exp, float32; the gradient takes the place of the logits.
Kernel = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]

# Tokens whose logits exist at one time. Fewer would add the head's gradient up more often than
# the products that it comes from pay for.
CHUNK = 512


@dataclass(frozen=True)
class LossSum:
    """A loss over the tokens of one micro-batch on one rank, summed.

    `total` is what to differentiate: cross-entropy and z-loss, in nats, a scalar of float32 at
    least. `cross_entropy` is its first part, without a gradient. `count` (int64 scalar) is the
    number of tokens that were predicted; with none, both sums are 0 and so are all gradients.

        (loss.total / count_of_the_whole_step).backward()
    """

    total: Tensor
    cross_entropy: Tensor
    count: Tensor


class VocabularyShare(Protocol):
    """The part of a vocabulary that this process has the rows of, where several have one each.

    Ids start … start + rows − 1 of `size`. The others compute the same tokens.
    """

    start: int
    size: int

    def spread(self, hidden: Tensor) -> Tensor:
        """The same; its gradient is the sum of every process's."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor, without a gradient."""

    def maximum(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum of every process's tensor, without a gradient."""


def next_token_labels(
    tokens: Tensor,
    documents: Tensor | None = None,
    mask: Tensor | None = None,
    learn: Tensor | None = None,
) -> Tensor:
    """The token that follows each one in its document, IGNORED where there is none.

    Shapes: all (B, T) → (B, T) int64. `documents`: equal numbers belong together; the seam
    between two is ignored. `mask`: false for padding, by place and not by id, since a text may
    end with the token that also pads. `learn`: false for tokens that are given and not learned,
    such as the questions of a chat; a first answer token is still learned.
    Raises ValueError for shapes that differ.
    """
    for name, other in {"documents": documents, "mask": mask, "learn": learn}.items():
        if other is not None and other.shape != tokens.shape:
            raise ValueError(
                f"{name} of shape {tuple(other.shape)} for tokens of shape {tuple(tokens.shape)}"
            )
    labels = torch.full(tokens.shape, IGNORED, dtype=torch.int64, device=tokens.device)
    known = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    if documents is not None:
        known &= documents[:, 1:] == documents[:, :-1]
    if mask is not None:
        known &= mask[:, 1:].bool() & mask[:, :-1].bool()
    if learn is not None:
        known &= learn[:, 1:].bool()
    labels[:, :-1] = torch.where(known, tokens[:, 1:], IGNORED)
    return labels


def next_token_loss(
    decoder: Decoder,
    hidden: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
    share: VocabularyShare | None = None,
    kernel: Kernel | None = None,
) -> LossSum:
    """The loss of a decoder's hidden states (B, T, d) for labels (B, T).

        hidden = decoder.hidden(tokens, documents=documents)
        loss = next_token_loss(decoder, hidden, next_token_labels(tokens, documents))

    The head's matrix (the embedding's when tied), bias, scale and soft cap are used as they are in
    the decoder; z_loss, chunk, share and kernel as in `chunked_cross_entropy`.
    """
    head = decoder.head
    weight = decoder.embedding.weight if head.weight is None else head.weight
    bias: Tensor | None = head.bias
    if head.scale != 1:
        hidden, bias = hidden * head.scale, None if bias is None else bias * head.scale
    return chunked_cross_entropy(
        hidden,
        labels,
        weight,
        bias,
        soft_cap=head.soft_cap,
        z_loss=z_loss,
        chunk=chunk,
        share=share,
        kernel=kernel,
    )


def chunked_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
    share: VocabularyShare | None = None,
    kernel: Kernel | None = None,
) -> LossSum:
    """Σ (log Σ_v exp(logit_v) − logit_label) over the tokens with a label.

    Shapes: hidden (..., d), labels (...) integers in 0 … V − 1 or IGNORED, weight (V, d), bias
    (V,). `z_loss` z adds z·(log Σ exp)² a token (Chowdhery et al. 2022, §5), which keeps logits
    from drifting. The logits of `chunk` tokens exist at a time, those of ignored tokens never.
    Products are in the type of `hidden`, or of the autocast around; log-sum-exp, sums and sums of
    gradients are in float32 at least. A `kernel` does what stands between the products, where they
    are bfloat16 on a CPU and there is neither bias nor soft cap nor share.
    The gradients are made in the forward pass, while the logits are there: three products where
    computing the logits again would need four. So `backward` runs once, and where no gradient is
    wanted, `torch.no_grad()` saves two thirds of the work.
    With a `share`, weight and bias are the rows of this process's part of the vocabulary, and the
    loss is that of the whole.
    Raises ValueError for shapes that do not fit and for labels outside the vocabulary.
    """
    _check(hidden, labels, weight, bias, chunk, share)
    if share is not None:
        hidden = share.spread(hidden)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    rows = labels.reshape(-1).long()
    kept = (rows != IGNORED).nonzero().squeeze(-1)
    # Indexing copies; where every token counts, slices of what is there will do.
    places = None if kept.numel() == rows.numel() else kept
    plain = bias is None and soft_cap is None and share is None
    if not plain or dtype != torch.bfloat16 or hidden.device.type != "cpu":
        kernel = None
    options = _Options(dtype, soft_cap, z_loss, chunk, torch.is_grad_enabled(), share, kernel)
    total, cross_entropy = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, rows, places, options
    )
    count = torch.tensor(kept.numel(), dtype=torch.int64, device=labels.device)
    return LossSum(total, cross_entropy, count)


def _check(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk: int,
    share: VocabularyShare | None,
) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} for hidden states of shape "
            f"{tuple(hidden.shape)}; they must be {tuple(hidden.shape[:-1])}"
        )
    size, d = weight.shape
    if d != hidden.shape[-1] or (bias is not None and bias.shape != (size,)):
        raise ValueError(
            f"weight of shape {(size, d)} and bias of shape "
            f"{None if bias is None else tuple(bias.shape)} for hidden states of width "
            f"{hidden.shape[-1]}"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be 1 or more")
    if share is not None:
        size = share.size
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= size))
    if wrong.any():
        raise ValueError(
            f"label {int(labels[wrong][0])} is outside the vocabulary of {size}; "
            f"{IGNORED} marks a token without one"
        )


class _Options(NamedTuple):
    dtype: torch.dtype
    soft_cap: float | None
    z_loss: float
    chunk: int
    with_gradients: bool
    share: VocabularyShare | None
    kernel: Kernel | None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (N, d), weight (V, d), bias (V,) or None, labels (N,) → two scalars.

    `places` are the rows to predict, or None for all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        places: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        given = (hidden, weight, bias)
        # Sums in a narrow type would lose what each further chunk adds.
        gradients = [
            torch.zeros_like(tensor, dtype=_wide(tensor.dtype))
            if tensor is not None and needed and options.with_gradients
            else None
            for tensor, needed in zip(given, ctx.needs_input_grad[:3], strict=True)
        ]
        cross_entropy, squares = _run_chunks(*given, labels, places, options, gradients)
        ctx.gradients = gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        ctx.mark_non_differentiable(cross_entropy)
        # Squares of very large logits are infinite, and 0 times infinity is NaN.
        total = (
            cross_entropy + options.z_loss * squares if options.z_loss else cross_entropy.clone()
        )
        return total, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss's gradients are given out once; compute the loss again before a second "
                "backward"
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [
            # In place: a second matrix of V × d would be the largest tensor of many a step.
            None if gradient is None else gradient.mul_(of_total).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def _run_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    places: Tensor | None,
    options: _Options,
    gradients: list[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Add to the gradients that are wanted; return Σ cross-entropy and Σ (log-sum-exp)²."""
    weight = weight.to(options.dtype)
    bias = None if bias is None else bias.to(options.dtype)
    cross_entropy = torch.zeros((), dtype=_wide(options.dtype), device=hidden.device)
    squares = torch.zeros_like(cross_entropy)
    for start in range(0, labels.numel() if places is None else len(places), options.chunk):
        part: slice | Tensor = slice(start, start + options.chunk)
        if places is not None:
            part = places[part]
        # A function of its own, so that nothing of one chunk is held while the next is computed.
        of_chunk = _run_chunk(hidden, weight, bias, labels, part, options, gradients)
        cross_entropy += of_chunk[0]
        squares += of_chunk[1]
    if options.share is not None:
        cross_entropy = options.share.sum(cross_entropy)
    return cross_entropy, squares


def _run_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    part: slice | Tensor,
    options: _Options,
    gradients: list[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """The same of the rows `part`; cross-entropy only of the labels in this process's share."""
    x, label = hidden[part].to(options.dtype), labels[part]
    of_hidden, of_weight, of_bias = gradients
    differentiate = _differentiate if options.kernel is None else _differentiate_by_kernel
    wanted = any(gradient is not None for gradient in gradients)
    sums, of_logits = differentiate(F.linear(x, weight, bias), label, options, wanted)
    if of_logits is None:
        return sums
    if of_bias is not None:
        of_bias += of_logits.sum(0)
    narrow = of_logits.to(options.dtype)
    del of_logits
    if of_hidden is not None:
        of_hidden[part] = (narrow @ weight).to(of_hidden.dtype)
    if of_weight is not None:
        _add_product(of_weight, narrow.T, x)
    return sums


def _differentiate(
    logits: Tensor, label: Tensor, options: _Options, wanted: bool
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Logits (C, V), before the cap → the two sums and, when wanted, the gradient of logits."""
    label = label.unsqueeze(-1)
    log_p, log_sum, slopes = _log_probabilities(logits, label, options)
    del logits
    label, hit = _in_share(label, log_p, options)
    sums = -(log_p.gather(-1, label) * hit).sum(), log_sum.square().sum()
    if not wanted:
        return sums, None
    return sums, _gradient_of_logits(log_p, log_sum, slopes, label, hit, options)


def _differentiate_by_kernel(
    logits: Tensor, label: Tensor, options: _Options, wanted: bool
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """The same by the kernel, the gradient in the type of the products."""
    assert options.kernel is not None
    losses, log_sum = options.kernel(logits, label, options.z_loss, wanted)
    return (losses.sum(), log_sum.square().sum()), logits if wanted else None


def _log_probabilities(
    logits: Tensor, label: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits (C, V), before the cap → log p, log-sum-exp (C, 1), slopes of the cap (C, V)."""
    slopes = None
    if options.soft_cap is not None:
        bounded = torch.tanh(logits / options.soft_cap)
        logits, slopes = options.soft_cap * bounded, 1 - bounded.square()
    if options.share is not None:
        return *_log_softmax_of_shares(logits.to(_wide(options.dtype)), options.share), slopes
    log_p = torch.log_softmax(logits, -1, dtype=_wide(options.dtype))
    return log_p, logits.gather(-1, label).to(log_p.dtype) - log_p.gather(-1, label), slopes


def _log_softmax_of_shares(logits: Tensor, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """Logits (C, rows) of this share → log p of the whole softmax, and its log-sum-exp (C, 1)."""
    top = share.maximum(logits.amax(-1, keepdim=True))
    log_sum = top + share.sum((logits - top).exp_().sum(-1, keepdim=True)).log_()
    return logits - log_sum, log_sum


def _in_share(label: Tensor, log_p: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """The column of each label (C, 1), and 1 where there is one, else 0 (and any column)."""
    if options.share is None:
        return label, torch.ones_like(label, dtype=log_p.dtype)
    column = label - options.share.start
    hit = (column >= 0) & (column < log_p.shape[-1])
    return column.where(hit, 0), hit.to(log_p.dtype)


def _gradient_of_logits(
    log_p: Tensor,
    log_sum: Tensor,
    slopes: Tensor | None,
    label: Tensor,
    hit: Tensor,
    options: _Options,
) -> Tensor:
    """(p − one-hot + 2z·log-sum-exp·p) · slopes, (C, V), in the place of log p."""
    of_logits = log_p.exp_()
    if options.z_loss:
        of_logits.mul_(1 + 2 * options.z_loss * log_sum)
    of_logits.scatter_add_(-1, label, -hit)
    return of_logits if slopes is None else of_logits.mul_(slopes)


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """To += a @ b, in one pass where the types agree."""
    if to.dtype == a.dtype:
        to.addmm_(a, b)
    else:
        to += a @ b


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
