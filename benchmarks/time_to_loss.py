"""Wall time to the validation loss that transformers' Llama reaches in a fixed budget.

The peer is transformers' LlamaForCausalLM in a plain good loop: bfloat16 autocast over float32
weights, torch's fused AdamW, warm-up and cosine, clipping. Ours has as many parameters in the same
places, and trains with Muon and a schedule that ends at a step chosen in advance. Both are
compiled, see rows of the same text (Python's own library) in the same order, and are judged on the
same held-out rows in float32. Each row of losses says whether ours came as low as the peer, each
row of times how long the training steps took; compiling and validation are not in them.

The two train in turns, a few steps at a time, so that both have the same machine.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from armillary import Decoder, DecoderConfig
from armillary.data import PackedBatches, TokenDataset, prepare
from armillary.data.bpe import train_bpe
from armillary.data.packing import Batch
from armillary.data.sources import find_sources
from armillary.data.texts import Texts
from armillary.training.compilation import compile_objective
from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.precision import Precision
from armillary.training.schedule import ScheduleConfig, set_learning_rates
from protocol import Row, finish, note, parser

PEER_NAME = "transformers, AdamW, cosine"
GOAL = 1 / 0.6  # of its time
CPU = torch.device("cpu")
SOURCE = "python-stdlib"
VOCABULARY = 4096
LENGTH = 256  # tokens of a row
SIZES = {"d_model": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "d_ff": 704}
VALIDATION_ROWS = 256
TURNS = 20


@dataclass(frozen=True)
class Recipe:
    """Rows of a step, and what the optimiser does in how many steps.

    `quick` shortens every run to a fifth, its schedule with it.
    """

    rows: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig

    @property
    def quick(self) -> "Recipe":
        """The same with a fifth of the steps, however long they are."""
        own = self.schedule
        steps = {name: getattr(own, name) // 5 for name in ("steps", "warmup", "decay")}
        return replace(self, schedule=replace(own, **steps))


# The best of a sweep at equal tokens and one seed. Nats a token by learning rate, with 4 rows: 4.70
# (1e-3), 4.61 (2e-3), 4.92 (4e-3); with 8 rows: 4.86 (1e-3), 4.79 (2e-3), 4.82 (4e-3), 5.15 (8e-3);
# with 2 rows and twice the steps no better than with 4: 4.61 (1.4e-3).
PEER = Recipe(
    rows=4,
    optimizer=OptimizerConfig(kind="adamw", lr=2e-3, beta2=0.95, weight_decay=0.1),
    schedule=ScheduleConfig(steps=600, kind="cosine", warmup=30, final=0.1),
)
# Of 100 steps, nats a token: 4.65, with momentum 0.95 4.72, and with lr 4e-3 besides 4.78.
OURS = Recipe(
    rows=8,
    optimizer=OptimizerConfig(kind="muon", lr=1e-2, muon_lr=4e-3, momentum=0.9, weight_decay=0.1),
    schedule=ScheduleConfig(steps=130, kind="wsd", warmup=6, decay=65),
)


@dataclass
class Training:
    """A model, the recipe that it is trained by, and how far it has come."""

    recipe: Recipe
    batches: PackedBatches
    model: nn.Module
    optimizer: Optimizer
    backward: Callable[[Tensor, Tensor], None]  # (B, T) tokens and labels → gradients
    clip_and_step: Callable[[], object]
    logits: Callable[[Tensor], Tensor]  # (B, T) → (B, T, V), without gradients
    done: int = 0
    seconds: float = 0.0

    def warm_up(self) -> float:
        """Compile, by a step that changes nothing; return its seconds."""
        start = time.perf_counter()
        self.backward(*tensors(self.batches.batch(0)))
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def run(self, until: int) -> None:
        """Go on to a number of steps, and count the time."""
        start = time.perf_counter()
        for step in range(self.done, until):
            set_learning_rates(self.optimizer, self.recipe.schedule, step)
            self.backward(*tensors(self.batches.batch(step)))
            self.clip_and_step()
        self.seconds += time.perf_counter() - start
        self.done = until


def ours(recipe: Recipe, train: TokenDataset, seed: int) -> Training:
    """Our decoder with our optimiser."""
    torch.manual_seed(seed)
    decoder = Decoder(
        DecoderConfig.uniform(
            **SIZES, vocab_size=train.vocab_size, max_positions=LENGTH, tie_head=True
        )
    ).train()
    objective = Objective(decoder)
    precision = Precision("bfloat16")
    note(f"ours: {compile_objective(objective, precision.dtype, CPU)}")
    optimizer = build_optimizer(decoder, recipe.optimizer)

    def backward(tokens: Tensor, labels: Tensor) -> None:
        with precision.autocast():
            loss = objective(tokens, labels)
        precision.backward(loss.total / loss.count)

    return Training(
        recipe,
        PackedBatches(train, length=LENGTH, batch_size=recipe.rows, seed=seed),
        decoder,
        optimizer,
        backward,
        lambda: precision.step(optimizer, max_norm=1.0),
        decoder,
    )


def peer(recipe: Recipe, train: TokenDataset, seed: int) -> Training:
    """transformers' model in the loop that its users write."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=train.vocab_size,
            hidden_size=SIZES["d_model"],
            num_hidden_layers=SIZES["n_layers"],
            num_attention_heads=SIZES["n_heads"],
            num_key_value_heads=SIZES["n_kv_heads"],
            intermediate_size=SIZES["d_ff"],
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            use_cache=False,
        )
    ).train()
    settings = recipe.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    run = torch.compile(model)

    def backward(tokens: Tensor, labels: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            # Its loss shifts labels by itself, but for these.
            loss = run(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Training(
        recipe,
        PackedBatches(train, length=LENGTH, batch_size=recipe.rows, seed=seed),
        model,
        optimizer,
        backward,
        clip_and_step,
        lambda tokens: model(input_ids=tokens).logits,
    )


def tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, T). Neither side keeps the documents of a row apart."""
    return torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)


@torch.no_grad()
def validation_loss(training: Training, batches: Sequence[Batch]) -> float:
    """Nats a token, in float32."""
    total = count = 0.0
    for batch in batches:
        tokens, labels = tensors(batch)
        logits = training.logits(tokens).flatten(0, 1)
        total += float(F.cross_entropy(logits, labels.flatten(), reduction="sum"))
        count += batch.n_targets
    return total / count


def prepared(directory: Path) -> tuple[TokenDataset, TokenDataset]:
    """Python's own library in a vocabulary of its own, and its held-out documents."""
    note(f"preparing {SOURCE} with {VOCABULARY} ids")
    tokenizer = train_bpe(Texts(find_sources([SOURCE])), VOCABULARY)
    prepare([SOURCE], tokenizer, directory, validation=0.05)
    return TokenDataset(directory), TokenDataset(directory, "validation")


def race(one: Training, other: Training) -> None:
    """Train both to their ends, in turns."""
    for turn in range(1, TURNS + 1):
        for training in (one, other):
            training.run(training.recipe.schedule.steps * turn // TURNS)


def rows_of(
    seed: int, our: Training, their: Training, held_out: Sequence[Batch], goal: bool
) -> Iterator[Row]:
    """What came of a seed: that ours is as low, and in how much of the time."""
    losses = [validation_loss(training, held_out) for training in (our, their)]
    yield Row(
        f"seed {seed}, validation loss",
        losses[0],
        PEER_NAME,
        losses[1],
        "nats a token",
        goal=1.0 if goal else None,
        higher_is_better=False,
    )
    yield Row(
        f"seed {seed}, time of training",
        our.seconds,
        PEER_NAME,
        their.seconds,
        "s",
        goal=GOAL if goal else None,
        higher_is_better=False,
    )


def main() -> None:
    """Train, print and check."""
    arguments = parser(__doc__).parse_args()
    recipes = (OURS.quick, PEER.quick) if arguments.quick else (OURS, PEER)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        train, validation = prepared(Path(directory) / "data")
        rows_held_out = PackedBatches(validation, length=LENGTH, batch_size=8)
        held_out = [rows_held_out.batch(step) for step in range(VALIDATION_ROWS // 8)]
        for seed in range(1 if arguments.quick else 3):
            our, their = ours(recipes[0], train, seed), peer(recipes[1], train, seed)
            sizes = [count(training.model) for training in (our, their)]
            if sizes[0] != sizes[1]:
                raise SystemExit(f"{sizes[0]} parameters beside {sizes[1]}")
            warm = [training.warm_up() for training in (our, their)]
            note(
                f"seed {seed}: {sizes[0] / 1e6:.2f} M parameters; compiled in {warm[0]:.0f} s and "
                f"{warm[1]:.0f} s; {our.recipe.schedule.steps} steps beside "
                f"{their.recipe.schedule.steps}"
            )
            race(our, their)
            rows.extend(rows_of(seed, our, their, held_out, not arguments.quick))
            for row in rows[-2:]:
                note(f"  {row.name}: {row.ours:.4g} beside {row.peer:.4g} {row.unit}")
    finish(rows, arguments)


def count(model: nn.Module) -> int:
    """Parameters, a tied matrix once."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
