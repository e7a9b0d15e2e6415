"""A decoder on the CPU without torch: tokens and caches of texts in, logits out."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.parameters import check_filled, parameter_shapes
from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig
from armillary.engine.cache import TextCache
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.coverage import check_computed
from armillary.engine.formats import ROWS
from armillary.engine.kv_layout import Kept, Stored
from armillary.engine.library import library
from armillary.engine.plan import Plan
from armillary.engine.positions import Angles, position_rows
from armillary.engine.prefill import PrefillPlan
from armillary.engine.sampling import Weigher
from armillary.engine.threads import physical_cores, team
from armillary.engine.weights import Weights, Width

_FROM = ROWS + 1
"""New tokens of a text from which on it is computed in passes of many rows."""


_Run = tuple[int, int, Sequence[int]]
"""A text's number, how many of its new tokens came before, and the tokens that come now."""


def _passes(texts: Sequence[tuple[int, Sequence[int]]], rows: int) -> Iterator[list[_Run]]:
    """New tokens of numbered texts, `rows` at a time."""
    runs: list[_Run] = []
    left = rows
    for text, tokens in texts:
        start = 0
        while start < len(tokens):
            run = tokens[start : start + left]
            runs.append((text, start, run))
            start, left = start + len(run), left - len(run)
            if not left:
                yield runs
                runs, left = [], rows
    if runs:
        yield runs


def _quiet(_: str) -> None:
    """For who wants no notices."""


def _all_float32(tensors: Mapping[str, StoredTensor], width: Width) -> bool:
    stored = {tensor.encoding for tensor in tensors.values() if len(tensor.shape) > 1}
    return width == "float32" or (width == "stored" and stored <= {"F32", "F64"})


