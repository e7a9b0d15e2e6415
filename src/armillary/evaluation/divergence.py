"""How far a model with other weights is from the one before: losses, KL divergence, top tokens.

Both read the same windows of text, one after the other and each a layer at a time, so that no
model is ever held: the weights of a layer are read from the file, used for all windows and let go.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from armillary.checkpoints import Checkpoint
from armillary.decoder import Decoder
from armillary.errors import UserError
from armillary.evaluation.perplexity import FEW_DOCUMENTS, Document
from armillary.evaluation.statistics import Estimate, weighted_mean
from armillary.memory import give_back
from armillary.weights import read

# Tokens that a layer takes at one time, in whole windows, and positions whose logits, of both
# models, are held at one time.
_TOKENS = 4096
_POSITIONS = 64


@dataclass(frozen=True)
class Window:
    """What is read at once, and the document it is of. All but its first token is scored."""

    document: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Divergence:
    """What other weights change, with intervals by document (by window where there are few).

    before, after  nats per token
    rise           nats per token by which the loss is higher after, from pairs
    kl             nats: the mean KL divergence of the distribution after from that before
    same_top       the share of positions at which the likeliest token is the same
    """

    tokens: int
    windows: int
    before: Estimate
    after: Estimate
    rise: Estimate
    kl: Estimate
    same_top: Estimate


def cut_windows(
    documents: Sequence[Document], begin: Sequence[int], length: int, count: int
) -> list[Window]:
    """Up to `count` windows of `length` tokens that do not overlap, in turn from each document.

    Each starts with the tokens `begin`, which are counted in.
    Raises UserError when no document is long enough, ValueError for a length without a target.
    """
    own = length - len(begin)
    if own < 1 or length < 2:
        raise ValueError(f"a window of {length} tokens has no room for text behind {len(begin)}")
    turns = max((len(document.ids) // own for document in documents), default=0)
    windows = [
        Window(document.name, (*begin, *document.ids[turn * own : (turn + 1) * own]))
        for turn in range(turns)
        for document in documents
        if len(document.ids) >= (turn + 1) * own
    ]
    if not windows:
        raise UserError(f"no document has {own:,} tokens; give a longer text, or a shorter length")
    return windows[:count]


def measure(
    before: Checkpoint,
    after: Checkpoint,
    windows: Sequence[Window],
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Divergence:
    """Compare two sets of weights of one decoder on windows of one length, in float32.

    `progress` is called with the steps done and their count.
    """
    tokens = torch.tensor([window.ids for window in windows])
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    readers = [_Reader(checkpoint, step) for checkpoint in (before, after)]
    places = tokens.shape[0] * (tokens.shape[1] - 1)
    total = sum(reader.steps for reader in readers) + -(-places // _POSITIONS)
    hidden = [reader.hidden(tokens)[:, :-1].flatten(0, 1) for reader in readers]
    rows = _compared(readers, hidden, tokens[:, 1:].flatten(), step)
    return _summary(rows.reshape(len(windows), -1, 4), windows)


class _Reader:
    """A decoder whose parameters are in memory only while they are used.

    `step` is called when a part of the model has been used for all that is read, `steps` times.
    """

    def __init__(self, checkpoint: Checkpoint, step: Callable[[], None]) -> None:
        with torch.device("meta"):
            self.decoder = Decoder(checkpoint.config).eval()
        self._tensors = checkpoint.tensors
        self._step = step
        parts = [f"layers.{i}" for i in range(checkpoint.config.n_layers)]
        parts += ["embedding", "final_norm"]
        if self.decoder.position_table is not None:
            parts.append("position_table")
        for name in parts:
            part = self.decoder.get_submodule(name)
            part.register_forward_pre_hook(lambda *_, name=name: self._fill(name))
            part.register_forward_hook(lambda *_, name=name: self._empty(name))
        for layer in self.decoder.layers:
            layer.forward = functools.partial(_by_windows, layer.forward)
        self.steps = len(parts)

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → the last layer's normed output, (B, T, d)."""
        return self.decoder.hidden(tokens)

    def fill_head(self) -> None:
        """Hold what `decoder.project` needs, from now on."""
        self._fill("head")
        if self.decoder.head.weight is None:
            self._fill("embedding")

    def _fill(self, part: str) -> None:
        for name, owner, attribute, _ in self._parameters(part):
            filled = read(self._tensors[name], torch.float32)
            setattr(owner, attribute, nn.Parameter(filled, requires_grad=False))

    def _empty(self, part: str) -> None:
        for _, owner, attribute, parameter in self._parameters(part):
            setattr(owner, attribute, nn.Parameter(parameter.to("meta"), requires_grad=False))
        give_back()
        self._step()

    def _parameters(self, part: str) -> list[tuple[str, nn.Module, str, Tensor]]:
        """The name of each parameter of a part, the module that has it, its name there."""
        return [
            (f"{part}.{name}", module, attribute, parameter)
            for prefix, module in self.decoder.get_submodule(part).named_modules()
            for attribute, parameter in module.named_parameters(recurse=False)
            for name in [f"{prefix}.{attribute}" if prefix else attribute]
        ]


def _by_windows(forward: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
    """What a layer makes of x (B, T, d), a few windows at a time."""
    at_once = max(1, _TOKENS // x.shape[1])
    return torch.cat([forward(part, *rest) for part in torch.split(x, at_once)])


@torch.no_grad()
def _compared(
    readers: Sequence[_Reader], hidden: Sequence[Tensor], targets: Tensor, step: Callable[[], None]
) -> NDArray[np.float64]:
    """Nats before and after, KL divergence and whether the top is the same, (places, 4)."""
    for reader in readers:
        reader.fill_head()
    rows = []
    for start in range(0, len(targets), _POSITIONS):
        part = slice(start, start + _POSITIONS)
        p, q = (
            reader.decoder.project(states[part]).log_softmax(-1)
            for reader, states in zip(readers, hidden, strict=True)
        )
        target = targets[part, None]
        rows.append(
            torch.stack(
                [
                    -p.gather(-1, target)[:, 0].double(),
                    -q.gather(-1, target)[:, 0].double(),
                    (p.exp() * (p - q)).sum(-1, dtype=torch.float64),
                    (p.argmax(-1) == q.argmax(-1)).double(),
                ],
                dim=-1,
            )
        )
        del p, q
        give_back()
        step()
    return torch.cat(rows).numpy()


def _summary(rows: NDArray[np.float64], windows: Sequence[Window]) -> Divergence:
    """Rows (windows, tokens, 4) → means with intervals over units of text."""
    by_document = len({window.document for window in windows}) >= FEW_DOCUMENTS
    units: dict[object, int] = {}
    numbers = [
        units.setdefault(window.document if by_document else number, len(units))
        for number, window in enumerate(windows)
    ]
    sums, weights = np.zeros((len(units), 4)), np.zeros(len(units))
    np.add.at(sums, numbers, rows.sum(1))
    np.add.at(weights, numbers, rows.shape[1])
    before, after, kl, same = (weighted_mean(column, weights) for column in sums.T)
    rise = weighted_mean(sums[:, 1] - sums[:, 0], weights)
    return Divergence(rows.shape[0] * rows.shape[1], len(windows), before, after, rise, kl, same)
