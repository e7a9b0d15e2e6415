"""A grid of retrieval, scored in branches of shared contexts, beside one generated answer each.

    python benchmarks/evaluate.py            1,024 and 2,048 tokens, two kinds, 11 depths, twice
    python benchmarks/evaluate.py --quick    512 tokens, one kind

SmolLM2-135M in float32. Ours are all rows of the grid: each answer forced, ranked among seven
others, and forced again without its needle. The peer takes the same contexts in, one call of
`generate` for each question, and compares the greedy text with the answer. Both have to come to
the same verdicts. Memory is what tensors hold at the peak of the longest cell, beyond the weights.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import armillary
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.records import Cell, QuestionRow
from armillary.evaluation.retrieval import Retrieval
from armillary.evaluation.scoring import Continuation
from armillary.evaluation.vocabulary import TaskTokens
from armillary.language_model import LanguageModel
from protocol import Row, finish, note, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.tensor_memory import TensorMemory

THREADS = 2
PEER = "generate, a call a question"
Verdicts = dict[str, bool]


def forced(scorer: DecoderScorer, task: Retrieval, cell: Cell) -> Verdicts:
    """Each question of a cell, and whether its answer is exact."""
    scorer.begin()
    rows = task.run(cell, scorer)
    return {row.instance: row.exact for row in rows if isinstance(row, QuestionRow)}


def generated(lm: LanguageModel, task: Retrieval, cell: Cell, most: int | None = None) -> Verdicts:
    """The same by what is written after each question, of `most` questions."""
    asked = [(prompt.context, q) for prompt in task.prompts(cell) for q in prompt.questions]
    verdicts = {}
    for context, question in asked[:most]:
        answer = (*question.answer, *question.end)
        written = lm.generate(
            [*context, *question.ask], max_tokens=len(answer), temperature=0, ignore_eos=True
        )
        verdicts[question.name] = written.token_ids == answer
    return verdicts


def seconds(run: Callable[[], Verdicts], into: Verdicts) -> float:
    """What a cell takes, once: it is long, and the same work again and again inside."""
    start = time.perf_counter()
    into.update(run())
    return time.perf_counter() - start


def megabytes(lm: LanguageModel, run: Callable[[], object]) -> float:
    """What tensors hold at the peak, beyond the weights."""
    with TensorMemory(lm.decoder.parameters()) as memory:
        run()
    return memory.peak / 1e6


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(THREADS)
    lm = armillary.load("smollm2-135m", dtype="float32")
    task = Retrieval(
        TaskTokens.of_tokenizer(lm.tokenizer),
        lengths=(512,) if arguments.quick else (1024, 2048),
        variants=("key-value",) if arguments.quick else ("key-value", "passkey"),
        depths=tuple(step / 10 for step in range(11)),
        distractors=(10,),
        instances=2,
    )
    scorer = DecoderScorer(lm.decoder)
    scorer.score([0] * 64, [Continuation((0, 0), 1)])  # so that nothing is done for the first time
    rows, total, ours, theirs = [], [0.0, 0.0], Verdicts(), Verdicts()
    for cell in task.cells():
        name = f"{cell.settings['variant']}, {cell.settings['length']} tokens, 2 × 11 questions"
        note(name)
        taken = (
            seconds(lambda cell=cell: forced(scorer, task, cell), ours),
            seconds(lambda cell=cell: generated(lm, task, cell), theirs),
        )
        total = [before + now for before, now in zip(total, taken, strict=True)]
        rows.append(Row(f"{name}, time", taken[0], PEER, taken[1], "s", higher_is_better=False))
    rows.append(
        Row("the grid, time", total[0], PEER, total[1], "s", goal=5.0, higher_is_better=False)
    )
    last = task.cells()[-1]
    rows.append(
        Row(
            f"{name}, peak memory",
            megabytes(lm, lambda: forced(scorer, task, last)),
            PEER,
            megabytes(lm, lambda: generated(lm, task, last, most=1)),
            "MB",
            # Room for the branches beside the context, and their masks: a quarter at most.
            goal=0.8,
            higher_is_better=False,
        )
    )
    alike = sum(ours[question] == verdict for question, verdict in theirs.items())
    rows.append(Row("verdicts alike", alike, "asked", len(theirs), "questions", goal=1.0))
    finish(rows, arguments)


if __name__ == "__main__":
    main()
