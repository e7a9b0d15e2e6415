"""A model of ours for lm-eval to drive, without importing it: its own base class is passed in.

    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    model = as_lm_eval(LM, DecoderScorer(lm.decoder), lm.tokenizer, lm.generate)
    simple_evaluate(model=model, tasks=["hellaswag"])

Texts get one beginning, where the tokenizer wants one, on every path. What does not fit the window
is cut at its start for log-likelihoods, as lm-eval expects, but with a warning that counts it; a
prompt without room for its answer is refused.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from armillary.errors import UserError
from armillary.evaluation.pairs import Pair, encode_pair, fitted, prefix_token, score_pairs
from armillary.evaluation.scoring import Scorer
from armillary.tokenizer import Tokenizer

BATCH = 8  # prompts that are continued together
MAX_TOKENS = 256  # lm-eval's own, where a task does not say
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_PASSED_ON = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


def as_lm_eval(
    base: type, scorer: Scorer, tokenizer: Tokenizer, generate: Callable[..., Any] | None = None
) -> Any:
    """Return an instance of lm-eval's class `base` (lm_eval.api.model.LM) that asks `scorer`.

    `generate(prompts, **options)` is `LanguageModel.generate`; tasks that generate need it.
    """
    kind = type("ArmillaryLM", (_Answers, base), {})
    return kind(scorer, tokenizer, generate)


class _Answers:
    """lm-eval's three questions. A request's `args` are its texts and options."""

    cache_hook: Any  # of lm-eval's class: keeps answers, where it was asked to

    def __init__(
        self, scorer: Scorer, tokenizer: Tokenizer, generate: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self._scorer, self._tokenizer, self._generate = scorer, tokenizer, generate

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval tells caches of requests apart by."""
        return "armillary"

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return of each (context, continuation) its log-probability and whether it is greedy."""
        texts = [request.args for request in requests]
        pairs = [encode_pair(self._tokenizer, *pair) for pair in texts]
        fits = [fitted(pair, self._scorer.window) for pair in pairs]
        _warn_of(sum(cut > 0 for _, cut in fits), self._scorer.window)
        self._scorer.begin()
        answers: dict[int, tuple[float, bool]] = {}
        for number, scored in score_pairs(self._scorer, [pair for pair, _ in fits]):
            answers[number] = scored.total, scored.exact
            self.cache_hook.add_partial("loglikelihood", texts[number], answers[number])
        return [answers[number] for number in range(len(texts))]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each whole text, in windows that score each token once."""
        self._scorer.begin()
        answers = []
        for request in requests:
            windows = list(self._windows(request.args[0]))
            answers.append(sum(each.total for _, each in score_pairs(self._scorer, windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return what the model writes after each prompt, up to a stop string or its length."""
        if self._generate is None:
            raise UserError("this task generates; give as_lm_eval a `generate` as well")
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        answers: dict[int, str] = {}
        for numbers in alike.values():
            options = _options(requests[numbers[0]].args[1])
            for first in range(0, len(numbers), BATCH):
                batch = numbers[first : first + BATCH]
                prompts = [self._prompt(requests[n].args[0], options) for n in batch]
                for number, written in zip(batch, self._generate(prompts, **options), strict=True):
                    answers[number] = written.text
                    request = requests[number]
                    self.cache_hook.add_partial("generate_until", request.args, written.text)
        return [answers[number] for number in range(len(requests))]

    def _prompt(self, text: str, options: Mapping[str, Any]) -> list[int]:
        ids = self._tokenizer.encode(text) or [prefix_token(self._tokenizer)]
        room = self._scorer.window - options["max_tokens"]
        if len(ids) > room:
            raise UserError(
                f"a prompt of {len(ids)} tokens leaves no room for {options['max_tokens']} more in "
                f"the window of {self._scorer.window}; ask for fewer with max_gen_toks"
            )
        return ids

    def _windows(self, text: str) -> Iterator[Pair]:
        """Windows full of new tokens but for the last, which is filled up with old ones."""
        ids = [prefix_token(self._tokenizer), *self._tokenizer.encode(text, bos=False)]
        size = self._scorer.window - 1
        for first in range(1, len(ids), size):
            last = min(first + size, len(ids))
            start = max(0, last - size - 1)
            yield tuple(ids[start:first]), tuple(ids[first:last])


def _options(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's generation options → ours. Raises UserError for one that is not known."""
    rest = dict(wanted)
    lengths = [rest.pop(name) for name in _LENGTHS if rest.get(name) is not None]
    stop = rest.pop("until", None) or ()
    sample, temperature = rest.pop("do_sample", None), rest.pop("temperature", None)
    if sample is None:
        sample = bool(temperature)
    options = {name: rest.pop(name) for name in _PASSED_ON if name in rest}
    if rest:
        raise UserError(f"{next(iter(rest))} is no option of generation here; leave it out")
    return options | {
        "max_tokens": int(lengths[0]) if lengths else MAX_TOKENS,
        "stop": (stop,) if isinstance(stop, str) else tuple(filter(None, stop)),
        "temperature": (1.0 if temperature is None else float(temperature)) if sample else 0.0,
    }


def _warn_of(cut: int, window: int) -> None:
    if cut:
        warnings.warn(
            f"{cut} texts are longer than the window of {window} tokens; their starts were cut off",
            stacklevel=3,
        )
