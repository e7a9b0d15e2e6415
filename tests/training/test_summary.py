"""The page of a run says the right numbers, stands alone, and lets no text be anything but text."""

import math

import pytest

from armillary.errors import UserError
from armillary.training.events import CheckpointSaved, Notice, RunEnded, Sampled
from armillary.training.history import History
from armillary.training.log import JsonLog
from armillary.training.summary import render, write_summary
from support.page import HOSTILE, Page
from support.run_events import config, done, started, validated, whole_run


def page_of(*events):
    return Page(render(History.of(events)))


@pytest.fixture(scope="module")
def whole():
    return page_of(*whole_run())


def test_two_sentences_say_what_was_trained_and_what_came_of_it(whole):
    assert (
        "A new decoder of 5.30 M parameters was trained on python-stdlib for 200 steps of "
        "8 × 64 tokens, 1.2 epochs, in 1 min 1 s. "
        "On held-out text it comes to 1.000 bits per byte (2.000 nats per token); on the same text "
        "gzip -9 needs 2.500 and xz -9 needs 1.750. The model is in runs/tiny/model"
    ) in whole.text.replace(" \n", " ")


@pytest.mark.parametrize(
    "fact",
    [
        "Steps 200 of 200, 1 skipped",
        "Tokens 102 k",
        "Time 1 min 1 s",
        "Speed 2,051 tokens per second",
        "Utilisation 61 % of 240 GFLOP/s",
        "Peak memory 1.2 GB",
        "Computed in bfloat16 on cpu",
    ],
)
def test_facts_are_those_of_the_log(whole, fact):
    assert fact in whole.text


def test_each_figure_says_its_message(whole):
    assert [title.replace("\xa0", " ") for title in whole.figures] == [
        "The model needs 43 % fewer bits for unseen text than xz -9",
        "Validation loss fell from 5.000 to 2.000 nats per token",
        "The learning rate rose to 0.002 by step 20",
        "The gradient norm was 0.50 in the median; 1 step was skipped",
        "2,051 tokens per second in the median, 61 % of what the machine can do",
    ]
    assert whole.tags.count("svg") == 5


def test_numbers_stand_in_tables(whole):
    assert ["200", "2.000", "1.000", "2.0", "best"] in whole.rows
    assert ["150", "3.000", "1.500", "2.0", ""] in whole.rows
    assert ["10", "5.268", "0.001", "0.446", "2,051", "5,120", ""] in whole.rows
    skipped = ["117", "no number", "0.002", "inf", "2,053", "59,904", "skipped: no numbers"]
    assert skipped in whole.rows
    assert ["100", "runs/tiny/checkpoints/step-100", "0.5"] in whole.rows


def test_settings_that_differ_come_first(whole):
    heads = [i for i, row in enumerate(whole.rows) if row == ["key", "value", "by default"]]
    chosen = whole.rows[heads[0] + 1 : heads[1]]
    everything = whole.rows[heads[1] + 1 :]
    assert ["train.lr", "0.002", "0.0003"] in chosen
    assert ["model.uniform", "as follows", "null"] in chosen
    assert ["data.sources", "[python-stdlib]", "[]"] in chosen
    assert ["out", "runs/tiny", "–"] in chosen
    keys = [row[0] for row in chosen]
    assert "train.beta1" not in keys
    assert "lora" not in keys
    assert ["train.beta1", "0.9", "0.9"] in everything
    assert "lr: 0.002" in whole.text  # as run.yaml


def test_texts_are_shown_by_milestone(whole):
    assert whole.text.index("After step 200;") < whole.text.index("Earlier (1)")
    assert "def add( a, b): return 100" in whole.text


