"""Softmax by parts, of scores (keys, queries) in memory: down the columns, a query in each lane.

What is kept of some vectors of queries is STATE vectors for each of them: m, where scores are
measured from; the sum of weights 2^(score − m); 2^(m before − m), by which earlier sums shrink; the
tokens that a query reads, from the first to before the last; and the sum in a chunk. m is the
largest score of the first chunk that a query reads, and of a later one only where that is so far
above that its sum grows too large: most chunks look for no largest. Source: Dao et al. 2022, §3.1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.cache_formats import CacheFormat
from armillary.engine.emit import F32, I16, I32, Emit, emitted
from armillary.engine.kernels.tile import (
    SUMS,
    WORDS,
    add_halves,
    cut_together,
    interleave,
    some_lane,
)
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES

STATE = 6
"""Vectors that are kept of a vector of queries."""
SUM, SHRINK, FIRST, END, _FOUND = 1, 2, 3, 4, 5
"""Which of them has what, behind m."""
LOWEST = np.float32(-1e20)
"""Where m begins: so far above a masked score that 2^(masked − m) is 0."""
_MASKED = np.float32(-1e30)
_TOO_LARGE = np.float32(2**40)
"""Sum of a chunk's weights at which m moves: far from what float32 has no room for."""
_VECTOR = 4 * LANES
"""Bytes of a vector."""


def mask_with(vectors: int) -> Any:
    """Scores of tokens that a query does not read: before its window, or after itself."""

    @emitted(types.void)
    def mask(e: Emit, scores: ir.Value, token: ir.Value, count: ir.Value, state: ir.Value) -> None:
        b = e.builder
        lows, ends = (
            [e.load(WORDS, state, (which * vectors + one) * _VECTOR) for one in range(vectors)]
            for which in (FIRST, END)
        )
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


def soften_with(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Scores of a chunk → weights 2^(score − m), as words of tokens that follow each other.

    They take the scores' place, and are none where 1 comes back: then it has to be done `again`.
    """
    raise_, weigh = _raise(machine, vectors), _weigh(form, machine, vectors)

    @emitted(types.int64)
    def begin(e: Emit, state: ir.Value) -> ir.Value:
        """Whether some query has read nothing yet."""
        step = vectors * _VECTOR
        found = []
        for one in range(vectors):
            at = e.add(state, one * _VECTOR)
            e.store(e.constant(1.0, SUMS), at, SHRINK * step)
            e.store(e.constant(0.0, SUMS), at, _FOUND * step)
            found.append(_starts(e, e.load(SUMS, at)))
        return some_lane(e, found)

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
        most = [e.variable(e.constant(float(LOWEST), SUMS)) for _ in range(vectors)]
        with e.loop(count) as index:
            at = e.add(scores, e.mul(index, step))
            for one, largest in enumerate(most):
                score = e.load(SUMS, at, one * _VECTOR)
                larger = b.fcmp_ordered(">", score, largest.get())
                largest.set(b.select(larger, score, largest.get()))
        for one, largest in enumerate(most):
            at = e.add(state, one * _VECTOR)
            before, shrink = e.load(SUMS, at), e.load(SUMS, at, SHRINK * step)
            moves = b.or_(_starts(e, before), _too_large(e, e.load(SUMS, at, _FOUND * step)))
            now = b.select(moves, largest.get(), before)
            power = _power(e, machine, b.fsub(before, now), powers)
            e.store(now, at)
            e.store(b.fmul(shrink, power), at, SHRINK * step)

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
        found = some_lane(e, [_too_large(e, total.get()) for total in totals])
        with b.if_else(b.icmp_signed("!=", found, e.int(0))) as (again, fine):
            with again:
                for one, total in enumerate(totals):
                    e.store(total.get(), state, _FOUND * step + one * _VECTOR)
            with fine:
                for one, total in enumerate(totals):
                    before = e.load(SUMS, state, SUM * step + one * _VECTOR)
                    shrink = e.load(SUMS, state, SHRINK * step + one * _VECTOR)
                    e.store(e.fma(before, shrink, total.get()), state, SUM * step + one * _VECTOR)
        return found

    return weigh


def _starts(e: Emit, most: ir.Value) -> ir.Value:
    """Where queries have read nothing yet."""
    return e.builder.fcmp_ordered("==", most, e.constant(float(LOWEST), SUMS))


def _too_large(e: Emit, sums: ir.Value) -> ir.Value:
    """Where weights add up to more than scores that m is near would."""
    return e.builder.fcmp_ordered(">", sums, e.constant(float(_TOO_LARGE), SUMS))


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
