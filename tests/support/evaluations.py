"""A made-up task and a made-up model, for tests of what runs tasks."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from armillary.config import DecoderConfig
from armillary.evaluation.records import Cell, LossRow, QuestionRow, Row, Run, prompt_checksum
from armillary.evaluation.scoring import Continuation, Scored, Scorer
from armillary.language_model import LanguageModel
from armillary.rope_scaling import AnyRopeScaling
from armillary.tokenizer import Tokenizer as OurTokenizer
from support.models import build


@dataclass(frozen=True)
class MadeUpTask:
    """Asks how likely random tokens are after random tokens, at each length."""

    lengths: tuple[int, ...] = (8, 16)
    instances: int = 3
    seed: int = 0
    name: str = "made-up"
    version: int = 1

    def cells(self) -> Sequence[Cell]:
        return [
            Cell(f"{self.name}/{length}/{part}", {"length": length}, ((0, length),))
            for length in self.lengths
            for part in range(2)
        ]

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        draw = random.Random(f"{self.seed} {cell.key}")
        length = cell.settings["length"]
        assert isinstance(length, int)
        rows: list[Row] = []
        for instance in range(self.instances):
            ids = [draw.randrange(scorer.vocab_size) for _ in range(length)]
            (found,) = scorer.score(ids[:-4], [Continuation(tuple(ids[-4:]), 2)])
            names = {"task": self.name, "instance": str(instance), "prompt": prompt_checksum(ids)}
            if cell.key.endswith("0"):
                rows.append(
                    LossRow(
                        **names,
                        document=f"dø{instance}",
                        length=length,
                        position=length - 2,
                        group="all",
                        tokens=2,
                        nats=-found.total,
                    )
                )
            else:
                rows.append(
                    QuestionRow(
                        **names,
                        variant="tail",
                        length=length,
                        factors={"depth": 0.5, "hops": 1, "word": None},
                        logprob=found.total,
                        control=None,
                        exact=found.exact,
                        rank=0,
                        candidates=0,
                    )
                )
        return rows


@dataclass
class MadeUpScorer:
    """A model to which token t is as likely as a number of its own; it counts what it is asked."""

    window: int = 64
    vocab_size: int = 61
    begun: int = 0
    asked: int = 0

    def begin(self) -> None:
        self.begun += 1

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        self.asked += len(continuations)
        found = []
        for each in continuations:
            ids = np.array(each.tokens[-each.scored :], dtype=np.float64)
            found.append(Scored(-np.sqrt(1 + ids) - len(context) / 7, ids % 2 == 0))
        return found


def a_run(**changes) -> Run:
    facts = {"weights_sha256": "ab", "rule": None, "parameters": 12, "dtype": "float32"}
    settings = {"name": "tiny", "model": facts, "window": 64, "original_window": 32, "seed": 0}
    return Run(**(settings | changes))


def made_up_words(count: int) -> list[str]:
    """Different words of five letters."""
    draw = random.Random(7)
    words = {"".join(draw.choice("aeioumnrst") for _ in range(5)): None for _ in range(2 * count)}
    return list(words)[:count]


def made_up_text(words: int, seed: int) -> str:
    """Lines of drawn words."""
    draw = random.Random(seed)
    known = made_up_words(300)
    return "\n".join(
        " ".join(draw.choice(known) for _ in range(12)) for _ in range(-(-words // 12))
    )


def worded_model(
    directory: Path, *, window: int = 512, scaling: AnyRopeScaling | None = None, seed: int = 0
) -> LanguageModel:
    """A model of random weights whose vocabulary has bytes and 300 words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" " + " ".join(made_up_words(300))] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": "<|end|>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ours = OurTokenizer.from_file(directory / "tokenizer.json")
    decoder = build(
        DecoderConfig.uniform(
            vocab_size=ours.vocab_size,
            d_model=40,
            n_layers=2,
            n_heads=6,
            n_kv_heads=2,
            d_head=10,
            d_ff=24,
            max_positions=window,
            rope_base=100.0,
            rope_scaling=scaling,
        ),
        dtype=torch.float32,
        std=0.2,
        seed=seed,
    )
    return LanguageModel(decoder, ours, {}, ours.eos_ids)
