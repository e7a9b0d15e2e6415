"""Numbers → blocks of Q4_K, Q5_K and Q6_K, which the gguf library reads and does not write.

A super-block is 256 numbers with scales of its groups that are whole numbers themselves: of 6 bits
and with minima (8 groups of 32), or of 8 bits (Q6_K: 16 groups of 16). The grid of each group is
the best of several trials, each fitted by weighted least squares. Source of the layouts: ggml,
`ggml-common.h`.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SUPER = 256
_GROUP, _SIXTEEN = 32, 16
_LARGEST_SCALE = 63  # 6 bits
_AT_ONCE = 128  # super-blocks, with all that a trial makes of them near the processor
# How many steps the grid of a trial has more than the numbers' range needs.
_WIDER = np.linspace(-1.0, 1.0, 17, dtype=np.float32)


def _inverse(x: Floats) -> Floats:
    """1 / x, and 0 where that is no number."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / x
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _sum(*factors: Floats) -> Floats:
    """Sum of the products over a group, (N,)."""
    total = factors[0]
    for factor in factors[1:]:
        total = total * factor
    return np.asarray(total.sum(0))


def _columns(x: Floats, size: int) -> Floats:
    """Groups of `size` as columns, so that sums over them run along whole rows."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def _fit_affine(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Groups as columns, (32, N) → d and m, (N,) each, at least 0.

    x ≈ d·q − m with q from 0 to `top`.
    A number weighs its size and the group's root mean square: the large ones do most in a product.
    """
    w = np.abs(x) + np.sqrt(np.mean(x * x, 0))
    least = np.minimum(x.min(0), np.float32(0))
    extent = x.max(0) - least
    inverse = _inverse(extent)
    above, sum_w, sum_x = x - least, _sum(w), _sum(w, x)
    d, m = extent / np.float32(top), -least
    off = d * np.rint(above * (top * inverse)) - m - x
    best = _sum(w, off, off)
    for wider in _WIDER:
        q = np.clip(np.rint(above * ((top + wider) * inverse)), 0, top)
        weighted = w * q
        sum_q, sum_qq, sum_qx = _sum(weighted), _sum(weighted, q), _sum(weighted, x)
        # Where all q are one this is rounding, and so is the line; its error says so.
        over = _inverse(sum_w * sum_qq - sum_q * sum_q)
        slope = (sum_w * sum_qx - sum_q * sum_x) * over
        offset = (sum_q * sum_qx - sum_qq * sum_x) * over
        through_zero = offset < 0
        slope = np.where(through_zero, sum_qx * _inverse(sum_qq), slope)
        offset = np.where(through_zero, np.float32(0), offset)
        off = slope * q - offset - x
        error = _sum(w, off, off)
        better = (error < best) & (slope >= 0)
        best = np.where(better, error, best)
        d, m = np.where(better, slope, d), np.where(better, offset, m)
    return d, m


def _fit_symmetric(x: Floats) -> Floats:
    """Groups as columns, (16, N) → d, (N,), of either sign: x ≈ d·q with q from −32 to 31."""
    w = x * x
    largest = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    inverse = _inverse(largest)
    best: Floats = np.full_like(largest, np.inf)
    d: Floats = np.zeros_like(largest)
    for wider in _WIDER:
        q = np.clip(np.rint(x * ((wider - 32) * inverse)), -32, 31)
        slope = _sum(w, q, x) * _inverse(_sum(w, q, q))
        off = slope * q - x
        error = _sum(w, off, off)
        better = error < best
        best, d = np.where(better, error, best), np.where(better, slope, d)
    return d


def _half(x: Floats) -> NDArray[np.float16]:
    return x.astype("<f2")


def _in_six_bits(parts: Floats) -> tuple[NDArray[np.float16], Bytes]:
    """(N, 8), at least 0 → what they are multiples of (N, 1), and the whole numbers."""
    step = _half(parts.max(-1, keepdims=True) / np.float32(_LARGEST_SCALE))
    whole = np.rint(parts * _inverse(step.astype(np.float32)))
    return step, np.clip(whole, 0, _LARGEST_SCALE).astype(np.uint8)


def _pack_scales(scales: Bytes, mins: Bytes) -> Bytes:
    """8 scales and 8 minima of 6 bits → 12 bytes: the last four of each lie in pieces."""
    return np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            mins[:, :4] | mins[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4,
        ],
        -1,
    )


def _affine(x: Floats, top: int) -> tuple[list[Bytes], Bytes]:
    """Super-blocks (N, 256) → the head of their blocks, and q (N, 8, 32)."""
    d, m = (part.reshape(len(x), -1) for part in _fit_affine(_columns(x, _GROUP), top))
    (step, scales), (step_m, mins) = _in_six_bits(d), _in_six_bits(m)
    d, m = step.astype(np.float32) * scales, step_m.astype(np.float32) * mins
    q = np.rint((x.reshape(len(x), -1, _GROUP) + m[..., None]) * _inverse(d)[..., None])
    head = [step.view(np.uint8), step_m.view(np.uint8), _pack_scales(scales, mins)]
    return head, np.clip(q, 0, top).astype(np.uint8)


def _nibbles(q: Bytes) -> Bytes:
    """(N, 8, 32) → (N, 128): of each two groups the first in the low halves."""
    low = q & 15
    return np.asarray((low[:, ::2] | low[:, 1::2] << 4).reshape(len(q), -1), np.uint8)


def _q4_k(x: Floats) -> Bytes:
    head, q = _affine(x, 15)
    return np.concatenate([*head, _nibbles(q)], -1)


def _q5_k(x: Floats) -> Bytes:
    head, q = _affine(x, 31)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little").reshape(len(x), -1)
    return np.concatenate([*head, fifth, _nibbles(q)], -1)


def _q6_k(x: Floats) -> Bytes:
    d = _fit_symmetric(_columns(x, _SIXTEEN)).reshape(len(x), -1)
    largest = np.take_along_axis(d, np.abs(d).argmax(-1, keepdims=True), -1)
    step = _half(largest / np.float32(-128))
    scales = np.clip(np.rint(d * _inverse(step.astype(np.float32))), -128, 127).astype(np.int8)
    d = step.astype(np.float32) * scales
    q = np.rint(x.reshape(len(x), -1, _SIXTEEN) * _inverse(d)[..., None])
    numbers = (np.clip(q, -32, 31) + 32).astype(np.uint8).reshape(len(x), 2, 4, 32)
    low = (numbers[:, :, :2] & 15 | (numbers[:, :, 2:] & 15) << 4).reshape(len(x), -1)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(numbers >> 4 << shifts, axis=2).reshape(len(x), -1)
    return np.concatenate([low, high, scales.view(np.uint8), step.view(np.uint8)], -1)


_MAKERS: Mapping[str, Callable[[Floats], Bytes]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
K_TYPES = tuple(_MAKERS)


def k_blocks(numbers: Floats, encoding: str) -> Bytes:
    """Numbers (N, 256) → blocks of one of `K_TYPES`, (N, bytes); all must fit half precision."""
    some = range(0, len(numbers), _AT_ONCE)
    return np.concatenate([_MAKERS[encoding](numbers[i : i + _AT_ONCE]) for i in some])
