"""A made-up task and a made-up model, for tests of what runs tasks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from armillary.evaluation.records import Cell, LossRow, QuestionRow, Row, Run, prompt_checksum
from armillary.evaluation.scoring import Continuation, Scored, Scorer


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
