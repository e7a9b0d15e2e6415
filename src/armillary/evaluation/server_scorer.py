"""A model behind an OpenAI-compatible server (/v1/completions) as a scorer.

The server is sent token ids and asked to echo them with their log-probabilities. vLLM does that.
llama.cpp's server does not score prompts (it refuses `echo`, or answers for what it generates
alone), and llama-cpp-python's takes no token ids; both are told apart from an answer by what comes
back, never scored in silence. Evaluate a GGUF file directly instead.

Every answer is held against what was asked: as many prompt tokens, a log-probability for each, and
the ids themselves where the server says them.
"""

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from armillary.errors import UserError
from armillary.evaluation.scoring import Continuation, Scored, check_question

TIMEOUT_SECONDS = 600.0  # of silence: a long prompt is answered after it is computed
TRIES = 4
ANSWER_LIMIT = 1 << 30  # bytes
_AGAIN = {408, 429, 502, 503, 504}
_TOKEN_ID = re.compile(r"token_id:(\d+)")


class ServerScorer:
    """Scores with a server at `url` (http://host:port, with or without /v1).

    model       as the server calls it; None takes the one that it serves
    vocab_size  V of its tokenizer, with whose ids it is asked
    window      the most tokens of a context and a continuation; None takes what the server says,
                less the one that it insists on generating
    key         sent as a bearer token
    Raises UserError in one line for a server that cannot be asked.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        model: str | None = None,
        window: int | None = None,
        key: str | None = None,
        pause: float = 1.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: is no http:// or https:// address of a server")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json", "User-Agent": "armillary"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._pause = pause
        self._vocab_size = vocab_size
        if model is None or window is None:
            served = self._served(model)
            model = str(served["id"])
            window = window if window is not None else self._stated_window(served)
        self.model, self._window = model, window

    @property
    def window(self) -> int:
        """The most tokens that a context and a continuation may be together."""
        return self._window

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    def begin(self) -> None:
        """Nothing is kept here."""

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        """See `Scorer`. Raises UserError for a server that does not score what it is sent."""
        check_question(context, continuations, self.window)
        prompts = [[*context, *each.tokens] for each in continuations]
        answer = self._ask("/completions", self._request(prompts))
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != len(prompts):
            raise UserError(
                f"{self.url}: {len(prompts)} prompts were sent, and not as many answered"
            )
        used = answer.get("usage") or {}
        sent = sum(map(len, prompts))
        if used.get("prompt_tokens", sent) != sent:
            raise UserError(
                f"{self.url}: {sent} prompt tokens were sent, and {used['prompt_tokens']} read; "
                "the server cuts prompts or encodes them anew"
            )
        ordered = sorted(choices, key=lambda choice: int(choice.get("index", 0)))
        return [
            self._scored(choice, prompt, each.scored)
            for choice, prompt, each in zip(ordered, prompts, continuations, strict=True)
        ]

    def _request(self, prompts: list[list[int]]) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompts,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,  # some servers take 0 for as many as they like
            "temperature": 0,
            # vLLM's: two tokens with the same text would be one entry otherwise
            "return_tokens_as_token_ids": True,
        }

    def _scored(self, choice: Mapping[str, Any], prompt: list[int], scored: int) -> Scored:
        found = choice.get("logprobs") or {}
        logprobs, best = found.get("token_logprobs") or [], found.get("top_logprobs") or []
        names = found.get("tokens") or []
        first, last = len(prompt) - scored, len(prompt)
        if len(logprobs) < last or len(best) < last or None in logprobs[first:last]:
            raise UserError(
                f"{self.url}: gives no log-probabilities of the prompt (echo with logprobs), which "
                "scoring needs; vLLM's server does, and a GGUF file can be evaluated directly"
            )
        for position, (token, name) in enumerate(zip(prompt, names, strict=False)):
            said = _TOKEN_ID.fullmatch(name)
            if said is not None and int(said[1]) != token:
                raise UserError(
                    f"{self.url}: token {position} was sent as {token} and read as {said[1]}"
                )
        own = np.array(logprobs[first:last], dtype=np.float64)
        if np.isnan(own).any():
            raise UserError(f"{self.url}: gives log-probabilities that are no numbers")
        greatest = [max(entry.values(), default=-np.inf) for entry in best[first:last]]
        return Scored(own, own >= np.array(greatest))

    def _served(self, model: str | None) -> Mapping[str, Any]:
        served = self._ask("/models", None).get("data") or []
        for entry in served:
            if model in {None, entry["id"]}:
                return dict(entry)
        names = ", ".join(str(entry["id"]) for entry in served) or "none"
        raise UserError(f"{self.url}: does not serve {model or 'a model'}; it serves {names}")

    def _stated_window(self, served: Mapping[str, Any]) -> int:
        stated = served.get("max_model_len")
        if not isinstance(stated, int):
            raise UserError(f"{self.url}: does not say its window; give it with window=")
        return stated - 1

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request, again where that may help, and return the answer's JSON object."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        for attempt in range(1, TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                    text = answer.read(ANSWER_LIMIT + 1)
                break
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}: {_said(error)}"
                if error.code not in _AGAIN:
                    raise UserError(f"{self.url}{path}: {reason}") from error
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if attempt == TRIES:
                raise UserError(f"{self.url}{path}: no answer in {TRIES} tries ({reason})")
            time.sleep(self._pause * attempt)
        try:
            parsed = json.loads(text) if len(text) <= ANSWER_LIMIT else None
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise UserError(f"{self.url}{path}: answered with something that is no JSON object")
        return parsed


def _said(error: urllib.error.HTTPError) -> str:
    """What a server's refusal says, in one line."""
    try:
        text = error.read(4096).decode(errors="replace")
    except OSError:
        return "no reason given"
    try:
        said = json.loads(text)
        inner = said.get("error", said) if isinstance(said, dict) else said
        text = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    except ValueError:
        pass
    return " ".join(text.split())[:300] or "no reason given"
