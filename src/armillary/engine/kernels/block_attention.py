"""Attention of many queries over the cache, as products of matrices on blocks that stay in cache.

Queries of one text and one head of keys are taken some vectors at a time, a lane each, and meet
some keys at a time: scores (keys, queries), softmax down the columns, then values (d_v, queries).
All that softmax by parts keeps is a vector of lanes, and the keys and values are read as the cache
has them (`block_products.py`). Source: Dao et al. 2022, §3.1.
"""

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from armillary.engine.cache_formats import CacheFormat
from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels import amx
from armillary.engine.kernels.block_products import gather_with, ready_with, score_with
from armillary.engine.kernels.block_softmax import (
    END,
    FIRST,
    LOWEST,
    STATE,
    SUM,
    mask_with,
    soften_with,
)
from armillary.engine.kernels.common import floats, whole_numbers, word
from armillary.engine.kernels.elementary import tanh
from armillary.engine.kernels.tile import lay, transpose
from armillary.engine.kv_layout import BLOCK, CHUNK
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES, multiplied_by_amx, query_vectors

_LOG2E = np.float32(math.log2(math.e))
_VECTOR = 4 * LANES
"""Bytes of a vector."""
_TURNS = 4
"""Parts for each thread at least, so that none waits long for another."""


def block_attention(form: CacheFormat, machine: Machine) -> Kernel:
    """Queries (R, h·d_h), turned, over the cache → heads side by side, (R, h·width).

    Rows that follow each other in one text are taken together.
    """
    attend = _attend(form, machine)
    prepare, leave = amx.around(multiplied_by_amx(form.tiles, machine))
    together = LANES * query_vectors(form.tiles, machine)
    size, scale_bytes = form.size, form.scale_bytes

    def block_attention(
        thread: int,
        threads: int,
        q: Address,
        q_stride: Size,
        kv_heads: Size,
        group: Size,
        d_head: Size,
        width: Size,
        d_value: Size,
        window: Size,
        cap: Number,
        scale: Number,
        keys: Address,
        values: Address,
        capacities: Address,
        lengths: Address,
        sinks: Address,
        out: Address,
        out_stride: Size,
        blocks: Size,
        scratch: Address,
        scratch_bytes: Size,
        rows: Live,
    ) -> None:
        # For each row: where its keys and values lie, for how many tokens there is room, and how
        # many it reads. Blocks of queries, `blocks` at most together, go to the threads in turns,
        # and back again, since later ones read more.
        mine = scratch + thread * scratch_bytes
        # In base 2, so that a power of two is all that is to be computed of a score.
        cap_2, scale_2 = cap * _LOG2E, scale * _LOG2E
        row, owner, turn = 0, 0, 1
        prepare(0)
        while row < rows:
            last, capacity = _text_end(row, keys, rows), word(capacities + 8 * row)
            there = ((last - row) * group + together - 1) // together * kv_heads
            queries = together * max(1, min(blocks, there // (_TURNS * threads)))
            for head in range(kv_heads):
                k = word(keys + 8 * row) + head * capacity * (d_head * size + scale_bytes)
                v = word(values + 8 * row) + head * capacity * (d_value * size + scale_bytes)
                shift, to = head * group * d_head * 4, head * group * width * 4
                for begin in range(0, (last - row) * group, queries):
                    if owner == thread:
                        first, member = row + begin // group, begin % group
                        count = min(queries, (last - row) * group - begin)
                        own = sinks + 4 * head * group if sinks else 0
                        rows_q = q + shift, q_stride, scale_2, own
                        rows_out = out + to, out_stride, width
                        which = first, member, count, group, lengths
                        sizes = d_head, d_value
                        attend(which, sizes, rows_q, window, cap_2, k, v, rows_out, mine)
                    owner += turn
                    if owner < 0 or owner == threads:
                        turn = -turn
                        owner += turn
            row = last
        leave(0)

    return kernel(block_attention, form.name, exact=True)


def _attend(form: CacheFormat, machine: Machine) -> Any:
    """Queries of one text and head: from one of the group of a row on, then of the rows after it.

    They are taken in blocks, which meet each chunk of the cache one after another, so that it is
    brought to what they read but once. Its tuples are (first row, which of its group, count of
    queries, group, lengths of the rows), (d_h, d_v), (rows of queries, stride, factor, sinks of the
    group or 0), (rows of results, stride, width of a head's).
    """
    most = query_vectors(form.tiles, machine)
    # For as many queries as meet at once, and for a few.
    chunk_many, chunk_few = _chunk(form, machine, most), _chunk(form, machine, 1)
    begin, finish = _begin(form, machine), _finish()
    size, scale_bytes, per_word = form.size, form.scale_bytes, form.per_word
    ready = ready_with(form, machine)

    @register_jitable
    def attend(
        which: tuple[int, int, int, int, int],
        sizes: tuple[int, int],
        q: tuple[int, int, float, int],
        window: int,
        cap: float,
        k: int,
        v: int,
        out: tuple[int, int, int],
        scratch: int,
    ) -> None:
        count = which[2]
        d_head, d_value = sizes
        vectors = most if count > LANES else 1
        step = _VECTOR * vectors
        wide_d = (d_head + 2 * LANES - 1) // (2 * LANES) * 2 * LANES
        blocks = (count + vectors * LANES - 1) // (vectors * LANES)
        # Of each block its queries, their sums, and what softmax by parts keeps of each query.
        of_queries, of_sums = wide_d // per_word * step, d_value * step
        own = STATE * step + of_queries + of_sums
        scores = scratch + blocks * own
        stage = scores + CHUNK * step
        area = stage + max(_VECTOR * max(wide_d, d_value), 2 * CHUNK * (d_head + d_value + 4))
        for block in range(blocks):
            state = scratch + block * own
            packed = state + STATE * step
            part = _part(which, block, vectors)
            begin(part, d_head, wide_d, q, window, vectors, state, packed, stage)
            added = floats(packed + of_queries)
            for i in range(d_value * vectors * LANES):
                added[i] = np.float32(0)
        token = _first_token(which, window)
        longest = _last_length(which)
        while token < longest:
            at_k = k + token * (d_head * size + scale_bytes)
            at_v = v + token * (d_value * size + scale_bytes)
            near = ready(at_k, at_v, sizes, min(CHUNK, longest - token), area, stage)
            for block in range(blocks):
                part = _part(which, block, vectors)
                shortest, end = word(part[4] + 8 * part[0]), _last_length(part)
                if token < _first_token(part, window) or token >= end:
                    continue
                written = min(CHUNK, end - token)
                there = (written + BLOCK - 1) // BLOCK * BLOCK
                highest = max(0, end - window) if window else 0
                hides = token < highest or token + there > shortest
                state = scratch + block * own
                packed = state + STATE * step
                parts = packed, scores, packed + of_queries
                if vectors == most:
                    chunk_many(near, token, there, written, sizes, cap, hides, state, parts)
                else:
                    chunk_few(near, token, there, written, sizes, cap, hides, state, parts)
            token += CHUNK
        for block in range(blocks):
            state = scratch + block * own
            sums = state + STATE * step + of_queries
            finish(_part(which, block, vectors), sizes, out, vectors, state, sums, stage)

    return attend


@register_jitable
def _part(
    which: tuple[int, int, int, int, int], block: int, vectors: int
) -> tuple[int, int, int, int, int]:
    """A block of queries, told as all of them are."""
    row, member, count, group, lengths = which
    before = block * vectors * LANES
    first = member + before
    part = min(vectors * LANES, count - before)
    return row + first // group, first % group, part, group, lengths


@register_jitable
def _first_token(which: tuple[int, int, int, int, int], window: int) -> int:
    """Where the chunk begins that queries read first."""
    if not window:
        return 0
    first: int = max(0, word(which[4] + 8 * which[0]) - window) // CHUNK * CHUNK
    return first


@register_jitable
def _last_length(which: tuple[int, int, int, int, int]) -> int:
    """How many tokens the last query reads."""
    row, member, count, group, lengths = which
    length: int = word(lengths + 8 * (row + (member + count - 1) // group))
    return length


def _begin(form: CacheFormat, machine: Machine) -> Any:
    """Queries as columns, and what is kept of each, at the start."""
    lay_out = lay(machine, form.tiles)

    @register_jitable
    def begin(
        which: tuple[int, int, int, int, int],
        d_head: int,
        wide_d: int,
        q: tuple[int, int, float, int],
        window: int,
        vectors: int,
        state: int,
        packed: int,
        stage: int,
    ) -> None:
        row, member, count, group, lengths = which
        rows, stride, scale, sinks = q
        step = _VECTOR * vectors
        lows, ends = whole_numbers(state + FIRST * step), whole_numbers(state + END * step)
        most, total, staged = floats(state), floats(state + SUM * step), floats(stage)
        for i in range(vectors * LANES):
            lane, filled = i % LANES * wide_d, 0
            ends[i], lows[i] = 0, 0
            most[i] = LOWEST if i < count else np.float32(0)
            total[i] = np.float32(0)
            if i < count:
                ends[i] = word(lengths + 8 * row)
                lows[i] = max(0, ends[i] - window) if window else 0
                if sinks:
                    # As of a token that was read before, and had no value.
                    most[i] = floats(sinks)[member] * _LOG2E
                    total[i] = np.float32(1)
                filled = d_head
                from_ = floats(rows + row * stride + member * d_head * 4)
                for j in range(d_head):
                    staged[lane + j] = from_[j] * scale
                member += 1
                if member == group:
                    row, member = row + 1, 0
            for j in range(filled, wide_d):
                staged[lane + j] = np.float32(0)
            if i % LANES == LANES - 1:
                part = packed + i // LANES * _VECTOR
                lay_out(stage, 4 * wide_d, wide_d // (2 * LANES), part, step)

    return begin


def _chunk(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Queries meet the keys and values of a chunk."""
    soften, mask = soften_with(form, machine, vectors), mask_with(vectors)
    multiply, gather = score_with(form, machine, vectors), gather_with(form, machine, vectors)
    per_word = form.per_word

    @register_jitable
    def chunk(
        near: tuple[int, int, int],
        token: int,
        count: int,
        written: int,
        sizes: tuple[int, int],
        cap: float,
        hides: bool,
        state: int,
        parts: tuple[int, int, int],
    ) -> None:
        # `count` is of whole blocks: `written` are the tokens that there are.
        (keys, values, scales), (d_head, d_value) = near, sizes
        packed, scores, sums = parts
        again = 0
        while True:
            multiply(keys, d_head // per_word, count, packed, scores, scales)
            if cap > 0:
                bounded, inverse = floats(scores), np.float32(1) / cap
                for i in range(count * vectors * LANES):
                    bounded[i] = cap * tanh(bounded[i] * inverse)
            if hides:
                mask(scores, token, count, state)
            if not soften(scores, count, state, scales + 4 * CHUNK, again):
                break
            again = 1
        gather(values, d_value, (written + per_word - 1) // per_word, scores, sums, state)

    return chunk


def _finish() -> Any:
    """Sums of values over sums of weights, put where the heads belong."""
    exchange = transpose()

    @register_jitable
    def finish(
        which: tuple[int, int, int, int, int],
        sizes: tuple[int, int],
        out: tuple[int, int, int],
        vectors: int,
        state: int,
        sums: int,
        stage: int,
    ) -> None:
        row, member, count, group, _ = which
        (_, d_value), (heads, stride, width) = sizes, out
        step = _VECTOR * vectors
        totals, staged = floats(state + SUM * step), floats(stage)
        for i in range(count):
            if i % LANES == 0:
                part = sums + i // LANES * _VECTOR
                for column in range(0, d_value, LANES):
                    exchange(part + column * step, step, stage + 4 * column, 4 * d_value)
            lane = i % LANES * d_value
            inverse = np.float32(1) / totals[i]
            to = floats(heads + row * stride + member * width * 4)
            for j in range(width):
                to[j] = staged[lane + j] * inverse
            member += 1
            if member == group:
                row, member = row + 1, 0

    return finish


@register_jitable
def _text_end(row: int, keys: int, rows: int) -> int:
    """The first row after `row` that is of another text."""
    last = row + 1
    while last < rows and word(keys + 8 * last) == word(keys + 8 * row):
        last += 1
    return last
