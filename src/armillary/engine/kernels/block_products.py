"""Products of blocks of queries with the keys and the values of a chunk of the cache."""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.cache_formats import CacheFormat
from armillary.engine.emit import F32, Emit, emitted
from armillary.engine.kernels import amx
from armillary.engine.kernels.block_softmax import SHRINK
from armillary.engine.kernels.common import floats
from armillary.engine.kernels.tile import SUMS, some_lane, tile
from armillary.engine.kv_layout import BLOCK, CHUNK
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES, multiplied_by_amx, tile_rows

_VECTOR = 4 * LANES
"""Bytes of a vector."""
_ROW_OF_VALUES = 2 * CHUNK
"""Bytes of a column of a chunk's values in bfloat16."""


def ready_with(form: CacheFormat, machine: Machine) -> Any:
    """What brings keys and values of a chunk, of which `read` tokens are there, to an area.

    It says where products find keys, values, and the scales of both, or 0.
    """
    if multiplied_by_amx(form.tiles, machine):
        return _turned(form)
    return _staged(form) if form.staged else _as_they_are


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
    keys: int, values: int, _sizes: tuple[int, int], _read: int, _area: int, _stage: int
) -> tuple[int, int, int]:
    """A word of a row goes to all lanes wherever it lies."""
    return keys, values, 0


def _staged(form: CacheFormat) -> Any:
    """Scales, and behind them numbers that words are made of."""

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

    @register_jitable
    def staged(
        keys: int, values: int, sizes: tuple[int, int], read: int, area: int, _stage: int
    ) -> tuple[int, int, int]:
        to_keys = area + 8 * CHUNK
        to_values = to_keys + 2 * CHUNK * sizes[0]
        bring(keys, read, sizes[0], to_keys, area)
        bring(values, read, sizes[1], to_values, area + 4 * CHUNK)
        return to_keys, to_values, area

    return staged


