"""Our decoder as a scorer: what requests share is computed once.

A context is taken into a cache piece by piece, and what it has in common with the text that the
cache holds already is not computed again. The continuations then go on from it in one pass, as the
branches of a tree, so that what they have in common is computed once as well.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.decoder import Decoder
from armillary.evaluation.scoring import Continuation, Scored, check_question
from armillary.parts.kv_cache import KVCache
from armillary.torch_engine import keep_common_prefix

# A pass takes so many tokens of a text at most. Of branches it takes fewer, since the cache keeps
# room for them, and of these so many pairs with a token of the context, since their mask is
# written out.
_TOKENS = 512
_BRANCHES = 256
_PAIRS = 1 << 22
# Positions whose logits are held at one time.
_LOGITS = 32


class DecoderScorer:
    """Scores with a decoder, in its own number type and on its own device.

    What comes out is what `decoder(context + continuation)` gives, for each continuation alone.
    Under a rule whose frequencies vary with the length (dynamic, longrope) that is the length of
    the context with that continuation: where it makes other frequencies than those that the cached
    context was computed under, the context is computed anew.
    Raises ValueError in `score` when the decoder is in training mode.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder.eval()
        rotaries = [layer.attention.rotary for layer in decoder.config.layers]
        self._rules = list(dict.fromkeys(each.scaling for each in rotaries if each is not None))
        self._cache: KVCache | None = None
        self._regime: tuple[int, ...] = ()

    @property
    def window(self) -> int:
        """The decoder's positions."""
        return self.decoder.config.max_positions

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.decoder.config.vocab_size

    def begin(self) -> None:
        """Forget the cached context, and free it."""
        self._cache = None

    @torch.no_grad()
    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        """See `Scorer`."""
        check_question(context, continuations, self.window)
        if self.decoder.training:
            raise ValueError(
                "the decoder is in training mode, with dropout; call decoder.eval() first"
            )
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, each in enumerate(continuations):
            length = len(context) + len(each.tokens)
            regime = tuple(rule.regime(length) for rule in self._rules)
            groups.setdefault(regime, []).append(number)
        scores: dict[int, Scored] = {}
        for regime, numbers in groups.items():
            alike = [continuations[number] for number in numbers]
            scores |= zip(numbers, self._score_alike(context, alike, regime), strict=True)
        return [scores[number] for number in range(len(continuations))]

    def _score_alike(
        self, context: Sequence[int], continuations: Sequence[Continuation], regime: tuple[int, ...]
    ) -> list[Scored]:
        """Scores of continuations under the same frequencies.

        A path begins with the context's last token, which gives the first scores and so is not
        cached, and ends before the continuation's last, which gives none.
        """
        paths = [(context[-1], *each.tokens[:-1]) for each in continuations]
        most = max(1, min(_BRANCHES, _PAIRS // len(context)))
        length = len(context) + len(continuations[0].tokens)
        room = len(context) + max(most, *map(len, paths))
        scores: dict[int, Scored] = {}
        for tree in _trees(paths, most):
            cache = self._take(context, regime, length, room)
            asked = [continuations[number] for number in tree.ways]
            read = (
                self._branch(tree, asked, cache)
                if len(asked) > 1
                else self._follow(paths[next(iter(tree.ways))], asked[0], cache)
            )
            scores |= zip(tree.ways, read, strict=True)
        return [scores[number] for number in range(len(paths))]

    def _take(
        self, context: Sequence[int], regime: tuple[int, ...], length: int, room: int
    ) -> KVCache:
        """The cache, holding the context but for its last token, and with room for what follows."""
        cache = self._cache
        if cache is None or self._regime != regime or (cache.capacity or 0) < room:
            self._cache = None
            cache = KVCache(self.decoder.config, capacity=room, rotary_length=length)
        ids = self._ids(context)
        last = len(context) - 1
        for start in range(keep_common_prefix(cache, ids), last, _TOKENS):
            self.decoder.hidden(ids[:, start : min(start + _TOKENS, last)], cache=cache)
        self._cache, self._regime = cache, regime
        return cache

    def _branch(
        self, tree: "_Tree", continuations: Sequence[Continuation], cache: KVCache
    ) -> list[Scored]:
        """All continuations in one pass; the cache is left as it was."""
        hidden = self.decoder.branches(self._ids(tree.tokens), tree.parents, cache)[0]
        rows = [
            node
            for way, each in zip(tree.ways.values(), continuations, strict=True)
            for node in way[-each.scored :]
        ]
        targets = [token for each in continuations for token in each.tokens[-each.scored :]]
        logprobs, likeliest = self._read(hidden, rows, targets)
        ends = np.cumsum([each.scored for each in continuations])[:-1]
        return [
            Scored(*parts)
            for parts in zip(np.split(logprobs, ends), np.split(likeliest, ends), strict=True)
        ]

    def _follow(
        self, path: Sequence[int], continuation: Continuation, cache: KVCache
    ) -> list[Scored]:
        """One continuation, piece by piece; it stays in the cache, in case it is context next."""
        first = len(path) - continuation.scored
        read = []
        for start in range(0, len(path), _TOKENS):
            hidden = self.decoder.hidden(self._ids(path[start : start + _TOKENS]), cache=cache)[0]
            rows = range(max(0, first - start), len(hidden))
            read.append(
                self._read(hidden, rows, [continuation.tokens[start + row] for row in rows])
            )
        logprobs, likeliest = zip(*read, strict=True)
        return [Scored(np.concatenate(logprobs), np.concatenate(likeliest))]

    def _read(
        self, hidden: Tensor, rows: Sequence[int], targets: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """What the model made of a target after a row of hidden (T, d), for each pair of them."""
        asked, pairs = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        tokens = np.asarray(targets, np.int64)
        logprobs, likeliest = np.empty(len(tokens)), np.empty(len(tokens), np.bool_)
        for start in range(0, len(asked), _LOGITS):
            logits = self.decoder.project(hidden[asked[start : start + _LOGITS].tolist()])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            here = np.flatnonzero((pairs >= start) & (pairs < start + _LOGITS))
            row = torch.from_numpy(pairs[here] - start).to(logits.device)
            token = torch.from_numpy(tokens[here]).to(logits.device)
            found = logits[row, token] - logits.logsumexp(-1)[row]
            logprobs[here] = found.double().cpu().numpy()
            likeliest[here] = (logits.argmax(-1)[row] == token).cpu().numpy()
        return logprobs, likeliest

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.decoder.embedding.weight.device)


class _Tree:
    """Paths of tokens, each token once where paths begin alike.

    ways  the numbers of a path's tokens, by the path's own number
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.ways: dict[int, list[int]] = {}
        self._after: dict[tuple[int, int], int] = {}

    def add(self, number: int, path: Sequence[int]) -> None:
        """Take a path in."""
        way, at = [], -1
        for token in path:
            found = self._after.setdefault((at, token), len(self.tokens))
            if found == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(at)
            way.append(at := found)
        self.ways[number] = way

    def missing(self, path: Sequence[int]) -> int:
        """How many tokens a path would add."""
        at = -1
        for done, token in enumerate(path):
            if (at, token) not in self._after:
                return len(path) - done
            at = self._after[at, token]
        return 0


def _trees(paths: Sequence[Sequence[int]], most: int) -> Iterator[_Tree]:
    """All paths in order, in trees of so many tokens at most; a longer path is alone in one."""
    tree = _Tree()
    for number, path in enumerate(paths):
        if tree.ways and len(tree.tokens) + tree.missing(path) > most:
            yield tree
            tree = _Tree()
        tree.add(number, path)
    if tree.ways:
        yield tree
