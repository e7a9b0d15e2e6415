"""A context and what follows it, texts → the tokens of each, cut where lm-eval cuts them.

What is scored must be the tokens that the whole text has, not those of two texts put together: the
context's tokens are taken from the whole's front. One beginning stands before both, once, and only
where the tokenizer's own rule for raw text has one.
Source: EleutherAI's lm-evaluation-harness 0.4.13, `TemplateLM` and `HFLM`.
"""

from collections.abc import Iterator, Sequence

from armillary.errors import UserError
from armillary.evaluation.scoring import Continuation, Scored, Scorer
from armillary.tokenizer import Tokenizer

Pair = tuple[tuple[int, ...], tuple[int, ...]]


def prefix_token(tokenizer: Tokenizer) -> int:
    """What stands before a text that has nothing before it: BOS, else the end-of-text token.

    Raises UserError when the tokenizer has neither.
    """
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    if tokenizer.eos_ids:
        return tokenizer.eos_ids[0]
    raise UserError(
        "the tokenizer has neither BOS nor an end-of-text token to begin a text with; "
        "name one in its tokenizer_config.json"
    )


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Return the tokens of the context, one at least, and those of its continuation.

    White space at the context's end belongs to the continuation, since tokens begin with theirs. An
    empty context is the `prefix_token` alone.
    Raises UserError when nothing is left of the continuation: a token that reaches over the border
    holds it whole, or it has no text.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if kept:
        before = tokenizer.encode(kept)
        after = tokenizer.encode(kept + continuation)[len(before) :]
    else:
        before = [prefix_token(tokenizer)]
        after = tokenizer.encode(continuation, bos=False)
    if not after:
        raise UserError(
            f"{continuation!r} after …{kept[-20:]!r} leaves no token of its own to be scored"
        )
    return tuple(before), tuple(after)


def fitted(pair: Pair, window: int) -> tuple[Pair, int]:
    """Return a pair with what of its context fits the window, and how many tokens were cut off.

    They are cut from its start. Raises UserError when the continuation leaves room for none.
    """
    context, continuation = pair
    room = window - len(continuation)
    if room < 1:
        raise UserError(
            f"a continuation of {len(continuation)} tokens and one before it do not fit the "
            f"window of {window}"
        )
    cut = max(0, len(context) - room)
    return (context[cut:], continuation), cut


def score_pairs(scorer: Scorer, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]:
    """Score each continuation after its context, those that share a context in one question.

    Gives each pair's number and score as they come: contexts that begin alike are asked one after
    the other, so that what they share can be kept.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for number, (context, _) in enumerate(pairs):
        sharing.setdefault(context, []).append(number)
    for context, numbers in sorted(sharing.items()):
        asked = [Continuation(pairs[n][1], len(pairs[n][1])) for n in numbers]
        yield from zip(numbers, scorer.score(context, asked), strict=True)
