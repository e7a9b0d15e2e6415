"""Attention of many queries over the cache, as products of matrices on blocks that stay in cache.

Queries of one text and one head of keys are taken some vectors at a time, a lane each, and meet
CHUNK keys at a time: scores (keys, queries), softmax down the columns, then values (d_v, queries).
All that softmax by parts keeps is a vector of lanes, and the keys and values are read as the cache
has them, a word to all lanes. Source: Dao et al. 2022, §3.1.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.cache_formats import CacheFormat
from armillary.engine.emit import F32, I16, I32, Emit, emitted
from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels import amx
from armillary.engine.kernels.common import (
    floats,
    whole_numbers,
    word,
)
from armillary.engine.kernels.elementary import tanh
from armillary.engine.kernels.tile import SUMS, WORDS, interleave, lay, tile, transpose
from armillary.engine.kv_layout import BLOCK, CHUNK
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES, tile_rows, tile_vectors

_MASKED = np.float32(-1e30)
_LOWEST = np.float32(-1e20)
"""Where the largest score begins: so far above a masked one that 2^(masked − lowest) is 0."""
_LOG2E = np.float32(math.log2(math.e))
_VECTOR = 4 * LANES
"""Bytes of a vector."""


def block_attention(form: CacheFormat, machine: Machine) -> Kernel:
    """Queries (R, h·d_h), turned, over the cache → heads side by side, (R, h·width).

    Rows that follow each other in one text are taken together.
    """
    attend = _attend(form, machine)
    prepare, leave = amx.around(by_amx(form, machine))
    queries = LANES * tile_vectors(machine)
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
        scratch: Address,
        scratch_bytes: Size,
        rows: Live,
    ) -> None:
        # For each row: where its keys and values lie, for how many tokens there is room, and how
        # many it reads. Blocks of queries go to the threads in turns, and back again, since later
        # ones read more.
        mine = scratch + thread * scratch_bytes
        # In base 2, so that a power of two is all that is to be computed of a score.
        cap_2, scale_2 = cap * _LOG2E, scale * _LOG2E
        row, owner, turn = 0, 0, 1
        prepare(0)
        while row < rows:
            last, capacity = _text_end(row, keys, rows), word(capacities + 8 * row)
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


def by_amx(form: CacheFormat, machine: Machine) -> bool:
    """Whether its products are AMX's."""
    return machine.bf16_tiles and form.tiles == "BF16"


def _attend(form: CacheFormat, machine: Machine) -> Any:
    """Queries of one text and head: from one of the group of a row on, then of the rows after it.

    Its tuples are (first row, which of its group, count of queries, group, lengths of the rows),
    (d_h, d_v), (rows of queries, stride, factor, sinks of the group or 0), (rows of results,
    stride, width of a head's).
    """
    most = tile_vectors(machine)
    # For as many queries as meet at once, and for a few.
    chunk_many, chunk_few = _chunk(form, machine, most), _chunk(form, machine, 1)
    begin, finish = _begin(form, machine), _finish()
    size, scale_bytes, staged = form.size, form.scale_bytes, form.staged
    per_word, bring = form.per_word, _stage(form)

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
        row, _, count, _, lengths = which
        d_head, d_value = sizes
        vectors = most if count > LANES else 1
        step = _VECTOR * vectors
        wide_d = (d_head + 2 * LANES - 1) // (2 * LANES) * 2 * LANES
        # Of each query: m, the sum of weights, 2^(m before − m); the tokens that it reads.
        state = scratch
        limits = state + 3 * step
        packed = limits + 2 * step
        scores = packed + wide_d // per_word * step
        weights = scores + CHUNK * step
        sums = weights + CHUNK // per_word * step
        stage = sums + d_value * step
        near_k = stage + LANES * 4 * max(wide_d, d_value)
        near_v = near_k + CHUNK * 2 * d_head
        scales = near_v + CHUNK * 2 * d_value
        turned = scales + CHUNK * 8
        longest = begin(which, d_head, wide_d, q, window, vectors, state, packed, stage)
        added = floats(sums)
        for i in range(d_value * vectors * LANES):
            added[i] = np.float32(0)
        shortest = word(lengths + 8 * row)
        token = max(0, shortest - window) // CHUNK * CHUNK if window else 0
        highest = max(0, longest - window) if window else 0
        while token < longest:
            written = min(CHUNK, longest - token)
            there = (written + BLOCK - 1) // BLOCK * BLOCK
            hides = token < highest or token + there > shortest
            at_k = k + token * (d_head * size + scale_bytes)
            at_v = v + token * (d_value * size + scale_bytes)
            if staged:
                bring(at_k, written, d_head, near_k, scales)
                bring(at_v, written, d_value, near_v, scales + 4 * CHUNK)
                at_k, at_v = near_k, near_v
            near = at_k, at_v, scales, turned
            parts = packed, scores, weights, sums
            if vectors == most:
                chunk_many(near, token, there, written, sizes, cap, hides, state, parts)
            else:
                chunk_few(near, token, there, written, sizes, cap, hides, state, parts)
            token += CHUNK
        finish(which, sizes, out, vectors, state, sums, stage)

    return attend