class EngineDecoder:
    """Computes a configuration with the tensors of a checkpoint, in place where it can.

    `width`: matrices as they are stored (quantised ones meet activations rounded to int8 in groups
    of 32), or brought to float32 or bfloat16. `cache` is what keys and values are kept in, by the
    names of `CACHE_FORMATS`; left out, float32 where matrices are, else bfloat16. `threads`: the
    physical cores when None. `notice` is told what a person may want to know: that kernels are
    compiled, which weights have none, that heads of an odd size are kept in float32.
    Raises NoKernelError for what of a configuration the engine cannot compute; CheckpointError for
    missing, extra or misshapen tensors, naming them; ValueError for no threads or a cache that is
    not known.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        *,
        width: Width = "stored",
        cache: Stored | None = None,
        threads: int | None = None,
        notice: Callable[[str], None] = _quiet,
    ) -> None:
        check_computed(config)
        # Kernels read as many bytes as the configuration says, whatever there is.
        check_filled(parameter_shapes(config), tensors)
        if cache not in {None, *CACHE_FORMATS}:
            raise ValueError(f"cache is {cache!r}; known are {', '.join(CACHE_FORMATS)}")
        self.config = config
        self.stored: Stored = cache or ("F32" if _all_float32(tensors, width) else "BF16")
        if any(Kept.of(layer.attention).key % 2 for layer in config.layers):
            if cache not in {None, "F32"}:
                notice("heads of an odd size: their keys and values are kept in float32")
            self.stored = "F32"
        self._code = library(notice)
        self._team = team(physical_cores() if threads is None else threads)
        self._weights = weights = Weights(tensors, width, notice)
        self._plan = Plan(config, weights, self._code, self._team.threads, self.stored)
        self._prefill: PrefillPlan | None = None
        self.weigh = Weigher(self._code)
        # What a pass is told, and the memory that it works in, are the plans'.
        self._lock = threading.Lock()
        self._angles = [Angles(rotary) for rotary in self._plan.rotaries]
        self._table = position_rows(config, weights)

    def new_cache(
        self, *, capacity: int | None = None, rotary_length: int | None = None
    ) -> TextCache:
        """A cache for one text."""
        return TextCache(self.config, self.stored, capacity=capacity, rotary_length=rotary_length)

    def take(
        self,
        caches: Sequence[TextCache],
        tokens: Sequence[Sequence[int]],
        *,
        every: bool = False,
        prompts: bool = False,
    ) -> list[NDArray[np.float32]]:
        """Go on with each text → the logits after its last token, (1, V), or `every` one's, (T, V).

        `prompts`: with it each text is a prompt, computed in such passes as the whole of it would
        be, so that how much of it was held makes no difference, not to the last bit.
        Raises ValueError for a text without new tokens, tokens that the model does not know, or a
        cache of another configuration; CacheFullError beyond a capacity. Nothing is changed then.
        """
        with self._lock:
            return self._take(caches, tokens, every, prompts)

    def _take(
        self,
        caches: Sequence[TextCache],
        tokens: Sequence[Sequence[int]],
        every: bool,
        prompts: bool,
    ) -> list[NDArray[np.float32]]:
        self._check(caches, tokens)
        for cache, new in zip(caches, tokens, strict=True):
            cache.reserve(len(new))
        again = [self._begin(cache, new) for cache, new in zip(caches, tokens, strict=True)]
        # Of each text, the first token whose logits are wanted.
        wanted = [
            len(whole) - (len(new) if every else 1)
            for whole, new in zip(again, tokens, strict=True)
        ]
        # Long and short ones apart, so that what comes out for one does not depend on the others.
        before = [cache.length if prompts else 0 for cache in caches]
        long = [held + len(new) >= _FROM for held, new in zip(before, again, strict=True)]
        results: list[list[NDArray[np.float32]]] = [[] for _ in caches]
        for many in (True, False):
            texts = [text for text, is_long in enumerate(long) if is_long is many]
            if texts:
                plan = self._plan_for_many() if many else self._plan
                for runs in _passes([(text, again[text]) for text in texts], plan.rows):
                    self._pass(plan, caches, runs, wanted, results)
        return [np.concatenate(parts) for parts in results]

    def _begin(self, cache: TextCache, new: Sequence[int]) -> list[int]:
        """The tokens to compute: the new ones, or all where the cached keys no longer fit."""
        length = cache.rotary_length or cache.length + len(new)
        stale = cache.length and any(
            rotary.scaling.regime(cache.filled_at) != rotary.scaling.regime(length)
            for rotary in self._plan.rotaries
        )
        again = [*cache.tokens, *new] if stale else list(new)
        if stale:
            cache.tokens.clear()
        cache.filled_at = length
        return again

    def _plan_for_many(self) -> PrefillPlan:
        """The plan for passes of many rows, made when it is first needed."""
        if self._prefill is None:
            self._prefill = PrefillPlan(
                self.config, self._weights, self._code, self._team.threads, self.stored
            )
        return self._prefill

    def _pass(
        self,
        plan: Plan,
        caches: Sequence[TextCache],
        runs: Sequence[_Run],
        wanted: Sequence[int],
        results: list[list[NDArray[np.float32]]],
    ) -> None:
        """Compute some tokens of some texts, and hand out the logits that are wanted."""
        inputs, chosen, first = plan.inputs, [], 0
        for text, start, tokens in runs:
            cache, rows = caches[text], slice(first, first + len(tokens))
            places = np.arange(cache.length, cache.length + len(tokens))
            inputs.tokens[rows], inputs.places[rows] = tokens, places
            inputs.lengths[rows], inputs.room[rows] = places + 1, cache.room
            inputs.keys[:, rows], inputs.values[:, rows] = cache.addresses[:, :, None]
            for which, angles in enumerate(self._angles):
                cos, sin = inputs.cos[which][rows], inputs.sin[which][rows]
                angles.write(cache.length, cache.filled_at, cos, sin)
            if inputs.positions is not None and self._table is not None:
                inputs.positions[rows] = [self._table(int(place)) for place in places]
            unwanted = max(0, wanted[text] - start)
            chosen.append(range(first + unwanted, rows.stop))
            first = rows.stop
        logits = plan.run(self._team, first, [row for each in chosen for row in each])
        for text, _, tokens in runs:
            # Not before: who is interrupted must not go on from keys that were never written.
            caches[text].tokens.extend(tokens)
        first = 0
        for (text, _, _), each in zip(runs, chosen, strict=True):
            if each:
                results[text].append(logits[first : first + len(each)])
                first += len(each)

    def _check(self, caches: Sequence[TextCache], tokens: Sequence[Sequence[int]]) -> None:
        if len(caches) != len(tokens) or len({id(cache) for cache in caches}) != len(caches):
            raise ValueError(f"{len(tokens)} texts for {len(caches)} caches; give each its own")
        for cache, new in zip(caches, tokens, strict=True):
            same = cache.config is self.config or cache.config == self.config
            if not same or cache.stored != self.stored:
                raise ValueError("a cache was made for another decoder; make one with new_cache")
            end = cache.length + len(new)
            if self.config.position_table == "learned" and end > self.config.max_positions:
                raise ValueError(
                    f"position {end - 1} is outside the learned table, which holds 0 to "
                    f"{self.config.max_positions - 1}"
                )
            if not new:
                raise ValueError("a text has no new tokens; give at least one")
            for token in new:
                if not 0 <= token < self.config.vocab_size:
                    raise ValueError(f"token {token} is none of 0 to {self.config.vocab_size - 1}")
