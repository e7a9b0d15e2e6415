"""Blocks of GGUF that have no kernels of their own → blocks that have, weight for weight the same.

Each function reads the blocks of one type, (N, bytes), as d, m and q: w = d·q + m, computed as ggml
computes it. Source of the layouts: ggml, `ggml-common.h` and `ggml-quants.c`.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import StoredTensor
from armillary.engine.formats.affine import A4, A8
from armillary.engine.formats.format import Format

Bytes = NDArray[np.uint8]
Parts = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int8]]


def _half(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """The float16 at a place of each block, (N, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _scales_and_mins(packed: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """12 bytes → 8 scales and 8 minima of 6 bits, (N, 8) each, as Q4_K and Q5_K have them."""
    low, high, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (last & 15) | (low >> 6) << 4], -1)
    mins = np.concatenate([high & 63, last >> 4 | (high >> 6) << 4], -1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _nibble_groups(qs: Bytes) -> Bytes:
    """128 bytes → 8 groups of 32: of each 32 bytes the low halves, then the high ones."""
    parts = qs.reshape(len(qs), 4, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], 2).reshape(len(qs), 8, 32)


def _q4_k(blocks: Bytes) -> Parts:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    q = _nibble_groups(blocks[:, 16:])
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * mins), q.view(np.int8)


def _q5_k(blocks: Bytes) -> Parts:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = _nibble_groups(blocks[:, 48:]) | bits << 4
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * mins), q.view(np.int8)


def _q6_k(blocks: Bytes) -> Parts:
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 1, 2, 32)
    low = np.concatenate([low & 15, low >> 4], 2).reshape(n, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(n, 2, 1, 32) >> shifts & 3
    q = (low | high << 4).astype(np.int8).reshape(n, 8, 32) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    d = _half(blocks, 208) * scales
    return d, np.zeros_like(d), q


def _q3_k(blocks: Bytes) -> Parts:
    n = len(blocks)
    low = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], -1)
    shifts = np.array([0, 2, 4, 6], np.uint8)
    high = (blocks[:, None, 104:108] >> shifts[:, None] & 3).reshape(n, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    bits = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = _two_bits(blocks[:, 32:96]).astype(np.int8) - ((bits ^ 1) << 2).view(np.int8)
    d = _half(blocks, 108) * scales
    return d, np.zeros_like(d), q


def _q2_k(blocks: Bytes) -> Parts:
    scales = (blocks[:, :16] & 15).astype(np.float32)
    mins = (blocks[:, :16] >> 4).astype(np.float32)
    q = _two_bits(blocks[:, 16:80])
    return _half(blocks, 80) * scales, -(_half(blocks, 82) * mins), q.view(np.int8)


def _two_bits(qs: Bytes) -> Bytes:
    """64 bytes → 8 groups of 32: of each 32 bytes the lowest two bits, then the next ones."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    bits = qs.reshape(len(qs), 2, 1, 32) >> shifts & 3
    return np.asarray(bits.reshape(len(qs), 8, 32), np.uint8)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """32 bits at a place of each block, (N, 32), as the fifth bits of numbers."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little")
    return np.asarray(bits << 4, np.uint8)


def _q5_0(blocks: Bytes) -> Parts:
    q = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], -1) | _fifth_bits(blocks, 2)
    d = _half(blocks, 0)
    return d, np.zeros_like(d), q.view(np.int8)[:, None] - np.int8(16)


def _q5_1(blocks: Bytes) -> Parts:
    q = np.concatenate([blocks[:, 8:] & 15, blocks[:, 8:] >> 4], -1) | _fifth_bits(blocks, 4)
    return _half(blocks, 0), _half(blocks, 2), q.view(np.int8)[:, None]


# Twice what the codes of FP4 (E2M1) stand for, so that they are whole.
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _mxfp4(blocks: Bytes) -> Parts:
    q = _FP4[np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], -1)]
    d = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return d, np.zeros_like(d), q[:, None]


_READERS: dict[str, tuple[int, Callable[[Bytes], Parts]]] = {
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "MXFP4": (17, _mxfp4),
}
"""Bytes of a block, and what reads it: d and m (N, groups or their halves), q (N, groups, 32)."""


def target(encoding: str) -> Format | None:
    """The format that an encoding is repacked to; None where that is not known."""
    if encoding not in _READERS:
        return None
    return A4() if encoding == "Q4_K" else A8()


def repacked(tensor: StoredTensor) -> Iterator[Bytes]:
    """The rows of a tensor in the target format, some at a time."""
    size, read = _READERS[tensor.encoding]
    for first, last in tensor.row_blocks():
        blocks = np.ascontiguousarray(tensor.stored_rows(first, last)).reshape(-1, size)
        d, m, q = read(blocks)
        flat = q.reshape(-1, 32)
        if tensor.encoding == "Q4_K":
            yield A4.pack(d.reshape(-1), m.reshape(-1), flat.view(np.uint8)).reshape(-1)
            continue
        # A group of 32 has one d and m, or one for each half.
        per = 2 * len(flat) // d.size
        pairs = [np.repeat(part.reshape(-1), per).reshape(-1, 2) for part in (d, m)]
        yield A8.pack(pairs[0], pairs[1], flat).reshape(-1)
