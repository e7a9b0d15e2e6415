"""The steps of feed-forwards and of mixtures of experts."""

import numpy as np

from armillary.config import FeedForwardConfig, MixtureConfig
from armillary.engine.buffers import Buffer, Slots
from armillary.engine.steps import Steps

_LARGEST = float(np.finfo(np.float32).max)
"""What bounds nothing."""


class FeedForwardSteps(Steps):
    """Adds them to a program."""

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
