"""Training a byte-level BPE vocabulary (Sennrich et al. 2016, on the bytes of a text).

Every text can be encoded and comes back as it was, since each byte is a token. Texts are cut into
words as Llama 3 does, which GGUF files have a name for.
"""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from armillary.errors import UserError
from armillary.files import write_json
from armillary.tokenizer import Tokenizer
from armillary.tokenizer.encoder import byte_alphabet
from armillary.tokenizer.pretokenizers import PRE_TOKENIZERS

END_OF_TEXT = "<|endoftext|>"
_WORDS = PRE_TOKENIZERS["smaug-bpe"].patterns  # Llama 3's, without its rule for BOS


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    specials: Sequence[str] = (END_OF_TEXT,),
    min_frequency: int = 2,
) -> Tokenizer:
    """Learn a vocabulary from texts, which are read once and not kept.

    vocab_size      ids in all: control tokens first, the 256 bytes, then what is learnt. Fewer when
                    the texts have no more pairs that occur `min_frequency` times
    specials        control tokens; the first one ends a text

    The same texts give the same vocabulary. Raises UserError when there is no room for the bytes,
    for control tokens that cannot be told apart, and when there is no text.
    """
    _check(vocab_size, specials)
    seen = False

    def noted() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen = seen or bool(text)
            yield text

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(words), "isolated") for words in _WORDS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(specials),
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(noted(), trainer)
    if not seen:
        raise UserError("there is no text to learn a vocabulary from")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        made.save(str(path))
        write_json(
            path.with_name("tokenizer_config.json"),
            {"eos_token": specials[0], "add_bos_token": False},
        )
        return Tokenizer.from_file(path)


def _check(vocab_size: int, specials: Sequence[str]) -> None:
    if not specials:
        raise UserError("a vocabulary needs a control token that ends a text")
    for text in specials:
        if not text or text in byte_alphabet() or specials.count(text) > 1:
            raise UserError(
                f"control token {text!r}: must be longer than a character and named once"
            )
    least = len(byte_alphabet()) + len(specials)
    if vocab_size < least:
        raise UserError(
            f"vocab_size {vocab_size}: must be at least {least}, 256 bytes and "
            f"{len(specials)} control tokens"
        )
