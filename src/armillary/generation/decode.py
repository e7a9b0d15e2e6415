"""One request on its way from prompt to text: what was asked, what came so far, what comes next.

Knows nothing of decoders, caches or the other requests of a batch: it is handed the logits of its
next position and answers with the token that it takes. Everything that a request's text depends
on is in here, so a batch cannot change it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from armillary.config import DecoderConfig
from armillary.errors import UserError
from armillary.generation.sampling import (
    Logits,
    SamplingConfig,
    Weigh,
    choose,
    generator,
    likeliest,
    log_probabilities,
    temperature,
)
from armillary.generation.stream import TextStream
from armillary.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "eos"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, and the likeliest tokens with theirs, best first.

    Natural logarithms of the model's own distribution, before penalty, temperature and filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenEvent:
    """One generated token of the request number `index`, and the text that it made certain.

    `finish_reason` is set on a request's last event: "eos" for an end-of-sequence token, which is
    reported and has no text; "stop" for a stop string; "length" for the last of `max_tokens`.
    """

    index: int
    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


class Request:
    """The state of one request.

    `eos_ids` are the tokens that end it; `weigh` is the sampler's step of the temperature.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        config: SamplingConfig,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        weigh: Weigh = temperature,
    ) -> None:
        self.index = index
        self.prompt = list(prompt)
        self.config = config
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._eos_ids = frozenset() if config.ignore_eos else frozenset(eos_ids)
        self._random = None if config.greedy else generator(config.seed)
        self._stream = TextStream(tokenizer, config.stop, self.prompt)
        self._weigh = weigh
        self._seen: NDArray[np.bool_] | None = None

    @property
    def full_length(self) -> int:
        """Tokens of prompt and completion when it runs to `max_tokens`."""
        return len(self.prompt) + self.config.max_tokens

    def take(self, logits: Logits) -> TokenEvent:
        """Choose the next token. Shape: logits (V,)."""
        seen = self._mark_seen(logits) if self.config.repetition_penalty != 1 else None
        draw = 0.0 if self._random is None else float(self._random.random())
        token_id = choose(logits, self.config, draw, seen, self._weigh)
        self.token_ids.append(token_id)
        text = self._read(token_id)
        logprob = self._logprob(logits, token_id)
        return TokenEvent(self.index, token_id, text, self.finish_reason, logprob)

    def _read(self, token_id: int) -> str:
        """Show the token's text, and find out whether it is the last."""
        if token_id in self._eos_ids:
            self.finish_reason = "eos"
            return self._stream.finish()
        text = self._stream.push(token_id)
        out_of_tokens = len(self.token_ids) == self.config.max_tokens
        if out_of_tokens:
            text += self._stream.finish()
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif out_of_tokens:
            self.finish_reason = "length"
        return text

    def _mark_seen(self, logits: Logits) -> NDArray[np.bool_]:
        """Mark the tokens of prompt and completion, (V,)."""
        if self._seen is None:
            self._seen = np.zeros(len(logits), np.bool_)
            self._seen[self.prompt] = True
        self._seen[self.token_ids[-1:]] = True
        return self._seen

    def _logprob(self, logits: Logits, token_id: int) -> TokenLogprob | None:
        if self.config.logprobs is None:
            return None
        all_logprobs = log_probabilities(logits)
        top: list[int] = likeliest(logits, self.config.logprobs).tolist()
        return TokenLogprob(
            token_id,
            float(all_logprobs[token_id]),
            tuple((other, float(all_logprobs[other])) for other in top),
        )


def check_prompt(prompt: Sequence[int], config: SamplingConfig, model: DecoderConfig) -> None:
    """Raise UserError for a prompt that the model cannot go on from; nothing is ever cut.

    Prompt and completion must fit into the model's window (cases 122 and 123).
    """
    if not prompt:
        raise UserError(
            "the prompt is empty, and this tokenizer puts no token before a text; "
            "give at least one character"
        )
    for place, token_id in enumerate(prompt):
        if not 0 <= token_id < model.vocab_size:
            raise UserError(
                f"token {place} of the prompt is {token_id}; "
                f"the model knows tokens 0 to {model.vocab_size - 1}"
            )
    room = model.max_positions - len(prompt)
    if room < 1:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, but the model's window of "
            f"{model.max_positions} has to hold prompt and completion; shorten the prompt"
        )
    if config.max_tokens > room:
        raise UserError(
            f"max_tokens is {config.max_tokens}, but after a prompt of {len(prompt)} tokens the "
            f"model's window of {model.max_positions} has room for {room}; ask for {room} or fewer"
        )
