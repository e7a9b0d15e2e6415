"""Whether a tokenizer is the one that the model was trained with.

Counts of tokens prove little: many vocabularies have 49,152 entries. But a trained embedding puts
spellings of a word (" the" beside "the", "The" beside "the") near each other, and does so by their
ids. With another tokenizer those pairs are no nearer than any others.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.diagnosis.findings import Check, Finding
from armillary.tokenizer import Tokenizer

_FEWEST_PAIRS = 100
_LEAST_SHARE = 0.6
"""Of chance it is a half, of the right tokenizer more than nine in ten."""
_SHORTEST = 3


@dataclass(frozen=True)
class Kinship:
    """How often two spellings of a word are nearer to each other than to another's."""

    pairs: int
    share: float


def check_vocabulary(
    checkpoint: Checkpoint, embedding: NDArray[np.float32]
) -> tuple[list[Check], list[Finding]]:
    """Compare counts and ids, and ask the embedding."""
    tokenizer, size = checkpoint.tokenizer, checkpoint.config.vocab_size
    if tokenizer is None:
        return [Check("tokenizer", None, "there is none")], []
    findings: list[Finding] = []
    ordinary = _ordinary_tokens(tokenizer)
    counted = f"{tokenizer.vocab_size:,} tokens, {size:,} in the model"
    fits = ordinary <= size
    if not fits:
        findings.append(
            Finding(
                code="tokenizer",
                fault=f"the tokenizer is another model's: its ids go up to {ordinary - 1:,}, the "
                f"embedding's to {size - 1:,}",
                remedy="take the tokenizer of the checkpoint that the weights are from",
            )
        )
    checks = [Check("vocabulary", fits, counted)]
    kin = kinship(tokenizer, embedding)
    if kin is None:
        checks.append(Check("spellings", None, "too few words of which both spellings are tokens"))
    else:
        holds = kin.share >= _LEAST_SHARE
        seen = (
            f"{kin.share:.1%} of {kin.pairs:,} words are nearer to their other spelling than to "
            "another word (by chance 50 %)"
        )
        checks.append(Check("spellings", holds, seen))
        if not holds and fits:
            findings.append(
                Finding(
                    code="tokenizer",
                    fault="the tokenizer is not the one that the embedding was trained with",
                    evidence=seen,
                    remedy="take the tokenizer of the checkpoint that the weights are from",
                )
            )
    check, found = check_beginning(checkpoint)
    return [*checks, check], findings + found


def _ordinary_tokens(tokenizer: Tokenizer) -> int:
    """One more than the highest id that a text can be cut into."""
    last = tokenizer.vocab_size - 1
    while last > 0 and tokenizer.is_special(last):
        last -= 1
    return last + 1


def kinship(tokenizer: Tokenizer, embedding: NDArray[np.float32], seed: int = 0) -> Kinship | None:
    """Compare spellings of words by the cosine of their embeddings; None for too few words.

    Shapes: embedding (V, d).
    """
    ids = {
        tokenizer.token_bytes(token): token
        for token in range(min(tokenizer.vocab_size, len(embedding)))
        if not tokenizer.is_special(token)
    }
    words = [
        word
        for word in ids
        if len(word) >= _SHORTEST and word.isascii() and word.isalpha() and word.islower()
    ]
    pairs = [
        (ids[word], ids[other])
        for word in words
        for other in (b" " + word, word.capitalize())
        if other in ids
    ]
    if len(pairs) < _FEWEST_PAIRS:
        return None
    one, other = np.array(pairs).T
    lengths = np.linalg.norm(embedding, axis=1, keepdims=True)
    unit = embedding / np.maximum(lengths, np.finfo(np.float32).tiny)
    strangers = np.random.default_rng(seed).permutation(other)
    near = (unit[one] * unit[other]).sum(axis=1)
    far = (unit[one] * unit[strangers]).sum(axis=1)
    return Kinship(len(pairs), float((near > far).mean()))


def check_beginning(checkpoint: Checkpoint) -> tuple[Check, list[Finding]]:
    """Whether all that states how a text begins and ends states the same."""
    tokenizer, size = checkpoint.tokenizer, checkpoint.config.vocab_size
    assert tokenizer is not None
    stated, own = checkpoint.generation.get("bos_token_id"), tokenizer.bos_id
    names = {number: text for text, number in tokenizer.special_tokens.items()}

    def text(token: int | None) -> str:
        return "none" if token is None else f"{token} ({names.get(token, 'no control token')})"

    seen = f"BOS {text(own)}, EOS {', '.join(map(text, tokenizer.eos_ids)) or 'none'}"
    fault = ""
    if stated is not None and own is None:
        fault = f"BOS is missing from the tokenizer, and the configuration states {text(stated)}"
    elif stated is not None and stated != own:
        fault = f"BOS is {text(own)} to the tokenizer, and {text(stated)} to the configuration"
    elif own is not None and own >= size:
        fault = f"BOS is {text(own)}, which the model does not know"
    if not fault:
        return Check("beginning", True, seen), []
    remedy = "name the token in tokenizer_config.json (bos_token) and in config.json (bos_token_id)"
    return Check("beginning", False, fault), [
        Finding(code="bos", fault=fault, evidence="", remedy=remedy)
    ]
