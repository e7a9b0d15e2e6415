"""Products of blocks of queries with the keys and the values of a chunk of the cache."""

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.cache_formats import CacheFormat
from armillary.engine.emit import F32, I16, Emit, emitted
from armillary.engine.kernels import amx
from armillary.engine.kernels.common import floats
from armillary.engine.kernels.tile import SUMS, tile
from armillary.engine.kv_layout import BLOCK, CHUNK
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES, multiplied_by_amx, tile_rows

_VECTOR = 4 * LANES
"""Bytes of a vector."""
_KEYS = 2 * CHUNK
"""What `keys_together` gives for AMX."""
_ROW_OF_VALUES = 2 * _KEYS
"""Bytes of a column of a chunk's values in bfloat16."""


def ready_with(form: CacheFormat, machine: Machine) -> Any:
    """The keys and values of a chunk, of which `read` tokens are there, as products read them."""
    return _turned(form) if multiplied_by_amx(form.tiles, machine) else _as_they_are


def score_with(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Keys, `count` of them, times queries: (count, vectors · 16)."""
    by_amx = multiplied_by_amx(form.tiles, machine)
    return (_scores_by_amx if by_amx else _scores_by_words)(form, machine, vectors)


def gather_with(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """Values of `count` words of tokens times weights, added to sums (d_v, vectors · 16)."""
    by_amx = multiplied_by_amx(form.tiles, machine)
    return (_gather_by_amx if by_amx else _gather_by_words)(form, machine, vectors)


@register_jitable
def _as_they_are(
    keys: int, values: int, _d_head: int, _d_value: int, _read: int, _turned: int
) -> tuple[int, int]:
    """A word of a row goes to all lanes wherever it lies."""
    return keys, values


def _turned(form: CacheFormat) -> Any:
    """Rows for AMX: a key in each, and behind them a column of values in each.

    What no token has is 0 in the rows of values, whatever the cache holds there.
    """
    turn, per_word = amx.turn(), form.per_word

    @register_jitable
    def turned(
        keys: int, values: int, d_head: int, d_value: int, read: int, to: int
    ) -> tuple[int, int]:
        d_words, words = d_head // per_word, (read + per_word - 1) // per_word
        stride = (d_words + LANES - 1) // LANES * _VECTOR
        for block in range((read + BLOCK - 1) // BLOCK):
            near = keys + block * d_words * _VECTOR
            there = to + block * BLOCK * stride
            for first in range(0, d_words, LANES):
                left = d_words - first
                turn(near + first * _VECTOR, _VECTOR, left, there + first * 4, stride)
        behind = to + _KEYS * stride
        for column in range(0, d_value, LANES):
            for first in range(0, _KEYS // per_word, LANES):
                near = values + first * 4 * d_value + 4 * column
                there = behind + column * _ROW_OF_VALUES + first * 4
                turn(near, 4 * d_value, words - first, there, _ROW_OF_VALUES)
        return to, behind

    return turned


def _scores_by_words(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """A word of a key to all lanes."""
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


def _gather_by_words(form: CacheFormat, machine: Machine, vectors: int) -> Any:
    """A word of a column of values to all lanes."""
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


def _scores_by_amx(form: CacheFormat, _machine: Machine, vectors: int) -> Any:
    """Keys are rows."""
    tiles, step, staged = amx.Block(1, vectors), _VECTOR * vectors, form.staged

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
    def scores(keys: int, d_words: int, count: int, q: int, out: int, scales: int) -> None:
        stride = (d_words + LANES - 1) // LANES * _VECTOR
        for first in range(0, count, BLOCK):
            at, by = out + first * step, scales + first * 4
            meet(keys + first * stride, stride, q, d_words, at, by)

    return scores


def _gather_by_amx(_form: CacheFormat, _machine: Machine, vectors: int) -> Any:
    """Columns of values are rows. Sums shrink where a larger score has come, which is seldom."""
    tiles, step = amx.Block(1, vectors), _VECTOR * vectors

    @emitted(types.void)
    def meet(
        e: Emit,
        values: ir.Value,
        d_value: ir.Value,
        weights: ir.Value,
        count: ir.Value,
        sums: ir.Value,
        state: ir.Value,
    ) -> None:
        b = e.builder
        shrink = [e.load(SUMS, state, 2 * step + one * _VECTOR) for one in range(vectors)]
        ones = e.constant(1.0, SUMS)
        differs = [b.fcmp_ordered("!=", by, ones) for by in shrink]
        any_ = functools.reduce(b.or_, differs)
        some = b.icmp_signed("!=", b.bitcast(any_, I16), ir.Constant(I16, 0))
        with b.if_then(some), e.loop(d_value) as row:
            line = e.add(sums, e.mul(row, step))
            for one, by in enumerate(shrink):
                total = e.load(SUMS, line, one * _VECTOR)
                e.store(b.fmul(total, by), line, one * _VECTOR)
        with e.loop(e.div(d_value, LANES)) as column:
            rows = e.add(values, e.mul(column, LANES * _ROW_OF_VALUES))
            to = e.add(sums, e.mul(column, LANES * step))
            places = tiles.places(e, to, e.int(step))
            tiles.begin_as(e, places, step)
            tiles.add(e, rows, e.int(_ROW_OF_VALUES), weights, count)
            tiles.store(e, places, e.int(step))

    @register_jitable
    def gather(values: int, d_value: int, count: int, weights: int, sums: int, state: int) -> None:
        # Words of tokens that there are not meet zeros.
        whole = (count + LANES - 1) // LANES * LANES
        nothing = floats(weights + count * step)
        for i in range((whole - count) * vectors * LANES):
            nothing[i] = np.float32(0)
        meet(values, d_value, weights, count, sums, state)

    return gather
