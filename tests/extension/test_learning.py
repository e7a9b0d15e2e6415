"""What rules do to a model that has learned something, before and after a little more training.

cases.md 45: a rule is judged at short and at long windows, before and after adapting. A window of
48 grows four times here; `benchmarks/extension.py` takes the sizes of extension.md, §6.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from armillary.decoder import Decoder
from armillary.extension.rules import RuleName
from support.small_extension import (
    Language,
    Setting,
    Training,
    cropped_losses,
    extended,
    far_losses,
    losses,
    train,
    trained,
)

# d_head is 32 as there, so that the rules share the channel pairs out much as at the real sizes.
SETTING = Setting(
    symbols=24,
    topic=8,
    window=48,
    target=192,
    decoder={"d_model": 32, "n_layers": 2, "n_heads": 1, "d_ff": 64, "tie_head": True},
)
FIRST_TRAINING = Training(steps=150, rows=16, lr=1e-2, warmup=20, weight_decay=0.1)
ADAPTING = Training(steps=20, rows=4, lr=5e-4)
RULES: tuple[RuleName, ...] = ("none", "linear", "ntk", "yarn", "llama3")


@dataclass(frozen=True)
class Learned:
    """A trained decoder, held-out documents (32, 192), their loss cropped, and more to train on."""

    decoder: Decoder
    documents: torch.Tensor
    cropped: float
    texts: torch.Tensor

    def over_cropping(self, decoder: Decoder) -> float:
        """Nats a token above cropping at positions beyond the old window."""
        return float(far_losses(decoder, self.documents, SETTING).mean()) - self.cropped

    def in_window(self, decoder: Decoder) -> float:
        """Nats a token of texts that the old window holds."""
        return float(losses(decoder, self.documents[:, : SETTING.window]).mean())


@pytest.fixture(scope="module")
def learned() -> Iterator[Learned]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        language = Language(SETTING, seed=1)
        decoder = trained(SETTING, language, FIRST_TRAINING, std=0.05)
    documents = language.documents(32, SETTING.target)
    texts = language.documents(ADAPTING.steps * ADAPTING.rows, SETTING.target)
    cropped = float(cropped_losses(decoder, documents, SETTING).mean())
    yield Learned(decoder, documents, cropped, texts)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def before(learned: Learned) -> dict[RuleName, Decoder]:
    return {rule: extended(learned.decoder, rule, SETTING.target) for rule in RULES}


def test_the_model_has_learned_what_the_language_says(learned: Learned) -> None:
    """Knowing no token before, it would be at ln 24 = 3.18 nats."""
    assert learned.cropped < 2.5


def test_before_adapting_the_better_rule_loses_less_beyond_the_window(
    learned: Learned, before: dict[RuleName, Decoder]
) -> None:
    over = {rule: learned.over_cropping(decoder) for rule, decoder in before.items()}
    assert over["none"] > over["ntk"] + 0.1
    assert over["ntk"] > max(over["yarn"], over["llama3"]) + 0.1
    assert min(over["yarn"], over["llama3"]) > -0.01


def test_before_adapting_only_interpolation_of_all_pairs_harms_short_texts(
    learned: Learned, before: dict[RuleName, Decoder]
) -> None:
    short = learned.in_window(learned.decoder)
    for rule in ("ntk", "yarn", "llama3"):
        assert learned.in_window(before[rule]) < 1.05 * short, rule
    assert learned.in_window(before["linear"]) > 1.3 * short


def test_a_few_steps_bring_the_loss_beyond_the_window_down_to_cropping(
    learned: Learned, before: dict[RuleName, Decoder]
) -> None:
    short = learned.in_window(learned.decoder)
    for rule in ("ntk", "yarn", "llama3"):
        decoder = extended(learned.decoder, rule, SETTING.target)
        train(decoder, learned.texts, ADAPTING)
        assert learned.over_cropping(decoder) < 0.01, rule
        assert learned.in_window(decoder) < 1.03 * short, rule
