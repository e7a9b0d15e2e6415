"""A decoder's configuration → the program that computes it: every part by kernels of its own.

A pass takes some tokens, each a row: of one text or of several, at any places. Rows meet only in
attention, where each reads its own text as far as its own place. This plan is for few rows, where
memory sets the pace; `engine/prefill.py` has the one for many.

Norms and the rounding to int8 are so short that each thread does them for itself, rather than wait
for the others' part. Products share out their columns, and elementwise steps after them the same
columns, so that neither waits for the other.

What of a configuration is computed at all stands in `engine/coverage.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)
from armillary.engine.formats import ROWS, int8
from armillary.engine.kv_layout import SCRATCH, SEGMENTS, Stored, value_width
from armillary.engine.library import Library
from armillary.engine.program import Program, aligned
from armillary.engine.threads import Team
from armillary.engine.weights import Matrix, Weights

_LINE = 64


class Buffer:
    """Rows of activations, for all threads together or for each its own.

    A row is an odd count of cache lines, so that rows which are read side by side do not fall on
    the same places of the cache.
    """

    def __init__(self, row_bytes: int, rows: int, threads: int = 0) -> None:
        self.rows = rows
        self.stride = (-(-row_bytes // _LINE) | 1) * _LINE
        self.private = self.stride * rows if threads else 0
        self.data = aligned(self.stride * rows * max(1, threads))

    def floats(self, width: int) -> NDArray[np.float32]:
        """The rows as float32, (R, width)."""
        rows: NDArray[np.float32] = self.data.view(np.float32).reshape(self.rows, -1)[:, :width]
        return rows


@dataclass
class Inputs:
    """What a pass is told: counts, and for each row its token, text and place."""

    rows: NDArray[np.int64]
    outputs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    chosen: NDArray[np.int64]
    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    room: NDArray[np.int64]
    keys: NDArray[np.int64]
    values: NDArray[np.int64]
    cos: list[NDArray[np.float32]] = field(default_factory=list)
    sin: list[NDArray[np.float32]] = field(default_factory=list)
    positions: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, layers: int, count: int) -> "Inputs":
        """Zeros, for so many rows at most."""
        a, b = (np.zeros(1, np.int64) for _ in range(2))
        rows = [np.zeros(count, np.int64) for _ in range(5)]
        many = np.zeros((2, layers, count), np.int64)
        return cls(a, b, rows[0], rows[1], rows[2], rows[3], rows[4], many[0], many[1])


class Plan:
    """The program of a decoder, and the memory that it works in.

    `rows`: of a pass at most.
    """

    alone = True
    """Whether each thread norms all rows, and rounds them, for itself."""
    _panels: NDArray[np.uint8] | None = None
    """Memory for products of more than ROWS rows, and how much of it is each thread's."""
    _panel_bytes = 0

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        code: Library,
        threads: int,
        stored: Stored,
        rows: int = ROWS,
    ) -> None:
        self.config, self.stored, self.rows = config, stored, rows
        self._weights, self._threads, self._code = weights, threads, code
        self.program = Program(code)
        self.inputs = Inputs.of(config.n_layers, rows)
        self.rotaries = config.rotaries
        for rotary in self.rotaries:
            self.inputs.cos.append(np.zeros((rows, rotary.d_rotary // 2), np.float32))
            self.inputs.sin.append(np.zeros((rows, rotary.d_rotary // 2), np.float32))
        self._whole: dict[Any, Buffer] = {}
        self._build()

    def _build(self) -> None:
        self._scratch = aligned(SCRATCH * self._threads)
        self._x = self._shared("x", self.config.d_model)
        self._embed()
        for number, layer in enumerate(self.config.layers):
            self._layer(number, layer)
        self._logits = self._head()

    def run(self, team: Team, rows: int, chosen: Sequence[int]) -> NDArray[np.float32]:
        """Compute the rows that `inputs` tells of → the logits of those chosen, (R', V)."""
        inputs = self.inputs
        inputs.rows[0], inputs.outputs[0] = rows, len(chosen)
        inputs.chosen[: len(chosen)] = chosen
        team.run(self.program)
        return self._logits[: len(chosen)].copy()

    # Memory. A buffer is named for its use, and used again by every layer of the same sizes.

    def _shared(self, use: str, width: int) -> Buffer:
        key = (use, width)
        if key not in self._whole:
            self._whole[key] = Buffer(4 * width, self.rows)
        return self._whole[key]

    def _own(self, use: str, row_bytes: int) -> Buffer:
        key = (use, row_bytes, "own")
        if key not in self._whole:
            self._whole[key] = Buffer(row_bytes, self.rows, self._threads)
        return self._whole[key]

    # Steps.

    def _embed(self) -> None:
        table = self._weights.matrix("embedding.weight")
        self.program.add(
            f"embedding_{table.format.name}",
            wait=True,
            table=table.data,
            row_bytes=table.row_bytes,
            order=table.order,
            k=table.k,
            scale=self.config.embedding_scale,
            numbers=self.inputs.tokens,
            out=self._x.data,
            out_stride=self._x.stride,
            rows=self.inputs.rows,
        )
        if self.config.position_table is not None:
            added = self._shared("positions", self.config.d_model)
            self.inputs.positions = added.floats(self.config.d_model)
            self._add(self._x, added, self.config.d_model)

    def _layer(self, number: int, layer: LayerConfig) -> None:
        name, d = f"layers.{number}.", self.config.d_model
        reads, gives = layer.norm_placement != "post", layer.norm_placement != "pre"
        x = self._x
        first = self._norm(name + "norm1", layer.norm, x, d, "norm1") if reads else x
        second = first
        if reads and layer.residual == "parallel":
            second = self._norm(name + "norm2", layer.norm, x, d, "norm2")
        heads = self._attention(number, name + "attention.", layer.attention, first)
        if layer.residual == "sequential":
            self._back(name + "attention.out", heads, layer, name + "post_norm1" if gives else None)
            second = self._norm(name + "norm2", layer.norm, x, d, "norm2") if reads else x
        assert isinstance(layer.feedforward, FeedForwardConfig)
        middle = self._feedforward(name + "feedforward.", layer.feedforward, second)
        if layer.residual != "sequential":
            # Both sub-layers have read the layer's input by now.
            self._back(name + "attention.out", heads, layer, name + "post_norm1" if gives else None)
        self._back(name + "feedforward.down", middle, layer, name + "post_norm2" if gives else None)

    def _attention(self, number: int, name: str, config: AttentionConfig, x: Buffer) -> Buffer:
        inputs, rows = self.inputs, self.inputs.rows
        wide, narrow = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        q, k, v = (
            self._shared(use, width) for use, width in (("q", wide), ("k", narrow), ("v", narrow))
        )
        self._products([(name + "q", q), (name + "k", k), (name + "v", v)], x, self.config.d_model)
        if config.qk_norm is not None:
            for part, heads in ((q, config.n_heads), (k, config.n_kv_heads)):
                which = "q_norm" if part is q else "k_norm"
                self._norm_heads(name + which, config, config.qk_norm, part, heads)
        for part, heads in ((q, config.n_heads), (k, config.n_kv_heads)):
            if config.rotary is not None:
                angles = self.rotaries.index(config.rotary)
                self.program.add(
                    f"rotate_{config.rotary.layout}",
                    wait=False,
                    x=part.data,
                    stride=part.stride,
                    heads=heads,
                    d_head=config.d_head,
                    half=config.rotary.d_rotary // 2,
                    cos=inputs.cos[angles],
                    sin=inputs.sin[angles],
                    rows=rows,
                )
        out = self._shared("heads", wide)
        self._attend(number, config, q, k, v, out)
        return out

    def _attend(
        self, number: int, config: AttentionConfig, q: Buffer, k: Buffer, v: Buffer, out: Buffer
    ) -> None:
        """Put keys and values into the cache, and let the queries read it."""
        inputs, rows = self.inputs, self.inputs.rows
        self.program.add(
            f"queries_{self.stored}",
            wait=False,
            x=q.data,
            stride=q.stride,
            heads=config.n_heads,
            d_head=config.d_head,
            factor=config.score_scale,
            rows=rows,
        )
        self._append(number, config, k, v)
        window = config.window or 0
        sizes = self._sizes(config)
        found = self._shared("found", SEGMENTS * config.n_heads * (2 + value_width(config.d_head)))
        self.program.add(
            f"attention_{self.stored}",
            wait=True,
            q=q.data,
            q_stride=q.stride,
            **sizes,
            window=window,
            cap=config.soft_cap or 0.0,
            keys=inputs.keys[number],
            values=inputs.values[number],
            capacities=inputs.room,
            lengths=inputs.lengths,
            found=found.data,
            scratch=self._scratch,
            rows=rows,
        )
        self.program.add(
            "combine",
            wait=True,
            found=found.data,
            **sizes,
            window=window,
            lengths=inputs.lengths,
            out=out.data,
            out_stride=out.stride,
            rows=rows,
        )

    def _append(self, number: int, config: AttentionConfig, k: Buffer, v: Buffer) -> None:
        inputs = self.inputs
        self.program.add(
            f"append_{self.stored}",
            wait=True,
            k=k.data,
            v=v.data,
            stride=k.stride,
            kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            d_value=value_width(config.d_head),
            keys=inputs.keys[number],
            values=inputs.values[number],
            capacities=inputs.room,
            places=inputs.places,
            rows=inputs.rows,
        )

    @staticmethod
    def _sizes(config: AttentionConfig) -> dict[str, int]:
        return {
            "kv_heads": config.n_kv_heads,
            "group": config.n_heads // config.n_kv_heads,
            "d_head": config.d_head,
            "d_value": value_width(config.d_head),
        }

    def _feedforward(self, name: str, config: FeedForwardConfig, x: Buffer) -> Buffer:
        d, f = self.config.d_model, config.d_ff
        gate = self._shared("gate", f)
        up = self._shared("up", f) if config.kind == "glu" else None
        if config.kind == "mlp":
            self._products([(name + "up", gate)], x, d, wait=False)
        elif config.fused:
            whole = self._weights.matrix(name + "gate_up.weight")
            bias = self._weights.optional(name + "gate_up.bias")
            assert up is not None
            halves = [
                (
                    whole.rows(first, first + f),
                    None if bias is None else bias[first : first + f],
                    out,
                )
                for first, out in ((0, gate), (f, up))
            ]
            self._multiply(halves, x, d, wait=False)
        else:
            assert up is not None
            self._products([(name + "gate", gate), (name + "up", up)], x, d, wait=False)
        self.program.add(
            f"activation_{config.activation}",
            wait=True,
            gate=gate.data,
            up=None if up is None else up.data,
            stride=gate.stride,
            n=f,
            rows=self.inputs.rows,
        )
        return gate

    def _back(self, name: str, x: Buffer, layer: LayerConfig, post_norm: str | None) -> None:
        """Project a sub-layer's result and add it to the residual path, as it is to be."""
        d = self.config.d_model
        scaled = layer.residual_scale != 1
        if post_norm is None and not scaled:
            self._products(
                [(name, self._x)], x, self._weights.matrix(name + ".weight").k, adds=True
            )
            return
        out = self._shared("result", d)
        self._products([(name, out)], x, self._weights.matrix(name + ".weight").k)
        if post_norm is not None:
            out = self._norm(post_norm, layer.norm, out, d, "post", shared=True)
        if scaled:
            self._scale(out, d, layer.residual_scale, self.inputs.rows)
        self._add(self._x, out, d)

    def _head(self) -> NDArray[np.float32]:
        config, d = self.config, self.config.d_model
        last = self._shared("last", d)
        outputs = self.inputs.outputs
        self.program.add(
            "pick",
            wait=True,
            x=self._x.data,
            stride=self._x.stride,
            n=d,
            numbers=self.inputs.chosen,
            out=last.data,
            rows=outputs,
        )
        x = last
        if config.final_norm is not None:
            x = self._norm("final_norm", config.final_norm, last, d, "final", rows=outputs)
        matrix = self._weights.matrix("embedding.weight" if config.tie_head else "head.weight")
        logits = self._shared("logits", config.vocab_size)
        bias = self._weights.optional("head.bias")
        self._multiply([(matrix, bias, logits)], x, d, rows=outputs)
        if config.logit_scale != 1:
            self._scale(logits, config.vocab_size, config.logit_scale, outputs)
        if config.final_soft_cap is not None:
            self.program.add(
                "soft_cap",
                wait=True,
                x=logits.data,
                stride=logits.stride,
                n=config.vocab_size,
                cap=config.final_soft_cap,
                rows=outputs,
            )
        return logits.floats(config.vocab_size)

    def _norm(
        self,
        name: str,
        config: NormConfig,
        x: Buffer,
        d: int,
        use: str,
        *,
        shared: bool = False,
        rows: NDArray[np.int64] | None = None,
    ) -> Buffer:
        """Rows normalised, each thread for itself unless they are many or `shared`."""
        shared = shared or not self.alone
        out = self._shared(use, d) if shared else self._own(use, 4 * d)
        self._normalise(name, config, x, out, 1, d, rows, wait=shared)
        return out

    def _norm_heads(
        self, name: str, attention: AttentionConfig, norm: NormConfig, x: Buffer, heads: int
    ) -> None:
        d, over = attention.d_head, attention.qk_norm_over
        if over == "head":
            self._normalise(name, norm, x, x, heads, d, None, wait=True)
        elif over == "all_heads":
            self._normalise(name, norm, x, x, 1, heads * d, None, wait=True)
        else:
            for head in range(heads):
                part = slice(head * d, (head + 1) * d)
                self._normalise(name, norm, x, x, 1, d, None, wait=True, part=part)

    def _normalise(
        self,
        name: str,
        config: NormConfig,
        x: Buffer,
        out: Buffer,
        parts: int,
        d: int,
        rows: NDArray[np.int64] | None,
        *,
        wait: bool,
        part: slice = slice(None),
    ) -> None:
        """Norms of `parts` vectors of width d in each row; `part` says which of its channels."""
        more: dict[str, Any] = {}
        if config.kind == "layer":
            bias = self._weights.optional(name + ".bias")
            more["bias"] = None if bias is None else bias[part]
        skipped = 4 * (part.start or 0)
        self.program.add(
            f"{config.kind}_norm",
            wait=wait,
            x=x.data[skipped:],
            x_stride=x.stride,
            parts=parts,
            d=d,
            weight=self._weights.vector(name + ".weight", config.offset)[part],
            eps=config.eps,
            out=out.data[skipped:],
            out_stride=out.stride,
            private=out.private,
            rows=self.inputs.rows if rows is None else rows,
            **more,
        )

    def _scale(self, x: Buffer, n: int, factor: float, rows: NDArray[np.int64]) -> None:
        """Rows of n numbers times a factor."""
        self.program.add(
            "scale",
            wait=True,
            x=x.data,
            stride=x.stride,
            n=n,
            factor=factor,
            rows=rows,
        )

    def _add(self, x: Buffer, y: Buffer, n: int) -> None:
        self.program.add(
            "add", wait=True, x=x.data, y=y.data, stride=x.stride, n=n, rows=self.inputs.rows
        )

    def _products(
        self,
        wanted: Sequence[tuple[str, Buffer]],
        x: Buffer,
        k: int,
        *,
        wait: bool = True,
        adds: bool = False,
    ) -> None:
        """x times matrices by their names."""
        named = [
            (self._weights.matrix(name + ".weight"), self._weights.optional(name + ".bias"), out)
            for name, out in wanted
        ]
        self._multiply(named, x, k, wait=wait, adds=adds)

    def _multiply(
        self,
        wanted: Sequence[tuple[Matrix, NDArray[np.float32] | None, Buffer]],
        x: Buffer,
        k: int,
        *,
        wait: bool = True,
        adds: bool = False,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """x times matrices, in the activations that each matrix's format asks for."""
        rows = self.inputs.rows if rows is None else rows
        rounded: Buffer | None = None
        for number, (matrix, bias, out) in enumerate(wanted):
            from_ = x
            if matrix.format.activations == "int8":
                rounded = rounded or self._rounded(x, k, rows)
                from_ = rounded
            self.program.add(
                f"product_{matrix.format.name}",
                wait=wait and number == len(wanted) - 1,
                weights=matrix.data,
                row_bytes=matrix.row_bytes,
                order=matrix.order,
                n=matrix.n,
                k=k,
                x=from_.data,
                x_stride=from_.stride,
                x_private=from_.private,
                bias=bias,
                out=out.data,
                out_stride=out.stride,
                adds=int(adds),
                scratch=self._panels,
                scratch_bytes=self._panel_bytes,
                rows=rows,
            )

    def _rounded(self, x: Buffer, k: int, rows: NDArray[np.int64]) -> Buffer:
        """Rows as int8."""
        nbytes = int8.row_bytes(k)
        out = self._own("int8", nbytes) if self.alone else self._shared("int8", -(-nbytes // 4))
        self.program.add(
            "quantise",
            wait=not self.alone,
            x=x.data,
            x_stride=x.stride,
            x_private=x.private,
            k=k,
            out=out.data,
            out_stride=out.stride,
            private=out.private,
            rows=rows,
        )
        return out
