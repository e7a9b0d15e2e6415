"""Attention of many queries over the cache, as products of matrices on blocks that stay in cache.

Queries of one text and one head of keys are taken some vectors at a time, a lane each, and meet
some keys at a time: scores (keys, queries), softmax down the columns, then values (d_v, queries).
All that softmax by parts keeps is a vector of lanes, and the keys and values are read as the cache
has them (`block_products.py`). Source: Dao et al. 2022, §3.1.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.cache_formats import CacheFormat
from armillary.engine.emit import F32, I16, I32, I64, Emit, emitted
from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels import amx
from armillary.engine.kernels.block_products import gather_with, ready_with, score_with
from armillary.engine.kernels.common import floats, whole_numbers, word
from armillary.engine.kernels.elementary import tanh
from armillary.engine.kernels.tile import (
    SUMS,
    WORDS,
    add_halves,
    cut_together,
    interleave,
    lay,
    transpose,
)
from armillary.engine.kv_layout import BLOCK, CHUNK
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES, multiplied_by_amx, query_vectors

_MASKED = np.float32(-1e30)
_LOWEST = np.float32(-1e20)
"""Where the largest score begins: so far above a masked one that 2^(masked − lowest) is 0."""
_TOO_LARGE = np.float32(2**40)
"""Sum of a chunk's weights at which m moves: far from what float32 has no room for."""
_STATE, _FOUND = 6, 5
"""Vectors that are kept of a block of queries, and which of them has the sums of a chunk."""
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
        # Of each block its queries, their sums, and of each query: m, the sum of weights,
        # 2^(m before − m); the tokens that it reads; the sum in a chunk.
        of_queries, of_sums = wide_d // per_word * step, d_value * step
        own = _STATE * step + of_queries + of_sums
        scores = scratch + blocks * own
        stage = scores + CHUNK * step
        area = stage + max(_VECTOR * max(wide_d, d_value), 2 * CHUNK * (d_head + d_value + 4))
        for block in range(blocks):
            state = scratch + block * own
            packed = state + _STATE * step
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
                packed = state + _STATE * step
                parts = packed, scores, packed + of_queries
                if vectors == most:
                    chunk_many(near, token, there, written, sizes, cap, hides, state, parts)
                else:
                    chunk_few(near, token, there, written, sizes, cap, hides, state, parts)
            token += CHUNK
        for block in range(blocks):
            state = scratch + block * own
            sums = state + _STATE * step + of_queries
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
        lows, ends = whole_numbers(state + 3 * step), whole_numbers(state + 4 * step)
        kept, staged = floats(state), floats(stage)
        for i in range(vectors * LANES):
            lane, filled = i % LANES * wide_d, 0
            ends[i], lows[i] = 0, 0
            kept[i] = _LOWEST if i < count else np.float32(0)
            kept[vectors * LANES + i] = np.float32(0)
            if i < count:
                ends[i] = word(lengths + 8 * row)
                lows[i] = max(0, ends[i] - window) if window else 0
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

    return begin


