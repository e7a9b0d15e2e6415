"""The program for many rows: as `engine/plan.py`, with products and attention in tiles.

The head is a program of its own, since logits are wanted of few of the rows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from armillary.config import AttentionConfig, DecoderConfig, MixtureConfig
from armillary.engine.buffers import Buffer, Slots
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.formats import ROWS
from armillary.engine.kv_layout import Kept, Stored, value_width
from armillary.engine.library import Library
from armillary.engine.machine import host
from armillary.engine.plan import Plan
from armillary.engine.program import aligned
from armillary.engine.threads import Team
from armillary.engine.tiling import attention_bytes, multiplied_as, panel_bytes, query_blocks
from armillary.engine.weights import Matrix, Stack, Weights

MANY_ROWS = 512
"""Rows of a pass at most."""

_HEAD_ROWS = 128
"""Rows that are projected to the vocabulary together at most."""


class _Tiled(Plan):
    """Steps for many rows, all shared out among the threads."""

    alone = False

    def _prepare(self) -> None:
        self._scratch_bytes = max(
            panel_bytes(_widest(self.config)),
            *(
                attention_bytes(kept.key, value_width(kept.value), self._blocks(kept))
                for kept in {Kept.of(layer.attention) for layer in self.config.layers}
            ),
        )
        self._scratch = aligned(self._scratch_bytes * self._threads)
        self._panels, self._panel_bytes = self._scratch, self._scratch_bytes

    def _attend(
        self,
        number: int,
        config: AttentionConfig,
        projected: tuple[Buffer, Buffer, Buffer],
        sinks: NDArray[np.float32] | None,
        out: Buffer,
    ) -> None:
        """See Plan."""
        inputs, (q, k, v) = self.inputs, projected
        kept = Kept.of(config)
        self._append(number, kept, k, v)
        self.program.add(
            f"block_attention_{self.stored}",
            wait=True,
            q=q.data,
            q_stride=q.stride,
            **self._sizes(config),
            **self._of_cache(number, config),
            width=kept.value,
            scale=config.score_scale,
            sinks=sinks,
            out=out.data,
            out_stride=out.stride,
            blocks=self._blocks(kept),
            scratch=self._scratch,
            scratch_bytes=self._scratch_bytes,
            rows=inputs.rows,
        )

    def _blocks(self, kept: Kept) -> int:
        tiles = CACHE_FORMATS[self.stored].tiles
        return query_blocks(tiles, host(), kept.key, value_width(kept.value))

    def _multiply(
        self,
        wanted: Sequence[tuple[Matrix | Stack, NDArray[np.float32] | None, Buffer]],
        x: Buffer,
        k: int,
        *,
        wait: bool = True,
        adds: bool = False,
        rows: NDArray[np.int64] | None = None,
        slots: Slots | None = None,
    ) -> None:
        """x times matrices, in the numbers that each matrix's format is multiplied as.

        Those that meet int8 do it as in few rows, to the same bits.
        """
        blocks = [each for each in wanted if each[0].format.activations == "int8"]
        wanted = [each for each in wanted if each[0].format.activations != "int8"]
        if blocks:
            last = wait and not wanted
            super()._multiply(blocks, x, k, wait=last, adds=adds, rows=rows, slots=slots)
        if not wanted:
            return
        name, which = self._which("matmul", rows, slots)
        numbers = [multiplied_as(matrix.format, host()) for matrix, _, _ in wanted]
        narrow = self._shared("narrow", -(-k // 2), slots)
        if "BF16" in numbers:
            self.program.add(
                "narrow",
                wait=True,
                x=x.data,
                x_stride=x.stride,
                k=k,
                out=narrow.data,
                out_stride=narrow.stride,
                rows=which["rows"] if slots is None else slots.rows,
            )
        for number, (matrix, bias, out) in enumerate(wanted):
            from_ = narrow if numbers[number] == "BF16" else x
            self.program.add(
                f"{name}_{matrix.format.name}",
                wait=wait and number == len(wanted) - 1,
                **matrix.arguments(),
                k=k,
                x=from_.data,
                x_stride=from_.stride,
                bias=bias,
                out=out.data,
                out_stride=out.stride,
                adds=int(adds),
                scratch=self._scratch,
                scratch_bytes=self._scratch_bytes,
                **which,
            )


class PrefillPlan(_Tiled):
    """A decoder's program for up to `MANY_ROWS` rows, and the memory that it works in."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, code: Library, threads: int, stored: Stored
    ) -> None:
        super().__init__(config, weights, code, threads, stored, MANY_ROWS)
        self._few: _Head | None = None
        self._many: _Head | None = None

    def _build(self) -> None:
        self._prepare()
        self._x = self._shared("x", self.config.d_model)
        self._embed()
        for number, layer in enumerate(self.config.layers):
            self._layer(number, layer)

    def run(self, team: Team, rows: int, chosen: Sequence[int]) -> NDArray[np.float32]:
        """See Plan."""
        self.inputs.rows[0] = rows
        team.run(self.program)
        if len(chosen) <= ROWS:
            self._few = self._few or _Head(self, self._x, ROWS)
            return self._few.logits(team, chosen)
        self._many = self._many or _TiledHead(self, self._x, _HEAD_ROWS)
        parts = range(0, len(chosen), _HEAD_ROWS)
        return np.concatenate(
            [self._many.logits(team, chosen[first : first + _HEAD_ROWS]) for first in parts]
        )


class _Head(Plan):
    """The last steps alone, of rows that another plan has computed."""

    def __init__(self, plan: PrefillPlan, x: Buffer, rows: int) -> None:
        self._x = x
        super().__init__(plan.config, plan._weights, plan._code, plan._threads, plan.stored, rows)

    def _build(self) -> None:
        self._logits = self._head()

    def logits(self, team: Team, chosen: Sequence[int]) -> NDArray[np.float32]:
        """Those of some rows, (len(chosen), V)."""
        return self.run(team, 0, chosen)


class _TiledHead(_Head, _Tiled):
    """The same for many rows."""

    def _build(self) -> None:
        self._prepare()
        super()._build()


def _widest(config: DecoderConfig) -> int:
    """The longest row of weights."""
    widths = [config.d_model]
    for layer in config.layers:
        attention, whole = layer.attention, layer.feedforward
        widths += [attention.n_heads * attention.d_value, attention.d_head]
        if attention.latent is not None:
            widths += [attention.latent.kv_rank, attention.latent.q_rank or 0]
        parts = [whole.expert, whole.shared] if isinstance(whole, MixtureConfig) else [whole]
        widths += [part.d_ff for part in parts if part is not None]
    return max(widths)
