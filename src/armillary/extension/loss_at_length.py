"""The loss of a model at a length under divisors that are tried: what `search` makes smaller."""

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints import Checkpoint
from armillary.config import DecoderConfig
from armillary.diagnosis.frequencies import rotary_groups
from armillary.errors import ConfigError, UserError
from armillary.extension.rules import RuleOptions, extend
from armillary.extension.search import Factors, starting_factors
from armillary.rope_scaling import LongRoPE
from armillary.tokenizer import Tokenizer

if TYPE_CHECKING:
    from armillary.decoder import Decoder

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class LongRoPETarget:
    """A model that is to have divisors: for texts up to `to`, with what else the rule has."""

    config: DecoderConfig
    to: int
    options: RuleOptions

    def rule(self, factors: Factors) -> DecoderConfig:
        """The model's configuration with these divisors for long texts, and none for short ones.

        Raises ConfigError as `extend`.
        """
        divisors = replace(self.options, long_factors=factors, short_factors=(1.0,) * len(factors))
        return extend(self.config, self.to, "longrope", divisors).config

    @property
    def pairs(self) -> int:
        """Channel pairs. Raises ConfigError where layers have different ones."""
        base, d_rotary = self._rotation
        del base
        return d_rotary // 2

    @property
    def factor(self) -> float:
        """By how much the window grows."""
        return self._made.factor

    def starts(self) -> dict[str, Factors]:
        """What other rules divide by."""
        base, d_rotary = self._rotation
        made = self._made
        return starting_factors(base, d_rotary, factor=made.factor, window=made.original_window)

    @property
    def _rotation(self) -> tuple[float, int]:
        groups = rotary_groups(self.config)
        changed = [group for group in groups if group.reads_beyond(self.config.max_positions)]
        kinds = {(group.rotary.base, group.rotary.d_rotary) for group in changed}
        if len(kinds) != 1:
            raise ConfigError(
                f"the layers that read beyond the window rotate in {len(kinds)} ways; one list of "
                "divisors goes with one"
            )
        return kinds.pop()

    @property
    def _made(self) -> LongRoPE:
        config = self.rule((1.0,) * self.pairs)
        rules = (g.rotary.scaling for g in rotary_groups(config))
        return next(rule for rule in rules if isinstance(rule, LongRoPE))


def passages(tokenizer: Tokenizer, text: str, length: int, count: int) -> Ids:
    """Passages of a text, (count, length), as far apart as it allows; fewer where it is short.

    Each begins as the tokenizer begins a text. Raises UserError for a text without one.
    """
    begin = np.array(tokenizer.begin([]), dtype=np.int64)
    ids = np.array(tokenizer.encode(text, bos=False), dtype=np.int64)
    own = length - len(begin)
    if len(ids) < own:
        raise UserError(
            f"the text has {len(ids):,} tokens, and a passage takes {own:,}; give a longer one"
        )
    count = min(count, len(ids) // own)
    starts = np.linspace(0, len(ids) - own, count).astype(np.int64)
    return np.stack([np.concatenate([begin, ids[start : start + own]]) for start in starts])


@dataclass(frozen=True)
class LossAtLength:
    """Nats per token of passages (K, N) under divisors: what `search` takes as its fitness.

    Weights are read once and shared by all that is tried.
    """

    target: LongRoPETarget
    decoder: "Decoder"
    ids: Ids
    device: str = "cpu"

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: LongRoPETarget, ids: Ids) -> Self:
        """Read the checkpoint's weights as float32, onto a GPU where there is one."""
        import torch

        from armillary.weights import build_filled

        device = "cuda" if torch.cuda.is_available() else "cpu"
        decoder = build_filled(checkpoint.config, checkpoint.tensors, device=device)
        return cls(target, decoder, ids, device)

    def __call__(self, factors: Factors) -> float:
        """The loss, weighted by tokens."""
        return self.under(self.target.rule(factors))

    def under(self, config: DecoderConfig) -> float:
        """The loss of the same weights under any configuration."""
        import torch

        from armillary.decoder import Decoder
        from armillary.training.loss import next_token_labels, next_token_loss

        with torch.device("meta"):
            decoder = Decoder(config)
        decoder.load_state_dict(self.decoder.state_dict(), assign=True)
        decoder.eval()
        nats, count = 0.0, 0
        with torch.no_grad():
            for passage in self.ids:
                tokens = torch.from_numpy(passage)[None].to(self.device)
                labels = next_token_labels(tokens)
                loss = next_token_loss(decoder, decoder.hidden(tokens), labels)
                nats, count = nats + float(loss.cross_entropy), count + int(loss.count)
        return nats / count

    @property
    def checksum(self) -> str:
        """Of the passages: the same checksum, the same text."""
        return hashlib.sha256(np.ascontiguousarray(self.ids, "<i8").tobytes()).hexdigest()[:16]