def _chunk(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Queries meet the keys and values of a chunk."""
    soften, mask = _soften(form, machine, vectors), _mask(vectors)
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
                mask(scores, token, count, state + 3 * _VECTOR * vectors)
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

    They take the scores' place, and are none where 1 comes back: then it has to be done `again`.

    `state` holds vectors of m, of the sums of weights, of 2^(m before − m), and last of the sums in
    this chunk. m is the largest score of the first chunk that a query reads, and of a later one
    only where that is so far above that its sum grows too large: most look for no largest.
    """
    raise_, weigh = _raise(machine, vectors), _weigh(form, machine, vectors)

    @emitted(types.int64)
    def begin(e: Emit, state: ir.Value) -> ir.Value:
        """Whether some query has read nothing yet."""
        step = vectors * _VECTOR
        found = []
        for one in range(vectors):
            at = e.add(state, one * _VECTOR)
            e.store(e.constant(1.0, SUMS), at, 2 * step)
            e.store(e.constant(0.0, SUMS), at, _FOUND * step)
            found.append(_starts(e, e.load(SUMS, at)))
        return _any(e, found)

    @register_jitable
    def soften(scores: int, count: int, state: int, scales: int, again: int) -> int:
        if again or begin(state):
            raise_(scores, count, state)
        found: int = weigh(scores, count, state, scales)
        return found

    return soften


def _raise(machine: Machine, vectors: int) -> Any:
    """Let m be the largest score of queries that have read nothing yet, or found too much."""
    powers = _powers_of_two(6)

    @emitted(types.void)
    def raise_(e: Emit, scores: ir.Value, count: ir.Value, state: ir.Value) -> None:
        b, step = e.builder, vectors * _VECTOR
        most = [e.variable(e.constant(float(_LOWEST), SUMS)) for _ in range(vectors)]
        with e.loop(count) as index:
            at = e.add(scores, e.mul(index, step))
            for one, largest in enumerate(most):
                score = e.load(SUMS, at, one * _VECTOR)
                larger = b.fcmp_ordered(">", score, largest.get())
                largest.set(b.select(larger, score, largest.get()))
        for one, largest in enumerate(most):
            at = e.add(state, one * _VECTOR)
            before, shrink = e.load(SUMS, at), e.load(SUMS, at, 2 * step)
            moves = b.or_(_starts(e, before), _too_large(e, e.load(SUMS, at, _FOUND * step)))
            now = b.select(moves, largest.get(), before)
            power = _power(e, machine, b.fsub(before, now), powers)
            e.store(now, at)
            e.store(b.fmul(shrink, power), at, 2 * step)

    return raise_


def _weigh(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Weights and their sums, as m is; 1 where a sum is so large that m has to move first."""
    # Numbers that are cut to bfloat16 are to nearest where half of its last place was added, which
    # for all of [1, 2) is the same. The sums are of what was cut.
    cut = form.tiles == "BF16" and not form.staged
    powers = _powers_of_two(3 if form.tiles == "BF16" else 6)
    if cut:
        powers[0] += 2.0**-8

    @emitted(types.int64)
    def weigh(
        e: Emit,
        scores: ir.Value,
        count: ir.Value,
        state: ir.Value,
        scales: ir.Value,
    ) -> ir.Value:
        b = e.builder
        step = vectors * _VECTOR
        each = range(vectors)
        now = [e.load(SUMS, state, one * _VECTOR) for one in each]
        totals = [e.variable(e.constant(0.0, SUMS)) for _ in each]
        with e.loop(e.div(count, 2)) as pair:
            at = e.add(scores, e.mul(pair, 2 * step))
            to = e.add(scores, e.mul(pair, 2 * step if form.tiles == "F32" else step))
            of_pair = e.add(scales, e.mul(pair, 8))
            for one in each:
                two = []
                for half in (0, 1):
                    score = e.load(SUMS, at, half * step + one * _VECTOR)
                    two.append(_power(e, machine, b.fsub(score, now[one]), powers))
                if cut:
                    words = cut_together(e, *two)
                    e.store(words, to, one * _VECTOR)
                    add_halves(e, machine, words, totals[one])
                    continue
                totals[one].set(e.fadd(totals[one].get(), e.fadd(*two)))
                if form.staged:
                    by = [e.splat(e.load(F32, of_pair, 4 * half), LANES) for half in (0, 1)]
                    two = [b.fmul(*each_two) for each_two in zip(two, by, strict=True)]
                if form.tiles == "F32":
                    for half in (0, 1):
                        e.store(two[half], to, half * step + one * _VECTOR)
                else:
                    e.store(interleave(e, machine, *two), to, one * _VECTOR)
        found = _any(e, [_too_large(e, total.get()) for total in totals])
        with b.if_else(b.icmp_signed("!=", found, e.int(0))) as (again, fine):
            with again:
                for one, total in enumerate(totals):
                    e.store(total.get(), state, _FOUND * step + one * _VECTOR)
            with fine:
                for one, total in enumerate(totals):
                    before = e.load(SUMS, state, step + one * _VECTOR)
                    shrink = e.load(SUMS, state, 2 * step + one * _VECTOR)
                    e.store(e.fma(before, shrink, total.get()), state, step + one * _VECTOR)
        return found

    return weigh


def _starts(e: Emit, most: ir.Value) -> ir.Value:
    """Where queries have read nothing yet."""
    return e.builder.fcmp_ordered("==", most, e.constant(float(_LOWEST), SUMS))


def _too_large(e: Emit, sums: ir.Value) -> ir.Value:
    """Where weights add up to more than scores that m is near would."""
    return e.builder.fcmp_ordered(">", sums, e.constant(float(_TOO_LARGE), SUMS))


def _any(e: Emit, each: Sequence[ir.Value]) -> ir.Value:
    """1 where some lane of some vector is true, else 0."""
    b = e.builder
    bits = b.bitcast(functools.reduce(b.or_, each), I16)
    return b.zext(b.icmp_signed("!=", bits, ir.Constant(I16, 0)), I64)


def _powers_of_two(degree: int) -> list[float]:
    """Coefficients of 2^r for 0 ≤ r ≤ 1, at Chebyshev's points."""
    from numpy.polynomial import Chebyshev, Polynomial

    near = Chebyshev.interpolate(np.exp2, degree, domain=[0, 1])
    return [float(each) for each in near.convert(kind=Polynomial).coef]


def _power(e: Emit, machine: Machine, x: ir.Value, powers: Sequence[float]) -> ir.Value:
    """2^x, and for x below −126 nothing, or next to it; infinite, or large, above 126."""
    b = e.builder
    if not machine.wide:
        x = _within(e, x)
    whole = e.call(f"llvm.floor.v{LANES}f32", SUMS, [x])
    r = b.fsub(x, whole)
    p = e.constant(powers[-1], SUMS)
    for coefficient in reversed(powers[:-1]):
        p = e.fma(p, r, e.constant(coefficient, SUMS))
    if machine.wide:
        # Without a mask, rounding as always.
        more = [e.constant(0.0, SUMS), ir.Constant(I16, -1), ir.Constant(I32, 4)]
        return e.call("llvm.x86.avx512.mask.scalef.ps.512", SUMS, [p, x, *more])
    shift = b.shl(b.fptosi(whole, WORDS), e.constant(23, WORDS))
    return b.bitcast(b.add(b.bitcast(p, WORDS), shift), SUMS)


def _within(e: Emit, x: ir.Value) -> ir.Value:
    """x, or the bound that it is beyond."""
    b = e.builder
    low, high = e.constant(-126.0, SUMS), e.constant(126.0, SUMS)
    x = b.select(b.fcmp_ordered(">", x, low), x, low)
    return b.select(b.fcmp_ordered("<", x, high), x, high)
