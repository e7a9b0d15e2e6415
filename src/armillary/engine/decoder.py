"""A decoder on the CPU without torch: tokens and caches of texts in, logits out."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.parameters import check_filled, parameter_shapes
from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig
from armillary.engine.cache import TextCache
from armillary.engine.kv_layout import Stored
from armillary.engine.library import library
from armillary.engine.plan import ROWS, Plan
from armillary.engine.positions import Angles, position_rows
from armillary.engine.threads import physical_cores, team
from armillary.engine.weights import Weights, Width


def _quiet(_: str) -> None:
    """For who wants no notices."""


def _all_float32(tensors: Mapping[str, StoredTensor], width: Width) -> bool:
    stored = {tensor.encoding for tensor in tensors.values() if len(tensor.shape) == 2}
    return width == "float32" or (width == "stored" and stored <= {"F32", "F64"})


class EngineDecoder:
    """Computes a configuration with the tensors of a checkpoint, in place where it can.

    `width`: matrices as they are stored (quantised ones meet activations rounded to int8 in groups
    of 32), or brought to float32 or bfloat16. `cache` is the type that keys and values are kept in;
    float32 where matrices are, else bfloat16. `threads`: the physical cores when None. `notice` is
    told what a person may want to know: that kernels are compiled, which weights have none.
    Raises CheckpointError for missing, extra or misshapen tensors, naming them; ValueError for no
    threads.
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
        # Kernels read as many bytes as the configuration says, whatever there is.
        check_filled(parameter_shapes(config), tensors)
        self.config = config
        self.stored: Stored = cache or ("F32" if _all_float32(tensors, width) else "BF16")
        if any(layer.attention.d_head % 2 for layer in config.layers):
            self.stored = "F32"
        code = library(notice)
        self._team = team(physical_cores() if threads is None else threads)
        weights = Weights(tensors, width, notice)
        self._plan = Plan(config, weights, code, self._team.threads, self.stored)
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
    ) -> list[NDArray[np.float32]]:
        """Go on with each text → the logits after its last token, (1, V), or `every` one's, (T, V).

        Raises ValueError for a text without new tokens, tokens that the model does not know, or a
        cache of another configuration; CacheFullError beyond a capacity. Nothing is changed then.
        """
        self._check(caches, tokens)
        for cache, new in zip(caches, tokens, strict=True):
            cache.reserve(len(new))
        again = [self._begin(cache, new) for cache, new in zip(caches, tokens, strict=True)]
        work = [(text, token) for text, whole in enumerate(again) for token in whole]
        # Of each text, the first token whose logits are wanted.
        wanted = [
            len(whole) - (len(new) if every else 1)
            for whole, new in zip(again, tokens, strict=True)
        ]
        results: list[list[NDArray[np.float32]]] = [[] for _ in caches]
        seen = [0] * len(caches)
        for start in range(0, len(work), ROWS):
            self._pass(caches, work[start : start + ROWS], seen, wanted, results)
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

    def _pass(
        self,
        caches: Sequence[TextCache],
        work: Sequence[tuple[int, int]],
        seen: list[int],
        wanted: Sequence[int],
        results: list[list[NDArray[np.float32]]],
    ) -> None:
        inputs, outputs = self._plan.inputs, list[int]()
        for row, (text, token) in enumerate(work):
            cache = caches[text]
            place = cache.length
            inputs.tokens[row], inputs.places[row] = token, place
            inputs.lengths[row], inputs.room[row] = place + 1, cache.room
            inputs.keys[:, row], inputs.values[:, row] = cache.addresses
            for which, angles in enumerate(self._angles):
                angles.write(place, cache.filled_at, inputs.cos[which][row], inputs.sin[which][row])
            if inputs.positions is not None and self._table is not None:
                inputs.positions[row] = self._table(place)
            cache.tokens.append(token)
            if seen[text] >= wanted[text]:
                inputs.chosen[len(outputs)] = row
                outputs.append(text)
            seen[text] += 1
        inputs.rows[0], inputs.outputs[0] = len(work), len(outputs)
        self._team.run(self._plan.program)
        for number, text in enumerate(outputs):
            results[text].append(self._plan.logits[number : number + 1].copy())

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