def _stage(form: CacheFormat) -> Any:
    """Keys or values of a chunk as tiles read them, and their scales."""

    @emitted(types.void)
    def bring(
        e: Emit,
        numbers: ir.Value,
        written: ir.Value,
        width: ir.Value,
        to: ir.Value,
        scales_to: ir.Value,
    ) -> None:
        form.stage(e, numbers, written, width, to, scales_to)

    return bring


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
    ) -> int:
        # Returns how many tokens the last query reads.
        row, member, count, group, lengths = which
        rows, stride, scale, sinks = q
        step = _VECTOR * vectors
        lows, ends = whole_numbers(state + 3 * step), whole_numbers(state + 4 * step)
        kept, staged = floats(state), floats(stage)
        longest = 0
        for i in range(vectors * LANES):
            lane, filled = i % LANES * wide_d, 0
            ends[i], lows[i] = 0, 0
            kept[i] = _LOWEST
            kept[vectors * LANES + i] = np.float32(0)
            if i < count:
                longest = word(lengths + 8 * row)
                ends[i] = longest
                lows[i] = max(0, longest - window) if window else 0
                if sinks:
                    # As of a token that was read before, and had no value.
                    kept[i] = floats(sinks)[member] * _LOG2E
                    kept[vectors * LANES + i] = np.float32(1)
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
        return longest

    return begin


