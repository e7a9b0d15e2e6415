"""A causal model of transformers as a scorer; the object is enough, nothing of it is imported.

What continuations share is computed once where that cannot change their numbers: the model must
hand out a cache and take it back, and its rotary frequencies must not move with the length. The
cache is copied for each continuation, so no kind of layer needs to be able to take tokens back.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from armillary.evaluation.scoring import Continuation, Scored, check_question

_MOVING = {"dynamic", "longrope", "su"}  # rules whose frequencies depend on the length
_CACHES = ("cache", "past_key_values")  # what newer and older models call it


class TransformersScorer:
    """Scores with anything that is called as a transformers causal model is.

    model   gives `.logits` for `input_ids` and has `.config`; it is put into evaluation mode
    window  the most tokens that it may be given; None takes its configuration's
    Raises ValueError when the configuration does not say one.
    """

    def __init__(self, model: Any, window: int | None = None) -> None:
        self.model = model.eval()
        config = model.config
        self._config = config.get_text_config() if hasattr(config, "get_text_config") else config
        stated: int | None = getattr(self._config, "max_position_embeddings", None)
        chosen = stated if window is None else window
        if chosen is None:
            raise ValueError("the model's configuration states no window; pass window=")
        self._window = chosen
        known = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHES if name in known), None)
        self._keeps_logits = "logits_to_keep" in known
        self._moving = _moves(self._config.to_dict())
        if self._moving:
            self._cache_name = None
        self._held: tuple[int, ...] = ()
        self._cache: Any = None

    @property
    def window(self) -> int:
        """The most tokens that a context and a continuation may be together."""
        return self._window

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self._config.vocab_size)

    def begin(self) -> None:
        """Forget what was kept of earlier contexts."""
        self._held, self._cache = (), None

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        """See `Scorer`."""
        import torch

        check_question(context, continuations, self.window)
        # The last token of the context is what the first prediction comes from.
        shared = tuple(context[:-1])
        with torch.no_grad():
            if (len(continuations) > 1 or self._held == shared) and self._holds(shared):
                return [self._score(context[-1:], each, self._cache) for each in continuations]
            return [self._score(context, each, None) for each in continuations]

    def _holds(self, tokens: tuple[int, ...]) -> bool:
        """Fill the cache with the tokens, unless it holds them; say whether there is a cache."""
        if self._cache_name is None or not tokens:
            return False
        if self._held != tokens:
            self.begin()  # the old one goes before the new one comes
            self._cache = getattr(self._call(tokens, 1, use_cache=True), self._cache_name, None)
            if self._cache is None:
                self._cache_name = None
                return False
            self._held = tokens
        return True

    def _score(self, context: Sequence[int], continuation: Continuation, cache: Any) -> Scored:
        import torch

        tokens = [*context, *continuation.tokens]
        wanted = torch.tensor(continuation.tokens[-continuation.scored :])
        # The last token's own logits are not wanted, but rules may go by the length with it.
        needed = continuation.scored + 1
        if cache is None:
            if self._moving:  # a short pass: the model keeps its longest length's frequencies
                self._call(tokens[:1], 1, use_cache=False)
            output = self._call(tokens, needed, use_cache=False)
        else:
            assert self._cache_name is not None
            more = {self._cache_name: copy.deepcopy(cache), "use_cache": True}
            output = self._call(tokens, needed, **more)
        logits = output.logits[0, -needed:-1].cpu()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
        return Scored(
            np.asarray(logprobs.double().numpy()),
            np.asarray((logits.argmax(-1) == wanted).numpy()),
        )

    def _call(self, tokens: Sequence[int], logits: int, **more: Any) -> Any:
        """Run the model on a row of tokens; the last `logits` positions need theirs."""
        import torch

        device = next(self.model.parameters()).device
        if self._keeps_logits:  # all of a long context's would take gigabytes
            more["logits_to_keep"] = logits
        return self.model(input_ids=torch.tensor([list(tokens)], device=device), **more)


def _moves(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names, at any depth, a rotary rule that depends on the length."""
    return any(value in _MOVING for key, value in _entries(config) if key in {"rope_type", "type"})


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if isinstance(entry, str):
                yield key, entry
            else:
                yield from _entries(entry)
