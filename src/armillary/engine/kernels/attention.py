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

from armillary.engine.cache_formats import CacheFormat
from armillary.engine.cache_formats.format import VECTOR
from armillary.engine.emit import F32, FLOATS, Emit, emitted
from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels.common import floats, share_items, shorts, word
from armillary.engine.kernels.elementary import exp, tanh
from armillary.engine.kv_layout import BLOCK, CHUNK, SCRATCH, SEGMENTS

AT_ONCE = (4, 3, 2, 1)
_MASKED = np.float32(-1e30)


def queries(form: CacheFormat) -> Kernel:
    """Heads of turned queries (R, h·d_h), in place, times a number and as `attention` takes them.

    Scores are to be scaled, and queries are fewer.
    """

    @emitted(types.void)
    def prepare(e: Emit, query: ir.Value, d_head: ir.Value, factor: ir.Value) -> None:
        form.prepare(e, query, d_head, factor)

    def queries(
        thread: int,
        threads: int,
        x: Address,
        stride: Size,
        heads: Size,
        d_head: Size,
        factor: Number,
        rows: Live,
    ) -> None:
        first, last = share_items(rows * heads, thread, threads)
        for item in range(first, last):
            prepare(x + item // heads * stride + 4 * (item % heads) * d_head, d_head, factor)

    return kernel(queries, form.name)


def attention(form: CacheFormat) -> Kernel:
    """Prepared queries (R, h·d_h) over the cache: what is found in each segment."""
    scores_4, scores_3, scores_2, scores_1 = (_scores(form, queries) for queries in AT_ONCE)
    gather_4, gather_3, gather_2, gather_1 = (_gather(form, queries) for queries in AT_ONCE)
    weigh = _weigh(form)
    size, scale_bytes = form.size, form.scale_bytes

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
        k_bytes, v_bytes = d_head * size + scale_bytes, d_value * size + scale_bytes
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
                k = word(keys + 8 * row) + head * capacity * k_bytes
                v = word(values + 8 * row) + head * capacity * v_bytes
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
                        near = v + token * v_bytes
                        done = 0
                        while done < group:
                            together = min(group - done, 4)
                            b, s = a + done * d_head * 4, mine + done * record
                            for block in range((count + BLOCK - 1) // BLOCK):
                                at = k + (token + block * BLOCK) * k_bytes
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
                                weigh(mine_s, near, count, d_value)
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

    return kernel(attention, form.name)


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


def _scores(form: CacheFormat, queries: int) -> Any:
    """Queries that lie d_head apart, times 16 keys: 16 scores for each, CHUNK apart."""

    @emitted(types.void)
    def scores(e: Emit, q: ir.Value, keys: ir.Value, d_head: ir.Value, out: ir.Value) -> None:
        starts = [e.add(q, e.mul(d_head, 4 * one)) for one in range(queries)]
        for one, found in enumerate(form.scores(e, starts, keys, d_head)):
            e.store(found, out, one * CHUNK * 4)

    return scores


def _weigh(form: CacheFormat) -> Any:
    """Weights of a chunk, in place, to what `gather` takes."""

    @emitted(types.void)
    def weigh(
        e: Emit, weights: ir.Value, values: ir.Value, count: ir.Value, d_value: ir.Value
    ) -> None:
        form.weigh(e, weights, values, count, d_value)

    return weigh


def _gather(form: CacheFormat, queries: int) -> Any:
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
        each = [e.add(weights, one * CHUNK * 4) for one in range(queries)]
        with e.loop(e.div(d_value, FLOATS)) as column:
            place = e.mul(column, 4 * FLOATS)
            outs = [e.add(e.add(sums, e.mul(apart, one)), place) for one in range(queries)]
            before = [e.load(VECTOR, out) for out in outs]
            found = form.gather(e, each, values, count, d_value, column, before)
            for out, total in zip(outs, found, strict=True):
                e.store(total, out)

    return gather


def combine() -> Kernel:
    """What was found in the segments, joined: heads side by side, (R, h·width).

    A sink is one more score of each query head, for which there is no value.
    """

    def combine(
        thread: int,
        threads: int,
        found: Address,
        kv_heads: Size,
        group: Size,
        width: Size,
        d_value: Size,
        window: Size,
        sinks: Address,
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
                o = floats(out + row * out_stride + 4 * width * (head * group + one))
                parts = found + (item * SEGMENTS * group + one) * record
                sink = floats(sinks)[head * group + one] if sinks else _MASKED
                most = sink
                for segment in range(segments):
                    most = max(most, floats(parts + segment * group * record)[0])
                total = exp(sink - most) if sinks else np.float32(0)
                for i in range(width):
                    o[i] = 0
                for segment in range(segments):
                    state = floats(parts + segment * group * record)
                    weight = exp(state[0] - most)
                    total += state[1] * weight
                    for i in range(width):
                        o[i] += state[2 + i] * weight
                inverse = np.float32(1) / total
                for i in range(width):
                    o[i] = o[i] * inverse

    return kernel(combine)


def append(form: CacheFormat) -> Kernel:
    """New keys (R, h_kv·d_h), turned, and values into the cache, each at the place of its row.

    Values are (R, h_kv·width).
    """
    put_key, put_value = _put_key(form), _put_value(form)
    size, scale_bytes = form.size, form.scale_bytes
    beside = form.clears_beside

    def append(
        thread: int,
        threads: int,
        k: Address,
        v: Address,
        stride: Size,
        kv_heads: Size,
        d_head: Size,
        width: Size,
        d_value: Size,
        keys: Address,
        values: Address,
        capacities: Address,
        places: Address,
        rows: Live,
    ) -> None:
        k_bytes, v_bytes = d_head * size + scale_bytes, d_value * size + scale_bytes
        first, last = share_items(rows * kv_heads, thread, threads)
        for item in range(first, last):
            row, head = item // kv_heads, item % kv_heads
            capacity, place = word(capacities + 8 * row), word(places + 8 * row)
            key, value = row * stride + 4 * head * d_head, row * stride + 4 * head * width
            lane = place % BLOCK
            block = head * capacity + place - lane
            put_key(k + key, word(keys + 8 * row) + block * k_bytes, lane, d_head)
            to = word(values + 8 * row) + block * v_bytes
            put_value(v + value, to, lane, width, d_value)
            if beside and place % 2 == 0 and _is_last(row, keys, rows):
                # Beside it lies what no token has written: `block_attention` gives it no weight,
                # but it must be a number.
                numbers = shorts(to + 2 * lane * d_value)
                for i in range(d_value):
                    numbers[2 * i + 1] = np.uint16(0)

    return kernel(append, form.name)


def _put_key(form: CacheFormat) -> Any:
    """A token's key into its block, one of its lanes."""
    together = form.per_word

    @emitted(types.void)
    def put_key(e: Emit, key: ir.Value, block: ir.Value, lane: ir.Value, d_head: ir.Value) -> None:
        def place(number: ir.Value) -> ir.Value:
            word = e.div(number, together)
            of_word = e.sub(number, e.mul(word, together))
            return e.add(e.mul(e.add(e.mul(word, BLOCK), lane), together), of_word)

        form.put(e, key, d_head, block, d_head, lane, place)

    return put_key


def _put_value(form: CacheFormat) -> Any:
    """A token's value into its block, with zeros up to whole vectors."""
    together = form.per_word

    @emitted(types.void)
    def put_value(
        e: Emit,
        value: ir.Value,
        block: ir.Value,
        lane: ir.Value,
        width: ir.Value,
        d_value: ir.Value,
    ) -> None:
        word = e.div(lane, together)
        first = e.mul(e.mul(word, d_value), together)
        of_word = e.sub(lane, e.mul(word, together))

        def place(number: ir.Value) -> ir.Value:
            return e.add(e.add(first, e.mul(number, together)), of_word)

        form.put(e, value, width, block, d_value, lane, place)
        nothing = form.narrow(e, e.constant(0.0, F32), e.constant(1.0, F32))
        with e.loop(e.sub(d_value, width)) as index:
            e.store(nothing, e.add(block, e.mul(place(e.add(width, index)), form.size)))

    return put_value


@register_jitable
def _is_last(row: int, keys: int, rows: int) -> bool:
    """Whether no row of the same text follows a row."""
    return row + 1 == rows or word(keys + 8 * (row + 1)) != word(keys + 8 * row)