def _chunk(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Queries meet the keys and values of a chunk."""
    soften, mask = _soften(form, machine, vectors), _mask(vectors)
    if by_amx(form, machine):
        multiply, gather = _scores_by_amx(form, vectors), _gather_by_amx(vectors)
    else:
        multiply, gather = _scores(form, machine, vectors), _gather(form, machine, vectors)
    per_word = form.per_word

    @register_jitable
    def chunk(
        near: tuple[int, int, int, int],
        token: int,
        count: int,
        written: int,
        sizes: tuple[int, int],
        cap: float,
        hides: bool,
        state: int,
        parts: tuple[int, int, int, int],
    ) -> None:
        # `count` is of whole blocks: `written` are the tokens that there are.
        (keys, values, scales, turned), (d_head, d_value) = near, sizes
        packed, scores, weights, sums = parts
        multiply(keys, d_head // per_word, count, packed, scores, scales, turned)
        if cap > 0:
            bounded, inverse = floats(scores), np.float32(1) / cap
            for i in range(count * vectors * LANES):
                bounded[i] = cap * tanh(bounded[i] * inverse)
        if hides:
            mask(scores, token, count, state + 3 * _VECTOR * vectors)
        soften(scores, count, weights, state, scales + 4 * CHUNK)
        words = (written + per_word - 1) // per_word
        gather(values, d_value, words, weights, sums, state, turned)

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
        totals, staged = floats(state + step), floats(stage)
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


def _scores(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Keys, `count` of them, times queries: (count, vectors · 16)."""
    at_once = tile_rows(machine)

    @emitted(types.void)
    def scores(
        e: Emit,
        keys: ir.Value,
        d_words: ir.Value,
        count: ir.Value,
        q: ir.Value,
        out: ir.Value,
        scales: ir.Value,
        _turned: ir.Value,
    ) -> None:
        step, parts = _VECTOR * vectors, BLOCK // at_once
        with e.loop(e.div(count, at_once)) as part:
            block = e.div(part, parts)
            lane = e.mul(e.sub(part, e.mul(block, parts)), at_once)
            first = e.add(e.mul(e.mul(block, d_words), _VECTOR), e.mul(lane, 4))
            near = e.add(keys, first)
            to = e.add(out, e.mul(part, at_once * step))
            rows = [e.add(near, 4 * each) for each in range(at_once)]

            def finish(row: int, sums: list[ir.Value]) -> None:
                if form.staged:
                    number = e.load(F32, e.add(scales, e.mul(part, 4 * at_once)), 4 * row)
                    scale = e.splat(number, LANES)
                    sums = [e.builder.fmul(total, scale) for total in sums]
                for one, total in enumerate(sums):
                    e.store(total, to, row * step + one * _VECTOR)

            tile(e, machine, form.tiles, rows, _VECTOR, q, step, d_words, vectors, finish)

    return scores


def _mask(vectors: int) -> Any:
    """Scores of tokens that a query does not read: before its window, or after itself."""

    @emitted(types.void)
    def mask(e: Emit, scores: ir.Value, token: ir.Value, count: ir.Value, limits: ir.Value) -> None:
        b = e.builder
        both = [e.load(WORDS, limits, one * _VECTOR) for one in range(2 * vectors)]
        lows, ends = both[:vectors], both[vectors:]
        hidden = e.constant(float(_MASKED), SUMS)
        with e.loop(count) as index:
            here = e.splat(b.trunc(e.add(token, index), I32), LANES)
            at = e.add(scores, e.mul(index, vectors * _VECTOR))
            for one in range(vectors):
                after = b.icmp_signed(">=", here, lows[one])
                before = b.icmp_signed("<", here, ends[one])
                score = e.load(SUMS, at, one * _VECTOR)
                e.store(b.select(b.and_(after, before), score, hidden), at, one * _VECTOR)

    return mask


def _soften(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Scores of a chunk → weights 2^(score − m), as words of tokens that follow each other.

    `state` holds vectors of m, of the sums of weights, and of 2^(m before − m).
    """
    # Weights that are rounded to bfloat16 need no better.
    powers = _powers_of_two(4 if form.tiles == "BF16" else 7)

    @emitted(types.void)
    def soften(
        e: Emit,
        scores: ir.Value,
        count: ir.Value,
        weights: ir.Value,
        state: ir.Value,
        scales: ir.Value,
    ) -> None:
        b = e.builder
        step = vectors * _VECTOR
        each = range(vectors)
        before = [e.load(SUMS, state, one * _VECTOR) for one in each]
        most = [e.variable(value) for value in before]
        with e.loop(count) as index:
            at = e.add(scores, e.mul(index, step))
            for one in each:
                score = e.load(SUMS, at, one * _VECTOR)
                larger = b.fcmp_ordered(">", score, most[one].get())
                most[one].set(b.select(larger, score, most[one].get()))
        now = [value.get() for value in most]
        totals = []
        for one in each:
            shrink = _power(e, machine, b.fsub(before[one], now[one]), powers)
            e.store(now[one], state, one * _VECTOR)
            e.store(shrink, state, 2 * step + one * _VECTOR)
            total = e.load(SUMS, state, step + one * _VECTOR)
            totals.append(e.variable(b.fmul(total, shrink)))
        with e.loop(e.div(count, 2)) as pair:
            at = e.add(scores, e.mul(pair, 2 * step))
            to = e.add(weights, e.mul(pair, 2 * step if form.tiles == "F32" else step))
            of_pair = e.add(scales, e.mul(pair, 8))
            for one in each:
                two = []
                for half in (0, 1):
                    score = e.load(SUMS, at, half * step + one * _VECTOR)
                    two.append(_power(e, machine, b.fsub(score, now[one]), powers))
                totals[one].set(e.fadd(totals[one].get(), e.fadd(*two)))
                if form.staged:
                    by = [e.splat(e.load(F32, of_pair, 4 * half), LANES) for half in (0, 1)]
                    two = [b.fmul(*each_two) for each_two in zip(two, by, strict=True)]
                if form.tiles == "F32":
                    for half in (0, 1):
                        e.store(two[half], to, half * step + one * _VECTOR)
                else:
                    e.store(interleave(e, machine, *two), to, one * _VECTOR)
        for one in each:
            e.store(totals[one].get(), state, step + one * _VECTOR)

    return soften


def _gather(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Values of `count` words of tokens times weights, added to sums (d_v, vectors · 16)."""
    at_once = tile_rows(machine)

    @emitted(types.void)
    def gather(
        e: Emit,
        values: ir.Value,
        d_value: ir.Value,
        count: ir.Value,
        weights: ir.Value,
        sums: ir.Value,
        state: ir.Value,
        _turned: ir.Value,
    ) -> None:
        step = vectors * _VECTOR
        shrink = [e.load(SUMS, state, 2 * step + one * _VECTOR) for one in range(vectors)]
        with e.loop(e.div(d_value, at_once)) as part:
            first = e.add(values, e.mul(part, 4 * at_once))
            to = e.add(sums, e.mul(part, at_once * step))
            rows = [e.add(first, 4 * lane) for lane in range(at_once)]

            def finish(row: int, found: list[ir.Value]) -> None:
                for one, total in enumerate(found):
                    place = row * step + one * _VECTOR
                    e.store(e.fma(e.load(SUMS, to, place), shrink[one], total), to, place)

            apart = e.mul(d_value, 4)
            tile(e, machine, form.tiles, rows, apart, weights, step, count, vectors, finish)

    return gather


def _scores_by_amx(form: CacheFormat, vectors: int) -> Any:
    """The same by AMX: a block of keys is turned, a key in a row."""
    turn, tiles, step, staged = amx.turn(), amx.Block(1, vectors), _VECTOR * vectors, form.staged

    @emitted(types.void)
    def meet(
        e: Emit,
        keys: ir.Value,
        stride: ir.Value,
        q: ir.Value,
        d_words: ir.Value,
        out: ir.Value,
        scales: ir.Value,
    ) -> None:
        tiles.clear(e)
        tiles.add(e, keys, stride, q, d_words)
        tiles.store(e, tiles.places(e, out, e.int(step)), e.int(step))
        if not staged:
            return
        with e.loop(BLOCK) as row:
            scale = e.splat(e.load(F32, e.add(scales, e.mul(row, 4))), LANES)
            line = e.add(out, e.mul(row, step))
            for one in range(vectors):
                score = e.load(SUMS, line, one * _VECTOR)
                e.store(e.builder.fmul(score, scale), line, one * _VECTOR)

    @register_jitable
    def scores(
        keys: int, d_words: int, count: int, q: int, out: int, scales: int, turned: int
    ) -> None:
        stride = (d_words + LANES - 1) // LANES * _VECTOR
        for block in range(count // BLOCK):
            near = keys + block * d_words * _VECTOR
            for first in range(0, d_words, LANES):
                left = d_words - first
                turn(near + first * _VECTOR, _VECTOR, left, turned + first * 4, stride)
            at = out + block * BLOCK * step
            meet(turned, stride, q, d_words, at, scales + block * BLOCK * 4)

    return scores


def _gather_by_amx(vectors: int) -> Any:
    """The same by AMX: 16 columns of values at a time are turned, the tokens in a row."""
    turn, tiles, step = amx.turn(), amx.Block(1, vectors), _VECTOR * vectors
    stride = CHUNK * 2

    @emitted(types.void)
    def meet(
        e: Emit,
        values: ir.Value,
        weights: ir.Value,
        count: ir.Value,
        sums: ir.Value,
        state: ir.Value,
    ) -> None:
        shrink = [e.load(SUMS, state, 2 * step + one * _VECTOR) for one in range(vectors)]
        with e.loop(LANES) as row:
            line = e.add(sums, e.mul(row, step))
            for one, by in enumerate(shrink):
                total = e.load(SUMS, line, one * _VECTOR)
                e.store(e.builder.fmul(total, by), line, one * _VECTOR)
        places = tiles.places(e, sums, e.int(step))
        tiles.begin_as(e, places, step)
        tiles.add(e, values, e.int(stride), weights, count)
        tiles.store(e, places, e.int(step))

    @register_jitable
    def gather(
        values: int, d_value: int, count: int, weights: int, sums: int, state: int, turned: int
    ) -> None:
        # Of words that no token has, rows and columns are zeros.
        whole = (count + LANES - 1) // LANES * LANES
        nothing = floats(weights + count * step)
        for i in range((whole - count) * vectors * LANES):
            nothing[i] = np.float32(0)
        for column in range(0, d_value, LANES):
            for first in range(0, count, LANES):
                near = values + first * 4 * d_value + 4 * column
                turn(near, 4 * d_value, count - first, turned + first * 4, stride)
            meet(turned, weights, count, sums + column * step, state)

    return gather


def _powers_of_two(degree: int) -> list[float]:
    """Coefficients of 2^r for |r| ≤ ½, at Chebyshev's points."""
    from numpy.polynomial import Chebyshev, Polynomial

    near = Chebyshev.interpolate(np.exp2, degree, domain=[-0.5, 0.5])
    return [float(each) for each in near.convert(kind=Polynomial).coef]


def _power(e: Emit, machine: Machine, x: ir.Value, powers: Sequence[float]) -> ir.Value:
    """2^x for x ≤ 0; 0, or next to it, where x is below −126."""
    b = e.builder
    if not machine.wide:
        lowest = e.constant(-126.0, SUMS)
        x = b.select(b.fcmp_ordered(">", x, lowest), x, lowest)
    whole = e.call(f"llvm.rint.v{LANES}f32", SUMS, [x])
    r = b.fsub(x, whole)
    p = e.constant(powers[-1], SUMS)
    for coefficient in reversed(powers[:-1]):
        p = e.fma(p, r, e.constant(coefficient, SUMS))
    if machine.wide:
        # Without a mask, rounding as always.
        more = [e.constant(0.0, SUMS), ir.Constant(I16, -1), ir.Constant(I32, 4)]
        return e.call("llvm.x86.avx512.mask.scalef.ps.512", SUMS, [p, whole, *more])
    shift = b.shl(b.fptosi(whole, WORDS), e.constant(23, WORDS))
    return b.bitcast(b.add(b.bitcast(p, WORDS), shift), SUMS)
