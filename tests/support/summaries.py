"""Made-up results of five ways to extend a model from 256 tokens to 1,024, and what they say.

The shapes are those of extension.md §6: without a rule loss explodes beyond the window, linear is
bad everywhere before adaptation, ntk is in between, yarn and llama3 gain.
"""

import functools
import hashlib
import math
import random
from collections.abc import Iterator

from armillary.config import RotaryConfig
from armillary.diagnosis.frequencies import FrequencyChange, frequency_change
from armillary.evaluation.comparison import Comparison, compare
from armillary.evaluation.records import ChoiceRow, LossRow, QuestionRow, Row, Run
from armillary.evaluation.summary import Summary, summarise
from armillary.rope_scaling import NTK, Llama3, PositionInterpolation, Unscaled, YaRN

WINDOW, TARGET = 256, 1024
LENGTHS = (64, 128, 256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# What a rule adds beyond the window (nats), inside it, and how well far things are found.
RULES = {
    "none": (1.5, 0.0, 0.0),
    "linear": (1.4, 1.2, 0.1),
    "ntk": (0.4, 0.03, 0.45),
    "yarn": (0.01, 0.004, 0.9),
    "llama3": (0.0, 0.0, 0.97),
}


def run_of(rule: str, seed: int = 7) -> Run:
    return Run(
        name=rule,
        model={
            "weights": hashlib.sha256(rule.encode()).hexdigest(),
            "config": hashlib.sha256(b"config" + rule.encode()).hexdigest(),
            "tokenizer": hashlib.sha256(b"tokenizer").hexdigest(),
            "parameters": 5_303_040,
            "rule": rule,
            "base": 10_000.0,
            "dtype": "float32",
            "engine": "decoder",
        },
        window=TARGET,
        original_window=WINDOW,
        seed=seed,
        tasks={
            "perplexity": {"version": 1, "lengths": "64, 128, 256, 512, 1024", "documents": 12},
            "retrieval": {"version": 1, "instances": 12, "depths": "0, 0.25, 0.5, 0.75, 1"},
            "pointer-chase": {"version": 1, "hops": "1, 2, 3, 4", "instances": 20},
            "induction": {"version": 1, "instances": 20},
            "hellaswag": {"version": 1, "instances": 100},
        },
    )


def rows_of(rule: str) -> list[Row]:
    return [*_losses(rule), *_questions(rule), *_choices(rule)]


@functools.cache
def results() -> tuple[tuple[Run, list[Row]], ...]:
    return tuple((run_of(rule), rows_of(rule)) for rule in RULES)


@functools.cache
def summaries() -> tuple[Summary, ...]:
    return tuple(summarise(run, rows) for run, rows in results())


@functools.cache
def comparison() -> Comparison:
    return compare(results())


@functools.cache
def changes() -> tuple[FrequencyChange, ...]:
    scalings = (
        Unscaled(),
        PositionInterpolation(4.0),
        NTK(4.0),
        YaRN(4.0, WINDOW),
        Llama3(4.0, WINDOW),
    )
    before = RotaryConfig(d_rotary=32)
    return tuple(
        frequency_change(before, RotaryConfig(d_rotary=32, scaling=scaling), WINDOW, TARGET)
        for scaling in scalings
    )


def _losses(rule: str) -> Iterator[LossRow]:
    beyond, inside, _ = RULES[rule]
    for document in range(12):
        own = random.Random(document).gauss(2.6, 0.25)
        noise = random.Random(f"{rule}{document}")
        for length in LENGTHS:
            longer = math.log2(length / 64)
            for group, less in (("all", 0.06), ("key", 0.25)):
                nats = own - less * longer + noise.gauss(0, 0.004) + inside
                nats += beyond * (math.log2(length / WINDOW) / 2 if length > WINDOW else 0)
                yield _loss(f"d{document}", group, length, 0, nats, 96 if group == "all" else 11)
        for position in range(0, TARGET, 64):
            nats = own + 0.8 * math.exp(-position / 40) - 0.02 * math.log2(1 + position / 64)
            nats += inside + noise.gauss(0, 0.02)
            nats += beyond * max(0.0, (position - WINDOW) / (TARGET - WINDOW))
            yield _loss(f"d{document}", "position", TARGET, position, nats, 64)
        yield _loss(f"s{document}", "short", 48, 0, own + 0.3 + inside + noise.gauss(0, 0.002), 47)


def _loss(
    document: str, group: str, length: int, position: int, nats: float, tokens: int
) -> LossRow:
    name = f"{document}/{group}/{position}"
    prompt = f"{name}/{length}"
    return LossRow(
        "perplexity", name, prompt, document, length, position, group, tokens, nats * tokens
    )


def _questions(rule: str) -> Iterator[QuestionRow]:
    for variant, hard in (("passkey", 0.0), ("key-value", 0.05), ("near-miss", 0.15)):
        for length in LENGTHS:
            for depth in DEPTHS:
                for instance in range(12):
                    share = _share(rule, length, hard + 0.1 * (depth == 0.5))
                    factors = {"depth": depth, "distractors": 4}
                    yield _question(rule, "retrieval", variant, length, factors, instance, share)
    for length in (256, 1024):
        for hops in (1, 2, 3, 4):
            for instance in range(20):
                share = _share(rule, length, 0.2 * (hops - 1))
                yield _question(
                    rule, "pointer-chase", "pointer-chase", length, {"hops": hops}, instance, share
                )
    for length in LENGTHS:
        for instance in range(20):
            share = _share(rule, length, 0.02)
            yield _question(rule, "induction", "induction", length, {}, instance, share)


def _share(rule: str, length: int, harder: float) -> float:
    _, inside, far = RULES[rule]
    best = 1.0 - harder - 0.3 * inside
    return max(0.0, best if length <= WINDOW else best * far ** math.log2(length / WINDOW))


def _question(
    rule: str,
    task: str,
    variant: str,
    length: int,
    factors: dict[str, float | int],
    instance: int,
    share: float,
) -> QuestionRow:
    name = f"{variant}/{length}/{'/'.join(f'{v:g}' for v in factors.values())}/{instance}"
    noise = random.Random(f"{rule}{name}")
    exact = noise.random() < share
    rank = 0 if exact else noise.randrange(5)
    logprob = -0.2 if exact else -4.0 - noise.random()
    return QuestionRow(
        task,
        name,
        name,
        variant,
        length,
        factors,
        logprob,
        -7.0 - noise.random(),
        exact,
        rank,
        5,
    )


def _choices(rule: str) -> Iterator[ChoiceRow]:
    _, inside, _ = RULES[rule]
    for task, level in (("hellaswag", 0.42), ("piqa", 0.66), ("lambada", 0.35)):
        for instance in range(100):
            right = random.Random(f"{task}{instance}").random() < level - 0.12 * inside
            flipped = random.Random(f"{rule}{task}{instance}").random() < 0.02
            choices = (-3.0, -4.0) if task != "lambada" else (-3.0,)
            normalised = None if task == "lambada" else right
            yield ChoiceRow(
                task, str(instance), str(instance), right != flipped, normalised, choices, 0
            )
