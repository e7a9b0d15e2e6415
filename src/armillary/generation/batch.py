"""The generation loop: several requests, one engine.

Knows nothing of how tokens are chosen or made into text (decode.py), nor of how they are computed
(engine.py). Each request gets what it gets alone; one that has ended leaves the batch.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from armillary.generation.decode import Request, TokenEvent, check_prompt
from armillary.generation.engine import Engine, Texts
from armillary.generation.sampling import SamplingConfig, Weigh, temperature
from armillary.generation.speculation import Proposer
from armillary.tokenizer import Tokenizer


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[SamplingConfig],
    *,
    eos_ids: Collection[int] | None = None,
    cache: Any = None,
    proposer: Proposer | None = None,
    weigh: Weigh = temperature,
) -> Iterator[TokenEvent]:
    """Continue each prompt under its own options, a token of every request at a time.

    A request's events come in order, the last with its `finish_reason`; dropping the iterator
    stops the work. `eos_ids` replace the tokenizer's own.

    `cache`, for a single prompt, is one of the engine's to go on from: what it shares with the
    prompt is not computed again, and in the end it holds prompt and completion, save the last
    token. Without one, rules whose frequencies vary with the length see prompt + max_tokens from
    the first token on, so that every step equals a whole pass with that `rotary_length`.

    `proposer`, for a single prompt, guesses what comes next, for the engine to check several tokens
    at once; the text is the one that comes without it. `weigh` takes the sampler's step of the
    temperature.

    Raises UserError for a prompt that the model cannot go on from, before anything is computed.
    """
    if len(prompts) != len(configs) or not prompts:
        raise ValueError(f"{len(prompts)} prompts and {len(configs)} configs; give one for each")
    for what, given in (("a cache", cache), ("a proposer", proposer)):
        if given is not None and len(prompts) != 1:
            raise ValueError(f"{what} serves one prompt, and {len(prompts)} were given")
    for prompt, config in zip(prompts, configs, strict=True):
        check_prompt(prompt, config, engine.config)
    eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
    requests = [
        Request(index, prompt, config, tokenizer, eos_ids, weigh)
        for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]
    texts = engine.texts([request.full_length for request in requests], cache)
    return _run(texts, requests) if proposer is None else _guessing(texts, requests[0], proposer)


def _run(texts: Texts, requests: list[Request]) -> Iterator[TokenEvent]:
    logits = texts.begin([request.prompt for request in requests])
    while True:
        for request, row in zip(requests, logits, strict=True):
            yield request.take(row)
        going = [row for row, request in enumerate(requests) if request.finish_reason is None]
        if not going:
            return
        if len(going) < len(requests):
            texts.keep(going)
            requests = [requests[row] for row in going]
        logits = texts.step([request.token_ids[-1] for request in requests])


def _guessing(texts: Texts, request: Request, proposer: Proposer) -> Iterator[TokenEvent]:
    """One request, of which a pass checks several guesses."""
    event = request.take(texts.begin([request.prompt])[0])
    proposer.extend([*request.prompt, event.token_id])
    yield event
    while request.finish_reason is None:
        left = request.config.max_tokens - len(request.token_ids)
        guesses = proposer.propose(left - 1)
        accepted = 0
        events = []
        for logits in texts.steps([request.token_ids[-1], *guesses]):
            events.append(request.take(logits))
            proposer.extend([events[-1].token_id])
            came_true = accepted < len(guesses) and guesses[accepted] == events[-1].token_id
            if request.finish_reason is not None or not came_true:
                break
            accepted += 1
        texts.take_back(len(guesses) - accepted)
        proposer.learn(len(guesses), accepted)
        yield from events