def _turned(form: CacheFormat) -> Any:
    """Rows for AMX: a key in each, and behind them a column of values in each.

    What no token has is 0 in the rows of values, whatever the cache holds there.
    """
    turn, per_word = amx.turn(), form.per_word
    before = _staged(form) if form.staged else _as_they_are

    @register_jitable
    def turned(
        keys: int, values: int, sizes: tuple[int, int], read: int, area: int, stage: int
    ) -> tuple[int, int, int]:
        keys, values, scales = before(keys, values, sizes, read, stage, 0)
        d_head, d_value = sizes
        d_words, words = d_head // per_word, (read + per_word - 1) // per_word
        stride = (d_words + LANES - 1) // LANES * _VECTOR
        for block in range((read + BLOCK - 1) // BLOCK):
            near = keys + block * d_words * _VECTOR
            there = area + block * BLOCK * stride
            for first in range(0, d_words, LANES):
                left = d_words - first
                turn(near + first * _VECTOR, _VECTOR, left, there + first * 4, stride)
        behind = area + CHUNK * stride
        for column in range(0, d_value, LANES):
            for first in range(0, CHUNK // per_word, LANES):
                near = values + first * 4 * d_value + 4 * column
                there = behind + column * _ROW_OF_VALUES + first * 4
                turn(near, 4 * d_value, words - first, there, _ROW_OF_VALUES)
        return area, behind, scales

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
        shrink = [e.load(SUMS, state, SHRINK * step + one * _VECTOR) for one in range(vectors)]
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
    """Keys are rows, two blocks at a time; what comes of one behind the last is not read."""
    step, rows, staged = _VECTOR * vectors, 2 * BLOCK, form.staged

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
        stride = e.mul(e.div(e.add(d_words, LANES - 1), LANES), _VECTOR)
        sums = _Sums(e, 2, vectors)
        with e.loop(e.div(e.add(count, rows - 1), rows)) as part:
            near, to = (
                e.add(start, e.mul(e.mul(part, rows), apart))
                for start, apart in ((keys, stride), (out, step))
            )
            sums.follow(near, stride, q, d_words, to, adds=False)
        sums.end()
        if not staged:
            return
        with e.loop(count) as row:
            scale = e.splat(e.load(F32, e.add(scales, e.mul(row, 4))), LANES)
            line = e.add(out, e.mul(row, step))
            for one in range(vectors):
                score = e.load(SUMS, line, one * _VECTOR)
                e.store(e.builder.fmul(score, scale), line, one * _VECTOR)

    return scores


def _gather_by_amx(_form: CacheFormat, _machine: Machine, vectors: int) -> Any:
    """Columns of values are rows. Sums shrink where a larger score has come, which is seldom."""
    step = _VECTOR * vectors

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
        shrink = [e.load(SUMS, state, SHRINK * step + one * _VECTOR) for one in range(vectors)]
        ones = e.constant(1.0, SUMS)
        differs = [b.fcmp_ordered("!=", by, ones) for by in shrink]
        some = some_lane(e, differs)
        with b.if_then(b.icmp_signed("!=", some, e.int(0))), e.loop(d_value) as row:
            line = e.add(sums, e.mul(row, step))
            for one, by in enumerate(shrink):
                total = e.load(SUMS, line, one * _VECTOR)
                e.store(b.fmul(total, by), line, one * _VECTOR)
        # Two blocks of columns at a time, and perhaps a last one.
        done: int | ir.Value = 0
        for blocks in (2, 1):
            columns, all_ = blocks * LANES, _Sums(e, blocks, vectors)
            parts = e.div(e.sub(d_value, done), columns)
            with e.loop(parts) as part:
                first = e.add(e.mul(part, columns), done)
                rows, to = (
                    e.add(values, e.mul(first, _ROW_OF_VALUES)),
                    e.add(sums, e.mul(first, step)),
                )
                all_.follow(rows, e.int(_ROW_OF_VALUES), weights, count, to, adds=True)
            all_.end()
            done = e.mul(parts, columns)

    @register_jitable
    def gather(values: int, d_value: int, count: int, weights: int, sums: int, state: int) -> None:
        # Words of tokens that there are not meet zeros.
        whole = (count + LANES - 1) // LANES * LANES
        nothing = floats(weights + count * step)
        for i in range((whole - count) * vectors * LANES):
            nothing[i] = np.float32(0)
        meet(values, d_value, weights, count, sums, state)

    return gather


class _Sums:
    """Sums that AMX makes one after another, each stored where those of the next begin."""

    def __init__(self, e: Emit, blocks: int, vectors: int) -> None:
        self._e, self._vectors = e, vectors
        self._tiles, self._step = amx.Block(blocks, min(2, vectors)), _VECTOR * vectors
        self._before = e.variable(e.int(0))  # where those in the registers belong

    def follow(
        self,
        rows: ir.Value,
        stride: ir.Value,
        columns: ir.Value,
        count: ir.Value,
        out: ir.Value,
        *,
        adds: bool,
    ) -> None:
        """Rows times all vectors of columns; `adds`: to what `out` holds."""
        e, tiles, step = self._e, self._tiles, self._step
        for first in range(0, self._vectors, tiles.vectors):
            before, to = self._before.get(), e.add(out, first * _VECTOR)
            begin = partial(self._begin, before, to if adds else None)
            tiles.add(e, rows, stride, e.add(columns, first * _VECTOR), step, count, begin)
            self._before.set(to)

    def _begin(self, before: ir.Value, start: ir.Value | None, at: amx.At) -> None:
        """Store what is in a register, if anything is, and begin with zeros or what there is."""
        e, step = self._e, self._e.int(self._step)
        with e.builder.if_then(e.builder.icmp_signed("!=", before, e.int(0))):
            self._tiles.store(e, at, before, step)
        if start is None:
            self._tiles.clear(e, at)
        else:
            self._tiles.load(e, at, start, step)

    def end(self) -> None:
        """Store the last ones, if there are any."""
        e, before = self._e, self._before.get()
        with e.builder.if_then(e.builder.icmp_signed("!=", before, e.int(0))):
            for at in self._tiles.sums:
                self._tiles.store(e, at, before, e.int(self._step))
