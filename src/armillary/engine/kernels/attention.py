"""Attention of a few queries over the cache, shared out evenly by what there is to read.

The tokens that a query reads are cut into segments, by their number alone: what comes out depends
neither on the threads nor on which other queries are computed with it. Of each head and segment it
is kept what was found: the largest score m, l = Σ e^(score − m), and Σ e^(score − m)·v. `combine`
joins them. Source: Dao et al. 2022, §3.1, for softmax by parts.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.emit import F32, FLOATS, I32, Emit, emitted, vector
from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels.common import floats, share_items, shorts, word
from armillary.engine.kernels.elementary import exp, tanh
from armillary.engine.kernels.tile import nearest
from armillary.engine.kv_layout import BLOCK, CHUNK, SCRATCH, SEGMENTS, Stored

AT_ONCE = (4, 3, 2, 1)
_MASKED = np.float32(-1e30)
_VECTOR = vector(F32, FLOATS)


def attention(stored: Stored) -> Kernel:
    """Queries (R, h·d_h), scaled and turned, over the cache: what is found in each segment."""
    scores_4, scores_3, scores_2, scores_1 = (_scores(stored, queries) for queries in AT_ONCE)
    gather_4, gather_3, gather_2, gather_1 = (_gather(stored, queries) for queries in AT_ONCE)
    size = 4 if stored == "F32" else 2

    def attention(
        thread: int,
        threads: int,
        q: Address,
        q_stride: Size,
        kv_heads: Size,
        group: Size,
        d_head: Size,
        d_value: Size,
        window: Size,
        cap: Number,
        keys: Address,
        values: Address,
        capacities: Address,
        lengths: Address,
        found: Address,
        scratch: Address,
        rows: Live,
    ) -> None:
        # For each row: where its keys and values lie, for how many tokens there is room, and how
        # many it reads. `found`: (R, kv_heads, SEGMENTS, group, 2 + d_value).
        record = 4 * (2 + d_value)
        items = 0
        for row in range(rows):
            items += kv_heads * _segments(_chunks(word(lengths + 8 * row), window))
        first, last = share_items(items, thread, threads)
        scores = scratch + thread * SCRATCH
        begin = 0
        for row in range(rows):
            length, capacity = word(lengths + 8 * row), word(capacities + 8 * row)
            low = max(0, length - window) if window else 0
            chunks = _chunks(length, window)
            segments, apart = _segments(chunks), _segment(chunks)
            for head in range(kv_heads):
                k = word(keys + 8 * row) + head * capacity * d_head * size
                v = word(values + 8 * row) + head * capacity * d_value * size
                a = q + row * q_stride + head * group * d_head * 4
                for segment in range(max(first - begin, 0), min(last - begin, segments)):
                    mine = found + ((row * kv_heads + head) * SEGMENTS + segment) * group * record
                    for one in range(group):
                        state = floats(mine + one * record)
                        state[0] = _MASKED
                        for i in range(d_value + 1):
                            state[1 + i] = 0
                    start = segment * apart
                    for chunk in range(start, min(start + apart, chunks)):
                        token = low // CHUNK * CHUNK + chunk * CHUNK
                        count = min(CHUNK, length - token)
                        near = v + token * d_value * size
                        done = 0
                        while done < group:
                            together = min(group - done, 4)
                            b, s = a + done * d_head * 4, mine + done * record
                            for block in range((count + BLOCK - 1) // BLOCK):
                                at = k + (token + block * BLOCK) * d_head * size
                                out = scores + block * BLOCK * 4
                                if together == 4:
                                    scores_4(b, at, d_head, out)
                                elif together == 3:
                                    scores_3(b, at, d_head, out)
                                elif together == 2:
                                    scores_2(b, at, d_head, out)
                                else:
                                    scores_1(b, at, d_head, out)
                            for one in range(together):
                                mine_s, mine_k = scores + one * CHUNK * 4, s + one * record
                                _soften(mine_s, mine_k, cap, low - token, count, d_value)
                            if together == 4:
                                gather_4(scores, near, count, d_value, s + 8, record)
                            elif together == 3:
                                gather_3(scores, near, count, d_value, s + 8, record)
                            elif together == 2:
                                gather_2(scores, near, count, d_value, s + 8, record)
                            else:
                                gather_1(scores, near, count, d_value, s + 8, record)
                            done += together
                begin += segments

    return kernel(attention, stored)


@register_jitable
def _chunks(length: int, window: int) -> int:
    """How many chunks a row reads; the first may lie partly before its window."""
    low = max(0, length - window) if window else 0
    return (length - low // CHUNK * CHUNK + CHUNK - 1) // CHUNK


@register_jitable
def _segment(chunks: int) -> int:
    """How many chunks are a segment."""
    return (chunks + SEGMENTS - 1) // SEGMENTS


@register_jitable
def _segments(chunks: int) -> int:
    """How many segments there are."""
    apart: int = _segment(chunks)
    return (chunks + apart - 1) // apart


@register_jitable(fastmath=True)
def _soften(scores: int, state: int, cap: float, low: int, count: int, d_value: int) -> None:
    """Scores of a chunk to e^(score − m), where m may rise; 0 outside tokens low … count − 1."""
    s, kept = floats(scores), floats(state)
    if cap > 0:
        inverse = np.float32(1) / cap
        for i in range(CHUNK):
            s[i] = cap * tanh(s[i] * inverse)
    for i in range(count, CHUNK):
        s[i] = _MASKED
    for i in range(low):
        s[i] = _MASKED
    most = kept[0]
    for i in range(CHUNK):
        most = max(most, s[i])
    total = np.float32(0)
    for i in range(CHUNK):
        s[i] = exp(s[i] - most)
        total += s[i]
    shrink = exp(kept[0] - most)
    kept[0] = most
    kept[1] = kept[1] * shrink + total
    if shrink != np.float32(1):
        for i in range(d_value):
            kept[2 + i] *= shrink


def _scores(stored: Stored, queries: int) -> Any:
    """Queries that lie d_head apart, times 16 keys: 16 scores for each, CHUNK apart."""

    @emitted(types.void)
    def scores(e: Emit, q: ir.Value, keys: ir.Value, d_head: ir.Value, out: ir.Value) -> None:
        totals = [e.variable(e.constant(0.0, _VECTOR)) for _ in range(queries)]
        starts = [e.add(q, e.mul(d_head, 4 * one)) for one in range(queries)]
        step = 1 if stored == "F32" else 2
        with e.loop(e.div(d_head, step)) as index:
            lanes = _numbers(e, stored, e.add(keys, e.mul(index, 64)))
            for part, lane in enumerate(lanes):
                for start, total in zip(starts, totals, strict=True):
                    number = e.load(F32, e.add(start, e.mul(index, 4 * step)), 4 * part)
                    total.set(e.fma(e.splat(number, FLOATS), lane, total.get()))
        for one, total in enumerate(totals):
            e.store(total.get(), out, one * CHUNK * 4)

    return scores


def _gather(stored: Stored, queries: int) -> Any:
    """Weights, CHUNK apart, times the values of `count` tokens, to sums `apart` bytes apart."""

    @emitted(types.void)
    def gather(
        e: Emit,
        weights: ir.Value,
        values: ir.Value,
        count: ir.Value,
        d_value: ir.Value,
        sums: ir.Value,
        apart: ir.Value,
    ) -> None:
        b = e.builder
        step = 1 if stored == "F32" else 2
        row = e.mul(d_value, 4)
        with e.loop(e.div(d_value, FLOATS)) as column:
            place = e.mul(column, 4 * FLOATS)
            outs = [e.add(e.add(sums, e.mul(apart, one)), place) for one in range(queries)]
            totals = [e.variable(e.load(_VECTOR, out)) for out in outs]
            near = e.add(values, e.mul(column, 64))

            def add(token: ir.Value, lane: ir.Value) -> None:
                for one, total in enumerate(totals):
                    weight = e.load(F32, e.add(weights, e.mul(token, 4)), one * CHUNK * 4)
                    total.set(e.fma(e.splat(weight, FLOATS), lane, total.get()))

            with e.loop(e.div(count, step)) as index:
                lanes = _numbers(e, stored, e.add(near, e.mul(index, row)))
                for part, lane in enumerate(lanes):
                    add(e.add(e.mul(index, step), part), lane)
            if step == 2:
                # Beside the last of an odd count lies what no token has written yet.
                with b.if_then(b.trunc(count, ir.IntType(1))):
                    last = e.sub(count, 1)
                    at = e.add(near, e.mul(e.div(last, 2), row))
                    add(last, _numbers(e, stored, at)[0])
            for out, total in zip(outs, totals, strict=True):
                e.store(total.get(), out)

    return gather


def _numbers(e: Emit, stored: Stored, address: ir.Value) -> list[ir.Value]:
    """64 bytes: a vector of float32, or two whose bfloat16 numbers lie in turns."""
    if stored == "F32":
        return [e.load(_VECTOR, address)]
    both = e.load(vector(I32, FLOATS), address)
    b = e.builder
    low = b.shl(both, e.constant(16, both.type))
    high = b.and_(both, e.constant(0xFFFF0000, both.type))
    return [b.bitcast(each, _VECTOR) for each in (low, high)]


def combine() -> Kernel:
    """What was found in the segments, joined: heads side by side, (R, h·d_h)."""

    def combine(
        thread: int,
        threads: int,
        found: Address,
        kv_heads: Size,
        group: Size,
        d_head: Size,
        d_value: Size,
        window: Size,
        lengths: Address,
        out: Address,
        out_stride: Size,
        rows: Live,
    ) -> None:
        record = 4 * (2 + d_value)
        first, last = share_items(rows * kv_heads, thread, threads)
        for item in range(first, last):
            row, head = item // kv_heads, item % kv_heads
            segments = _segments(_chunks(word(lengths + 8 * row), window))
            for one in range(group):
                o = floats(out + row * out_stride + 4 * d_head * (head * group + one))
                parts = found + (item * SEGMENTS * group + one) * record
                most = _MASKED
                for segment in range(segments):
                    most = max(most, floats(parts + segment * group * record)[0])
                total = np.float32(0)
                for i in range(d_head):
                    o[i] = 0
                for segment in range(segments):
                    state = floats(parts + segment * group * record)
                    weight = exp(state[0] - most)
                    total += state[1] * weight
                    for i in range(d_head):
                        o[i] += state[2 + i] * weight
                inverse = np.float32(1) / total
                for i in range(d_head):
                    o[i] = o[i] * inverse

    return kernel(combine)


def append(stored: Stored) -> Kernel:
    """New keys (R, h_kv·d_h), turned, and values into the cache, each at the place of its row."""
    plain = stored == "F32"

    def append(
        thread: int,
        threads: int,
        k: Address,
        v: Address,
        stride: Size,
        kv_heads: Size,
        d_head: Size,
        d_value: Size,
        keys: Address,
        values: Address,
        capacities: Address,
        places: Address,
        rows: Live,
    ) -> None:
        first, last = share_items(rows * kv_heads, thread, threads)
        for item in range(first, last):
            row, head = item // kv_heads, item % kv_heads
            capacity, place = word(capacities + 8 * row), word(places + 8 * row)
            new_k = k + row * stride + 4 * head * d_head
            new_v = v + row * stride + 4 * head * d_head
            block, lane = place // BLOCK, place % BLOCK
            to_k = word(keys + 8 * row)
            to_v = word(values + 8 * row)
            if plain:
                a, b = floats(to_k + 4 * head * capacity * d_head), floats(new_k)
                for i in range(d_head):
                    a[(block * d_head + i) * BLOCK + lane] = b[i]
                a, b = floats(to_v + 4 * head * capacity * d_value), floats(new_v)
                for i in range(d_head):
                    a[place * d_value + i] = b[i]
                for i in range(d_head, d_value):
                    a[place * d_value + i] = 0
            else:
                c, b = shorts(to_k + 2 * head * capacity * d_head), floats(new_k)
                for i in range(d_head):
                    at = (block * d_head + i // 2 * 2) * BLOCK + 2 * lane + i % 2
                    c[at] = nearest(b[i])
                c, b = shorts(to_v + 2 * head * capacity * d_value), floats(new_v)
                for i in range(d_value):
                    at = place // 2 * 2 * d_value + 2 * i + place % 2
                    c[at] = nearest(b[i]) if i < d_head else np.uint16(0)
                if place % 2 == 0 and _is_last(row, keys, rows):
                    # Beside it lies what no token has written: `block_attention` gives it no
                    # weight, but it must be a number.
                    for i in range(d_value):
                        c[place * d_value + 2 * i + 1] = np.uint16(0)

    return kernel(append, stored)


@register_jitable
def _is_last(row: int, keys: int, rows: int) -> bool:
    """Whether no row of the same text follows a row."""
    return row + 1 == rows or word(keys + 8 * (row + 1)) != word(keys + 8 * row)
