"""The page says what the summaries say, stands alone, and lets no text be anything but text."""

import re
from dataclasses import replace

import pytest

from armillary.errors import UserError
from armillary.evaluation import tables
from armillary.evaluation.report import render, write_report
from armillary.evaluation.summary import Summary
from armillary.evaluation.verdict import gains_of, verdict
from support.page import HOSTILE, Page
from support.summaries import RULES, changes, comparison, summaries

COMMANDS = ["armillary evaluate runs/yarn --out results/yarn", "armillary compare a b > c"]


@pytest.fixture(scope="module")
def html():
    return render(summaries(), comparison(), frequencies=changes(), commands=COMMANDS)


@pytest.fixture(scope="module")
def whole(html):
    return Page(html)


def plain(text):
    return text.replace("\N{NO-BREAK SPACE}", " ").strip()


def test_the_verdict_comes_first(html, whole):
    assert whole.text.index("Evaluation of 5 models") < whole.text.index("Effective length")
    leads = re.findall(r'<p class="lead">(.*?)</p>', html)
    assert [plain(lead) for lead in leads] == list(verdict(summaries(), comparison()))


def test_each_row_of_each_table_stands_on_the_page(whole):
    several, compared = summaries(), comparison()
    shown = {tuple(map(plain, row)) for row in whole.rows}
    made = [
        tables.overview(several, gains_of(several, compared), compared),
        tables.effective(several),
        *(
            tables.losses(several, curves, "")
            for curves in (
                [s.by_context for s in several],
                [s.key_tokens for s in several],
                [s.by_position for s in several],
            )
        ),
        *(tables.rates(several, variant) for variant in ("passkey", "near-miss", "induction")),
        tables.short(several, compared),
        tables.differences(compared, several, "questions"),
        tables.all_differences(compared, several),
        *(table for _, table in tables.provenance(several)),
    ]
    for table in made:
        assert {tuple(map(str, row)) for row in table.rows} <= shown


def test_every_picture_is_there_with_its_message(whole):
    titles = [plain(title) for title in whole.figures]
    assert len(titles) == 36
    for start in (
        "passkey holds longest",
        "With 1,024 tokens yarn and llama3",
        "1,024 tokens instead of 256: −0.119 nats per token for llama3, +1.382 for none",
        "Tokens that far context tells of",
        "In the last positions",
        "near-miss in 1,024 tokens",
        "pointer-chase with 4 hops",
        "llama3: fewest right",
        "Loss on short texts",
        "hellaswag right",
        "Of 16 channel pairs",
    ):
        assert any(title.startswith(start) for title in titles), start


def test_links_lead_to_what_is_on_the_page(whole):
    links = [value for name, value in whole.attributes if name == "href"]
    ids = {value for name, value in whole.attributes if name == "id"}
    assert len(links) == 8
    assert {link.removeprefix("#") for link in links} <= ids
    assert all(link.startswith("#") for link in links)


def test_nothing_comes_from_outside(html, whole):
    assert not set(whole.tags) & {"script", "link", "img", "iframe", "object", "base", "form"}
    names = {name for name, _ in whole.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not names & {"src", "srcset", "style", "xlink:href"}
    assert "url(" not in html
    assert "@import" not in html
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in whole.attributes


def test_dark_is_for_screens_alone(html):
    schemes = re.findall(r"@media ([^{]*)prefers-color-scheme: dark", html)
    assert schemes
    assert all(scheme == "screen and (" for scheme in schemes)


def test_settings_and_commands_are_told(whole):
    assert summaries()[0].run.model["weights"] in whole.text
    assert "armillary evaluate runs/yarn --out results/yarn" in whole.text
    assert "armillary compare a b > c" in whole.text


def test_a_model_has_its_sign_beside_its_name(html):
    for place, name in enumerate(RULES):
        assert re.search(rf's{place} d{place % 5}"[^>]*/></svg> {name}</span>', html)


def test_the_same_evaluation_gives_the_same_page(html):
    assert html == render(summaries(), comparison(), frequencies=changes(), commands=COMMANDS)


def test_one_model_has_a_page_of_its_own(tmp_path):
    write_report(tmp_path / "report.html", summaries()[3:4])
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert "Evaluation of yarn" in page.text
    assert "Which differences are real" not in page.text
    assert "How to reproduce" not in page.text
    assert "What all models share" not in page.text
    assert any(
        title.startswith("Loss of the same") or "yarn predicts" in title for title in page.figures
    )


def test_a_page_about_nothing_says_so():
    page = Page(render([Summary(summaries()[0].run)]))
    assert "Nothing was measured that tells what a longer context is worth." in page.text
    assert page.figures == []
    assert page.tags.count("h2") == 1  # of the settings


def test_hostile_names_stay_text():
    one, other, *_ = summaries()
    run = replace(
        one.run,
        name=HOSTILE,
        model={**one.run.model, HOSTILE: HOSTILE, "rule": HOSTILE},
        tasks={HOSTILE: {HOSTILE: HOSTILE}},
    )
    rates = tuple(replace(each, variant=HOSTILE + each.variant) for each in one.rates)
    effective = tuple(replace(each, variant=HOSTILE + each.variant) for each in one.effective)
    tasks = tuple(replace(each, task=HOSTILE + each.task) for each in one.short_tasks)
    hostile = replace(one, run=run, rates=rates, effective=effective, short_tasks=tasks)
    page = Page(render([hostile, other], commands=[HOSTILE]))
    assert not set(page.tags) & {"script", "img", "b"}
    shown = "".join(page.words)
    assert shown.count("<script>alert(1)</script>{{ 7*7 }}") >= 10
    assert not set("\x1b\ud800\u202e") & set(shown)


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(ValueError, match="of other models, or of these in another order"):
        render(summaries()[::-1], comparison())
    with pytest.raises(ValueError, match="2 frequencies for 5 models"):
        render(summaries(), frequencies=[None, None])


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(UserError, match=r"report\.html"):
        write_report(tmp_path / "not there" / "report.html", summaries()[:1])
