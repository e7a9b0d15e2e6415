"""A decoder's configuration → the program that computes it: every part by kernels of its own.

A pass takes some tokens, each a row: of one text or of several, at any places. Rows meet only in
attention, where each reads its own text as far as its own place. This plan is for few rows, where
memory sets the pace; `engine/prefill.py` has the one for many.

What of a configuration is computed at all stands in `engine/coverage.py`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from armillary.config import DecoderConfig, LayerConfig, MixtureConfig
from armillary.engine.attending import AttentionSteps
from armillary.engine.buffers import Buffer
from armillary.engine.feeding import FeedForwardSteps
from armillary.engine.formats import ROWS
from armillary.engine.kv_layout import Stored
from armillary.engine.library import Library
from armillary.engine.threads import Team
from armillary.engine.weights import Weights


class Plan(AttentionSteps, FeedForwardSteps):
    """The program of a decoder, and the memory that it works in.

    `rows`: of a pass at most.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        code: Library,
        threads: int,
        stored: Stored,
        rows: int = ROWS,
    ) -> None:
        super().__init__(config, weights, code, threads, stored, rows)
        self._build()

    def _build(self) -> None:
        self._prepare()
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