def test_nothing_comes_from_outside(whole):
    assert not set(whole.tags) & {"script", "link", "img", "iframe", "object", "base", "form"}
    names = {name for name, _ in whole.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not names & {"src", "href", "srcset", "style", "xlink:href"}
    html = render(History.of(whole_run()))
    assert "url(" not in html
    assert "@import" not in html
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in whole.attributes


def test_light_dark_narrow_and_paper_are_thought_of():
    html = render(History.of(whole_run()))
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html


def test_hostile_texts_stay_text(tmp_path):
    settings = config()
    settings["out"] = HOSTILE
    settings["samples"]["prompts"] = [HOSTILE]
    settings["data"]["sources"] = [HOSTILE]
    settings["<b>"] = HOSTILE
    events = [
        started(config=settings, device=HOSTILE, precision=HOSTILE),
        done(1, skipped=HOSTILE),
        validated(1, 1.0),
        Sampled(1, HOSTILE, HOSTILE),
        Notice(1, HOSTILE),
        CheckpointSaved(1, HOSTILE, 1.0),
        RunEnded(1, HOSTILE, 1.0, model=HOSTILE, compressors={HOSTILE: 2.0}),
    ]
    page = page_of(*events)
    assert not set(page.tags) & {"script", "img"}
    assert page.tags.count("b") == page.tags.count("dd") + 1  # of facts, and of the one prompt
    shown = "".join(page.words)
    assert shown.count("<script>alert(1)</script>{{ 7*7 }}") >= 10
    assert not set("\x1b\ud800\u202e") & set(shown)
    with JsonLog(tmp_path / "log.jsonl") as log:
        for event in events:
            log(event)
    write_summary(tmp_path / "log.jsonl", tmp_path / "summary.html")
    assert (tmp_path / "summary.html").read_text("utf-8") == render(History.of(events))


def test_an_empty_log_makes_a_page(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    write_summary(tmp_path / "log.jsonl", tmp_path / "summary.html")
    page = Page((tmp_path / "summary.html").read_text("utf-8"))
    assert "The log holds no start of a run" in page.text
    assert "Nothing was measured" in page.text
    assert "Settings" not in page.text
    assert page.figures == []


def test_no_log_makes_no_page(tmp_path):
    with pytest.raises(UserError, match="is not there"):
        write_summary(tmp_path / "log.jsonl", tmp_path / "summary.html")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_validation_says_so():
    page = page_of(started(), *map(done, range(10, 210, 10)), RunEnded(200, "finished", 60.0))
    assert (
        "Its loss on held-out text was not measured; the training loss ended at 2.070 nats per "
        "token." in page.text
    )
    assert page.figures[0] == "Training loss fell from 5.268 to 2.070 nats per token"
    assert "Validations in numbers" not in page.text
    assert "Held-out" not in page.text


def test_a_resumed_run_is_one_run():
    events = [started(), *map(done, range(10, 60, 10)), started(50, steps=100)]
    page = page_of(*events, *map(done, range(60, 110, 10)), RunEnded(100, "finished", 25.0))
    assert "for 100 steps" in page.text
    assert "The run was interrupted, and went on after step 50." in page.text
    assert [row[0] for row in page.rows if len(row) == 7][1:] == [
        f"{step}" for step in range(10, 110, 10)
    ]


def test_a_run_that_was_stopped_or_killed_says_so():
    stopped = page_of(started(), done(70), validated(50, 1.0), RunEnded(70, "SIGTERM", 9.0))
    assert "It was stopped after step 70 of 200 (SIGTERM)." in stopped.text
    killed = page_of(started(), done(70), validated(50, 1.0))
    assert "The log ends after step 70 of 200: the run goes on, or was killed." in killed.text


def test_a_loss_that_rose_again_is_the_message():
    page = page_of(
        started(), *(validated(s, loss) for s, loss in ((50, 3.0), (100, 2.0), (150, 2.5)))
    )
    assert page.figures[0] == (
        "Validation loss was lowest after step 100, at 2.000, and rose to 2.500 nats per token "
        "since"
    )
    assert "its best was 2.000 nats per token after step 100" in page.text


@pytest.mark.parametrize(
    ("rates", "title"),
    [
        ([3e-4, 3e-4], "The learning rate stayed at 0.0003"),
        (
            [1e-4, 4e-4, 1e-5],
            "The learning rate rose to 0.0004 by step 20 and came down to 2.5 % of it",
        ),
        ([4e-4, 1e-4], "The learning rate began at 0.0004 and came down to 25 % of it"),
    ],
)
def test_the_course_of_the_learning_rate_is_told(rates, title):
    steps = (done(10 * n, learning_rate=rate) for n, rate in enumerate(rates, 1))
    assert page_of(started(), *steps).figures[1] == title


def test_a_model_worse_than_gzip_is_not_praised():
    end = RunEnded(50, "finished", 1.0, compressors={"gzip -9": 2.0})
    page = page_of(started(), validated(50, 6.0), end)
    assert page.figures[0].replace("\xa0", " ") == (
        "The model does not do better on unseen text than gzip -9"
    )


def test_further_training_and_adapters_are_called_so():
    further = config(model={"checkpoint": "smollm2-135m"}, data={"prepared": "d", "length": 64})
    page = page_of(started(config=further, parameters=134_515_008))
    assert "smollm2-135m (135 M parameters) was trained further on d for 0 steps" in page.text
    lora = further | {"lora": {"rank": 4}}
    page = page_of(started(config=lora, parameters=134_515_008, trained_parameters=460_800))
    assert (
        "Adapters of 461 k parameters (rank 4) on smollm2-135m (135 M parameters) were trained"
        in page.text
    )


def test_losses_that_are_no_numbers_break_nothing():
    """cases.md 90: a step without targets has no loss."""
    nothing = done(2, loss=math.nan, gradient_norm=0.0, skipped="no_targets", skipped_so_far=1)
    page = page_of(started(), done(1), nothing, validated(2, math.nan, best=False))
    assert "no number bits per byte" in page.text
    row = ["2", "no number", "0.0002", "0.000", "2,050", "1,024", "skipped: nothing to learn"]
    assert row in page.rows


def test_a_skipped_step_bends_no_curve():
    page = page_of(started(), done(1), done(2, loss=7e5, skipped="nonfinite"), done(3))
    assert "700000.000" in page.text  # in the table
    assert "00,000" not in page.text  # on no axis


def test_long_runs_make_short_tables():
    page = page_of(started(steps=10**6), *map(done, range(10, 100_010, 10)))
    assert "of 10000 that were logged" in page.text
    rows = [row for row in page.rows if len(row) == 7]
    assert 50 <= len(rows) <= 101
    assert rows[-1][0] == "100,000"
