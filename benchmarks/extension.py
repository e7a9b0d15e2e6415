"""What each rule does to a small model whose window grows four times, before and after adapting.

A language of 128 symbols: half of the tokens follow from the token three back, half come from a
topic of 48 symbols that is drawn for each document. A decoder of two layers and 0.31 M parameters
trains on documents of 256 tokens, is extended to 1,024 by each rule, and adapts for 20 steps of
4 × 1,024 tokens (linear, that is position interpolation, for 200).

Losses are of the tokens at positions 512 to 1,023 of held-out documents, in nats a token above
those of the same tokens under the 256 before them alone: above cropping, which a longer window has
to beat. Cropped is the model before its extension; and, after adapting, the adapted model too, so
that what more training gave it at any length is not counted. ± is an interval of 95 %, over
documents.

Some two and a half minutes a seed on two cores. --quick is one seed on a quarter of the documents.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from armillary import Decoder
from armillary.extension.rules import RuleName
from protocol import Bound, finish, note, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
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

SETTING = Setting(
    symbols=128,
    topic=48,
    window=256,
    target=1024,
    decoder={"d_model": 128, "n_layers": 2, "n_heads": 4, "d_ff": 192},
)
ADAPTING = Training(steps=20, rows=4, lr=5e-4)
ADAPTING_LINEAR = Training(steps=200, rows=4, lr=2e-3)
# Comes down to the rate of adapting. A model left at its highest rate is another one at each
# rounding, and would gain from a lower one what has nothing to do with the window.
FIRST_TRAINING = Training(
    steps=400, rows=16, lr=3e-3, warmup=20, final=ADAPTING.lr / 3e-3, weight_decay=0.1
)
WORSE_FIRST: tuple[RuleName, ...] = ("none", "ntk", "yarn", "llama3")
RULES: tuple[RuleName, ...] = (*WORSE_FIRST, "linear")
HELD_OUT = 64  # documents


def rows_of(seed: int, held_out: int) -> Iterator[Bound]:
    """Train, extend and adapt one seed, and say what came of it."""
    torch.manual_seed(seed)
    language = Language(SETTING, seed)
    first = trained(SETTING, language, FIRST_TRAINING)
    documents = language.documents(held_out, SETTING.target)
    cropped = cropped_losses(first, documents, SETTING)
    note(f"seed {seed}: {cropped.mean():.3f} nats a token, cropped to {SETTING.window}")
    texts = language.documents(ADAPTING_LINEAR.steps * ADAPTING_LINEAR.rows, SETTING.target)

    before = {}
    for rule in RULES:
        name, decoder = f"seed {seed}, {rule}", extended(first, rule, SETTING.target)
        before[rule] = far_losses(decoder, documents, SETTING) - cropped
        yield bound(name, before[rule], low=-0.01 if rule == "llama3" else None)
        yield change_in_window(name, first, decoder, documents, goal=rule != "linear")
    for worse, better in itertools.pairwise(WORSE_FIRST):
        yield bound(f"seed {seed}, {worse} above {better}", before[worse] - before[better], low=0.0)

    for rule in RULES:
        training = ADAPTING_LINEAR if rule == "linear" else ADAPTING
        decoder = extended(first, rule, SETTING.target)
        train(decoder, texts[: training.steps * training.rows], training)
        high = {"none": None, "linear": float(before["linear"].mean()) / 10}.get(rule, 0.01)
        name = f"seed {seed}, {rule}, {training.steps} steps"
        far = far_losses(decoder, documents, SETTING)
        yield bound(name, far - cropped, high=high)
        yield bound(
            f"{name}, above cropping itself",
            far - cropped_losses(decoder, documents, SETTING),
            high=high,
        )
        yield change_in_window(name, first, decoder, documents, goal=rule != "none")


def bound(name: str, nats: Tensor, *, low: float | None = None, high: float | None = None) -> Bound:
    """A claim on the mean of differences, (N, T) of N documents."""
    means = nats.mean(1)
    margin = 1.96 * float(means.std()) / len(means) ** 0.5
    return Bound(name, float(means.mean()), "nats a token", low=low, high=high, margin=margin)


def change_in_window(
    name: str, first: Decoder, decoder: Decoder, documents: Tensor, *, goal: bool
) -> Bound:
    """By how much the loss of texts that the old window holds has changed."""
    short = documents[:, : SETTING.window]
    old, new = (float(losses(each, short).mean()) for each in (first, decoder))
    low, high = (-3.0, 3.0) if goal else (None, None)
    return Bound(f"{name}, in the old window", 100 * (new / old - 1), "%", low=low, high=high)


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="which (0 1)")
    chosen = arguments.parse_args()
    rows: list[Bound] = []
    for seed in chosen.seeds[:1] if chosen.quick else chosen.seeds:
        for row in rows_of(seed, HELD_OUT // 4 if chosen.quick else HELD_OUT):
            note(f"  {row.name}: {row.ours:+.4f} {row.unit}")
            rows.append(row)
    finish(rows, chosen)


if __name__ == "__main__":
    main()
