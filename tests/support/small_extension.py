"""A small language, a decoder that learns it at a short window, and what a longer one costs it.

For the benchmark of the rules and a test of the same at a smaller size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from armillary import Decoder, DecoderConfig
from armillary.extension.rules import RuleName, extend
from armillary.training.loss import next_token_labels, next_token_loss
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.precision import Precision
from armillary.training.schedule import ScheduleConfig, set_learning_rates

BACK = 3


@dataclass(frozen=True)
class Setting:
    """Sizes of the language, the windows and the decoder; its names are `DecoderConfig.uniform`'s.

    Documents of the language hold `topic` of its `symbols` beside what follows from others.
    """

    symbols: int
    topic: int
    window: int
    target: int
    decoder: dict[str, int]

    @property
    def first(self) -> int:
        """Where the positions that are compared begin: in the middle of the target."""
        return self.target // 2


@dataclass(frozen=True)
class Training:
    """Steps of `rows` documents at a learning rate that, past warm-up, comes down by cosine.

    `final` is the share of it that is left at the end; with 1 it stays.
    """

    steps: int
    rows: int
    lr: float
    warmup: int = 0
    final: float = 1.0
    weight_decay: float = 0.0


class Language:
    """Half of the tokens follow from the one three back, half come from a topic of the document.

    Documents are drawn one after another, the same ones for the same seed.
    """

    def __init__(self, setting: Setting, seed: int) -> None:
        self.symbols, self.topic = setting.symbols, setting.topic
        self.generator = torch.Generator().manual_seed(seed)
        self.follower = torch.randperm(self.symbols, generator=self.generator)

    def documents(self, count: int, length: int) -> Tensor:
        """(count, length) int64."""
        topics = torch.rand(count, self.symbols, generator=self.generator).argsort(-1)
        drawn = torch.randint(self.topic, (count, length), generator=self.generator)
        tokens = topics.gather(1, drawn)
        follows = torch.rand(count, length, generator=self.generator) < 0.5
        for place in range(BACK, length):
            followers = self.follower[tokens[:, place - BACK]]
            tokens[:, place] = torch.where(follows[:, place], followers, tokens[:, place])
        return tokens


def train(decoder: Decoder, documents: Tensor, training: Training) -> None:
    """Learn from documents, (steps × rows, T), each once."""
    optimizer = build_optimizer(
        decoder, OptimizerConfig(lr=training.lr, weight_decay=training.weight_decay)
    )
    schedule = ScheduleConfig(steps=training.steps, warmup=training.warmup, final=training.final)
    precision = Precision("float32")
    for step, tokens in enumerate(documents.split(training.rows)):
        set_learning_rates(optimizer, schedule, step)
        loss = next_token_loss(decoder, decoder.hidden(tokens), next_token_labels(tokens))
        precision.backward(loss.total / loss.count)
        precision.step(optimizer, max_norm=1.0)


def trained(setting: Setting, language: Language, training: Training, std: float = 0.02) -> Decoder:
    """A decoder with the short window. Draws on torch's own random numbers."""
    decoder = Decoder(
        DecoderConfig.uniform(
            **setting.decoder,
            vocab_size=setting.symbols,
            max_positions=setting.window,
        )
    )
    decoder.initialise(std)
    train(decoder, language.documents(training.steps * training.rows, setting.window), training)
    return decoder


def extended(decoder: Decoder, rule: RuleName, to: int) -> Decoder:
    """A decoder of the same weights with a longer window."""
    longer = Decoder(extend(decoder.config, to, rule).config)
    longer.load_state_dict(decoder.state_dict())
    return longer


@torch.no_grad()
def losses(decoder: Decoder, documents: Tensor) -> Tensor:
    """(N, T) → nats of all tokens but the first of each document, (N, T − 1)."""
    parts = []
    for tokens in documents.split(8):
        logits = decoder(tokens[:, :-1]).transpose(1, 2)
        parts.append(F.cross_entropy(logits, tokens[:, 1:], reduction="none"))
    return torch.cat(parts)


def far_losses(decoder: Decoder, documents: Tensor, setting: Setting) -> Tensor:
    """(N, target) → nats of the tokens from position `first` on, (N, target − first)."""
    return losses(decoder, documents)[:, setting.first - 1 :]


def cropped_losses(decoder: Decoder, documents: Tensor, setting: Setting) -> Tensor:
    """The same tokens' nats under no more of the text than the short window holds.

    An eighth of a window is scored at a time, under the seven eighths and more before each token.
    """
    stride = setting.window // 8
    ends = range(setting.first + stride, setting.target + 1, stride)
    texts = [documents[:, end - setting.window : end] for end in ends]
    return torch.cat([losses(decoder, text)[:, -stride:] for text in texts], 1)
