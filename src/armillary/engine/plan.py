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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
)
from armillary.engine.buffers import Buffer, Inputs, Slots
from armillary.engine.formats import ROWS, int8
from armillary.engine.kv_layout import SCRATCH, SEGMENTS, Stored, value_width
from armillary.engine.library import Library
from armillary.engine.program import Program, aligned
from armillary.engine.threads import Team
from armillary.engine.weights import Matrix, Stack, Weights

_LARGEST = float(np.finfo(np.float32).max)
"""What bounds nothing."""


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
        self._slots: dict[tuple[int, int], Slots] = {}
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

    def _shared(self, use: str, width: int, slots: Slots | None = None) -> Buffer:
        return self._buffer(use, 4 * width, 0, slots)

    def _own(self, use: str, row_bytes: int, slots: Slots | None = None) -> Buffer:
        return self._buffer(use, row_bytes, self._threads, slots)

    def _buffer(self, use: str, row_bytes: int, threads: int, slots: Slots | None) -> Buffer:
        rows = self.rows if slots is None else slots.most
        key = (use, row_bytes, threads, rows)
        if key not in self._whole:
            self._whole[key] = Buffer(row_bytes, rows, threads)
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
        post1, post2 = (name + "post_norm1", name + "post_norm2") if gives else (None, None)
        x, feedforward = self._x, layer.feedforward
        # Rows that go to experts are read by every thread.
        shared = isinstance(feedforward, MixtureConfig)
        both = shared and layer.residual == "parallel_shared_norm"
        first = self._norm(name + "norm1", layer.norm, x, d, "norm1", shared=both) if reads else x
        second = first
        if reads and layer.residual == "parallel":
            second = self._norm(name + "norm2", layer.norm, x, d, "norm2", shared=shared)
        heads = self._attention(number, name + "attention.", layer.attention, first)
        if layer.residual == "sequential":
            self._back(name + "attention.out", heads, layer, post1)
            if reads:
                second = self._norm(name + "norm2", layer.norm, x, d, "norm2", shared=shared)
        if isinstance(feedforward, MixtureConfig):
            middle = self._mixture(name + "feedforward.", feedforward, second)
        else:
            middle = self._feedforward(name + "feedforward.", feedforward, second)
        if layer.residual != "sequential":
            # Both sub-layers have read the layer's input by now.
            self._back(name + "attention.out", heads, layer, post1)
        if isinstance(feedforward, MixtureConfig):
            self._give(middle, layer, post2)
        else:
            self._back(name + "feedforward.down", middle, layer, post2)

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
        sinks = self._weights.optional(name + "sinks")
        self._attend(number, config, (q, k, v), sinks, out)
        return out

    def _attend(
        self,
        number: int,
        config: AttentionConfig,
        projected: tuple[Buffer, Buffer, Buffer],
        sinks: NDArray[np.float32] | None,
        out: Buffer,
    ) -> None:
        """Put keys and values into the cache, and let the queries read it."""
        inputs, rows = self.inputs, self.inputs.rows
        q, k, v = projected
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
            sinks=sinks,
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

    def _feedforward(
        self, name: str, config: FeedForwardConfig, x: Buffer, slots: Slots | None = None
    ) -> Buffer:
        """What the down projection reads, of all rows or of those that experts take."""
        d, f = self.config.d_model, config.d_ff
        if config.fused:
            both = self._shared("gate and up", 2 * f, slots)
            self._products([(name + "gate_up", both)], x, d, slots=slots)
            gate, up, stride = both, both.data[4 * f :], both.stride
        else:
            gate = self._shared("gate", f, slots)
            wanted, up, stride = [(name + "up", gate)], None, gate.stride
            if config.kind == "glu":
                other = self._shared("up", f, slots)
                wanted, up = [(name + "gate", gate), (name + "up", other)], other.data
            self._products(wanted, x, d, wait=False, slots=slots)
        self.program.add(
            f"activation_{config.activation}",
            wait=True,
            gate=gate.data,
            up=up,
            stride=stride,
            n=f,
            limit=_LARGEST if config.limit is None else config.limit,
            up_offset=config.up_offset,
            rows=self.inputs.rows if slots is None else slots.rows,
        )
        return gate

    def _mixture(self, name: str, config: MixtureConfig, x: Buffer) -> Buffer:
        """What chosen experts make of rows that every thread reads, and the shared network."""
        d, rows, expert = self.config.d_model, self.inputs.rows, config.expert
        slots = self._choose(name + "router.", config, x)
        taken = self._shared("taken", d, slots)
        self.program.add(
            "pick",
            wait=True,
            x=x.data,
            x_stride=x.stride,
            n=d,
            numbers=slots.row_of,
            out=taken.data,
            out_stride=taken.stride,
            rows=slots.rows,
        )
        middle = self._feedforward(name + "experts.", expert, taken, slots)
        given = self._shared("given", d, slots)
        self._products([(name + "experts.down", given)], middle, expert.d_ff, slots=slots)
        shared: Buffer | None = None
        gate: Buffer | None = None
        if config.shared is not None:
            shared = self._shared("of the shared", d)
            inner = self._feedforward(name + "shared.", config.shared, x)
            self._products([(name + "shared.down", shared)], inner, config.shared.d_ff)
        if config.shared_gate:
            gate = self._shared("shared gate", 1)
            self._products([(name + "shared_gate", gate)], x, d)
        out = self._shared("mixture", d)
        self.program.add(
            "mix",
            wait=True,
            given=given.data,
            given_stride=given.stride,
            top_k=config.top_k,
            slot_of=slots.slot_of,
            weights=slots.weights,
            shared=None if shared is None else shared.data,
            gate=None if gate is None else gate.data,
            gate_stride=0 if gate is None else gate.stride,
            n=d,
            out=out.data,
            stride=out.stride,
            rows=rows,
        )
        return out

    def _choose(self, name: str, config: MixtureConfig, x: Buffer) -> Slots:
        """Let a router pick experts for the rows, and sort the rows by them."""
        rows, router, count = self.inputs.rows, config.router, config.n_experts
        logits = self._shared("router", count)
        matrix = self._weights.exact(name + "weight")
        bias = self._weights.optional(name + "bias")
        self._multiply([(matrix, bias, logits)], x, self.config.d_model)
        compared = self._shared("compared", count + router.n_groups)
        slots = self._slots.get((count, config.top_k)) or Slots.of(count, config.top_k, self.rows)
        self._slots[count, config.top_k] = slots
        self.program.add(
            f"route_{router.score}",
            wait=True,
            logits=logits.data,
            stride=logits.stride,
            experts=count,
            top_k=config.top_k,
            groups=router.n_groups,
            top_groups=router.top_groups,
            normalise=int(router.normalise),
            scale=router.scale,
            selection_bias=self._weights.optional(name + "selection_bias"),
            compared=compared.data,
            compared_stride=compared.stride,
            chosen=slots.chosen,
            weights=slots.weights,
            rows=rows,
        )
        self.program.add(
            "dispatch",
            wait=True,
            chosen=slots.chosen,
            experts=count,
            top_k=config.top_k,
            starts=slots.starts,
            row_of=slots.row_of,
            slot_of=slots.slot_of,
            rows=rows,
        )
        return slots

    def _back(self, name: str, x: Buffer, layer: LayerConfig, post_norm: str | None) -> None:
        """Project a sub-layer's result and add it to the residual path, as it is to be."""
        k = self._weights.matrix(name + ".weight").k
        if post_norm is None and layer.residual_scale == 1:
            self._products([(name, self._x)], x, k, adds=True)
            return
        out = self._shared("result", self.config.d_model)
        self._products([(name, out)], x, k)
        self._give(out, layer, post_norm)

    def _give(self, out: Buffer, layer: LayerConfig, post_norm: str | None) -> None:
        """Add a sub-layer's result to the residual path, as it is to be."""
        d = self.config.d_model
        if post_norm is not None:
            out = self._norm(post_norm, layer.norm, out, d, "post", shared=True)
        if layer.residual_scale != 1:
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
            x_stride=self._x.stride,
            n=d,
            numbers=self.inputs.chosen,
            out=last.data,
            out_stride=last.stride,
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
        slots: Slots | None = None,
    ) -> None:
        """x times matrices by their names, or those of experts times the rows in their slots."""
        find = self._weights.matrix if slots is None else self._weights.stack
        named = [
            (find(name + ".weight"), self._weights.optional(name + ".bias"), out)
            for name, out in wanted
        ]
        self._multiply(named, x, k, wait=wait, adds=adds, slots=slots)

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
        """x times matrices, in the activations that each matrix's format asks for."""
        name, which = self._which("product", rows, slots)
        rounded: Buffer | None = None
        for number, (matrix, bias, out) in enumerate(wanted):
            from_ = x
            if matrix.format.activations == "int8":
                rounded = rounded or self._rounded(x, k, rows, slots)
                from_ = rounded
            self.program.add(
                f"{name}_{matrix.format.name}",
                wait=wait and number == len(wanted) - 1,
                **matrix.arguments(),
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
                **which,
            )

    def _which(
        self, kernel: str, rows: NDArray[np.int64] | None, slots: Slots | None
    ) -> tuple[str, dict[str, Any]]:
        """The kernel that multiplies all rows or those of experts, and how it is told which."""
        if slots is None:
            return kernel, {"rows": self.inputs.rows if rows is None else rows}
        return f"experts_{kernel}", {"starts": slots.starts, "experts": slots.experts}

    def _rounded(
        self, x: Buffer, k: int, rows: NDArray[np.int64] | None, slots: Slots | None
    ) -> Buffer:
        """Rows as int8, which each thread makes for itself where they are few."""
        _, which = self._which("", rows, slots)
        out = self._buffer("int8", int8.row_bytes(k), self._threads if self.alone else 0, slots)
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
            rows=which["rows"] if slots is None else slots.rows,
        )
        return out
