"""Mixtures of experts: which experts take a row, the rows sorted by them, and the sum of theirs."""

import numpy as np
from numba.extending import register_jitable

from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels.common import (
    Floats,
    floats,
    set_word,
    share,
    share_items,
    word,
)
from armillary.engine.kernels.elementary import exp, sigmoid

_LEAST = np.float32(-1e38)
"""Below every score; what is no number counts as this, so that as many are chosen in any case."""
_TAKEN = np.float32(-3e38)
"""Of what is not to be chosen, or not again."""


def route(score: str) -> Kernel:
    """The experts that each row chooses by the router's logits, and what each counts.

    As `RouterConfig` says it; of equal scores the first wins. `logits` become scores. `compared`
    has room for a number for each expert and each group.
    """
    scores = {"softmax": _softmax, "sigmoid": _sigmoids}[score]

    def route(
        thread: int,
        threads: int,
        logits: Address,
        stride: Size,
        experts: Size,
        top_k: Size,
        groups: Size,
        top_groups: Size,
        normalise: Size,
        scale: Number,
        selection_bias: Address,
        compared: Address,
        compared_stride: Size,
        chosen: Address,
        weights: Address,
        rows: Live,
    ) -> None:
        first, last = share_items(rows, thread, threads)
        bias = floats(selection_bias)
        for row in range(first, last):
            s, c = floats(logits + row * stride), floats(compared + row * compared_stride)
            scores(s, experts)
            for i in range(experts):
                added = s[i] + bias[i] if selection_bias else s[i]
                c[i] = added if added > _LEAST else _LEAST
            if groups > 1:
                close_groups(c, experts, groups, top_groups)
            mine, counts = chosen + 8 * row * top_k, floats(weights + 4 * row * top_k)
            total = np.float32(0)
            for choice in range(top_k):
                expert = largest(c, 0, experts)
                c[expert] = _TAKEN
                set_word(mine + 8 * choice, expert)
                counts[choice] = s[expert]
                total += s[expert]
            by = scale / total if normalise else scale
            for choice in range(top_k):
                counts[choice] *= by

    # What is no number must not be taken for one.
    return kernel(route, score, exact=True)


@register_jitable
def _softmax(x: Floats, n: int) -> None:
    """x ← e^x / Σ e^x."""
    most = x[0]
    for i in range(n):
        most = max(most, x[i])
    total = np.float32(0)
    for i in range(n):
        x[i] = exp(x[i] - most)
        total += x[i]
    for i in range(n):
        x[i] /= total


@register_jitable
def _sigmoids(x: Floats, n: int) -> None:
    """x ← σ(x)."""
    for i in range(n):
        x[i] = sigmoid(x[i])


@register_jitable
def largest(c: Floats, start: int, stop: int) -> int:
    """Where the largest of some numbers is, of equal ones the first."""
    at = start
    for i in range(start + 1, stop):
        if c[i] > c[at]:
            at = i
    return at


@register_jitable
def close_groups(c: Floats, experts: int, groups: int, top_groups: int) -> None:
    """Leave the experts of those groups only whose two best scores have the largest sums."""
    each = experts // groups
    for group in range(groups):
        start = group * each
        best = largest(c, start, start + each)
        second = _LEAST
        for i in range(start, start + each):
            if i != best:
                second = max(second, c[i])
        c[experts + group] = max(c[best] + second, _LEAST)
    for _ in range(top_groups):
        c[largest(c, experts, experts + groups)] = _TAKEN
    for group in range(groups):
        if c[experts + group] != _TAKEN:
            for i in range(group * each, (group + 1) * each):
                c[i] = _TAKEN


def dispatch() -> Kernel:
    """Sort the rows' choices by expert: where each expert's slots start, and what is in them.

    Rows keep their order within an expert. `starts` has E + 1 numbers, and E to work with.
    """

    def dispatch(
        thread: int,
        threads: int,
        chosen: Address,
        experts: Size,
        top_k: Size,
        starts: Address,
        row_of: Address,
        slot_of: Address,
        rows: Live,
    ) -> None:
        if thread:
            return
        after = starts + 8 * (experts + 1)
        for expert in range(2 * experts + 1):
            set_word(starts + 8 * expert, 0)
        for choice in range(rows * top_k):
            count = starts + 8 * (word(chosen + 8 * choice) + 1)
            set_word(count, word(count) + 1)
        for expert in range(experts):
            start = word(starts + 8 * expert)
            set_word(after + 8 * expert, start)
            set_word(starts + 8 * (expert + 1), start + word(starts + 8 * (expert + 1)))
        for choice in range(rows * top_k):
            place = after + 8 * word(chosen + 8 * choice)
            slot = word(place)
            set_word(place, slot + 1)
            set_word(row_of + 8 * slot, choice // top_k)
            set_word(slot_of + 8 * choice, slot)

    return kernel(dispatch)


def mix() -> Kernel:
    """What the chosen experts gave, each times what it counts, in the order of choice.

    Plus `shared` where there is one, times σ(gate) where there is one. Shared out by columns, as
    products are.
    """

    def mix(
        thread: int,
        threads: int,
        given: Address,
        given_stride: Size,
        top_k: Size,
        slot_of: Address,
        weights: Address,
        shared: Address,
        gate: Address,
        gate_stride: Size,
        n: Size,
        out: Address,
        stride: Size,
        rows: Live,
    ) -> None:
        first, last = share(n, thread, threads)
        for row in range(rows):
            y, counts = floats(out + row * stride), floats(weights + 4 * row * top_k)
            for choice in range(top_k):
                slot, by = word(slot_of + 8 * (row * top_k + choice)), counts[choice]
                x = floats(given + slot * given_stride)
                if choice:
                    for i in range(first, last):
                        y[i] += by * x[i]
                else:
                    for i in range(first, last):
                        y[i] = by * x[i]
            if shared:
                x, by = floats(shared + row * stride), np.float32(1)
                if gate:
                    by = sigmoid(floats(gate + row * gate_stride)[0])
                for i in range(first, last):
                    y[i] += by * x[i]

    return kernel(mix)
