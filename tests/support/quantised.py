"""The number formats of weights and activations in NumPy: what the kernels are held against."""

import gguf
import numpy as np

from armillary.checkpoints.tensors import encode
from armillary.engine.formats.affine import A4, A8

PLAIN, QUANTISED = ("F32", "F16", "BF16"), ("Q8_0", "Q4_0", "Q4_1", "A4", "A8")
IN_FILES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Quantised formats of files that the gguf library can write; the last two have no kernels."""
AFFINE = {"A4": (1, 0, 15, A4()), "A8": (2, -127, 127, A8())}
"""Of our own formats the d and m in a group, the least and the largest q, and the format."""
GROUP = 32


def stored(name: str, weights: np.ndarray) -> np.ndarray:
    """(N, K) float32 in a format, (N, bytes of a row), by the gguf library where it knows it."""
    if name in PLAIN:
        return encode(weights, name).reshape(len(weights), -1)
    if name in AFFINE:
        return _affine(name, weights)
    return gguf.quantize(weights, gguf.GGMLQuantizationType[name])


def numbers(name: str, rows: np.ndarray) -> np.ndarray:
    """The weights that rows of bytes mean, (N, K) float64."""
    if name in AFFINE:
        d, m, q = _parts(name, rows)
        return (q * d + m).reshape(len(rows), -1)
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[name]).astype(np.float64)


def summands(name: str, rows: np.ndarray) -> np.ndarray:
    """The sizes of what each weight is put together from, (N, K): how far rounding may be off.

    A product with Q4_1 adds up d·q and m apart.
    """
    sizes = np.abs(numbers(name, rows))
    if name in PLAIN or name in {"Q8_0", "Q4_0"}:
        return sizes
    if name in AFFINE:
        d, m, q = _parts(name, rows)
        return (np.abs(q * d) + np.abs(m)).reshape(len(rows), -1) * 2
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    heads = rows.reshape(len(rows), -1, block)[:, :, :4].copy().view(np.float16).astype(float)
    offset = np.abs(heads[..., 1])
    return sizes + 2 * np.repeat(offset, GROUP, axis=1)


def _affine(name: str, weights: np.ndarray) -> np.ndarray:
    """Each d and m from the least and the largest weight that share them."""
    per, low, high, form = AFFINE[name]
    parts = weights.reshape(-1, per, GROUP // per)
    least, most = parts.min(-1), parts.max(-1)
    d = ((most - least) / (high - low)).astype(np.float32)
    m = (least - low * d).astype(np.float32)
    safe = np.where(d == 0, 1, d)
    q = np.clip(np.rint((parts - m[..., None]) / safe[..., None]), low, high).astype(np.int8)
    flat = q.reshape(-1, GROUP)
    blocks = form.pack(d[:, 0], m[:, 0], flat.view(np.uint8)) if per == 1 else form.pack(d, m, flat)
    return blocks.reshape(len(weights), -1)


def _parts(name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d, m and q, each (groups, 32) float64."""
    per, _, _, form = AFFINE[name]
    blocks = rows.reshape(-1, form.nbytes)
    heads = blocks[:, : 8 * per].copy().view("<f4").astype(float)
    d, m = (np.repeat(part, GROUP // per, axis=1) for part in (heads[:, :per], heads[:, per:]))
    body = blocks[:, 8 * per :]
    if name == "A4":
        return d, m, np.concatenate([body & 15, body >> 4], -1).astype(float)
    return d, m, body.view(np.int8).astype(float)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations (R, K) as int8 and a scale of each group of 32: q (R, K), s (R, K / 32) float32.

    s = max|x| / 127 and q = rint(x · 127 / max|x|), each step in float32. Below 1e-36 the inverse
    would be too large: q is 0.
    """
    groups = x.astype(np.float32).reshape(len(x), -1, GROUP)
    most = np.abs(groups).max(-1)
    scales = most * np.float32(1 / 127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most < np.float32(1e-36), np.float32(0), np.float32(127) / most)
    return np.rint(groups * inverse[..., None]).astype(np.int8).reshape(x.shape), scales


def packed(x: np.ndarray) -> np.ndarray:
    """Activations as `formats/int8.py` lays them out: (R, bytes of a row)."""
    q, scales = rounded(x)
    halves = q.reshape(len(x), -1, 2, GROUP // 2).sum(-1, dtype=np.int32)
    parts = (q, scales, halves.sum(-1).astype(np.float32), halves[..., 0].astype(np.float32))
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1)


def meant(x: np.ndarray) -> np.ndarray:
    """What rounded activations stand for, (R, K) float64."""
    q, scales = rounded(x)
    return q * np.repeat(scales.astype(np.float64), GROUP, axis=1)
