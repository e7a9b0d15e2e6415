"""From a few settings the same tasks are made every time, and what cannot be made is said."""

from dataclasses import replace

import pytest

from armillary.errors import UserError
from armillary.evaluation.budget import ENTRIES, Grid
from armillary.evaluation.perplexity import Document, Perplexity, ShortLoss
from armillary.evaluation.provenance import task_settings
from armillary.evaluation.retrieval import Retrieval
from armillary.evaluation.suite import NAMES, Suite, default_grid, default_lengths, task_tokens
from support.evaluations import made_up_text, worded_model
from support.tiny_model import tiny_tokenizer

GRID = Grid(lengths=(512, 1024), instances=1, windows=4, depths=3, distractors=(7,), hops=(1, 2))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return worded_model(tmp_path_factory.mktemp("worded")).tokenizer


@pytest.fixture(scope="module")
def documents(tokenizer):
    texts = [made_up_text(1500, seed) for seed in range(9)]
    return tuple(
        Document(f"{number}", tuple(tokenizer.encode(text, bos=False)))
        for number, text in enumerate(texts)
    )


@pytest.fixture(scope="module")
def suite(tokenizer, documents):
    tokens, _ = task_tokens(tokenizer, documents, 1024)
    return Suite(NAMES[:-1], tokenizer, tokens, documents, crop=1024)


def of(made):
    return {task.name: task for task in made.tasks}


def test_names_bring_their_tasks(suite):
    tasks = of(suite.make(GRID))
    assert list(tasks) == [
        *("perplexity", "short-loss", "retrieval"),
        *("variable-tracking", "pointer-chase", "induction"),
    ]
    assert isinstance(tasks["retrieval"], Retrieval)
    assert tasks["retrieval"].depths == tasks["induction"].depths == (0.0, 0.5, 1.0)
    assert tasks["retrieval"].distractors == (7,)
    assert tasks["variable-tracking"].hops == (1, 2)
    assert tasks["pointer-chase"].hops == (2,)  # a pointer to a pointer at least
    perplexity, short = tasks["perplexity"], tasks["short-loss"]
    assert isinstance(perplexity, Perplexity)
    assert (perplexity.targets, perplexity.windows, perplexity.crop) == (256, 4, None)
    assert isinstance(short, ShortLoss)
    assert (len(short.texts), short.length) == (8, 512)
    assert perplexity.bos == short.bos == suite.tokenizer.bos_id


def test_every_part_of_it_makes_the_same_again(suite):
    one, other = suite.make(GRID), suite.make(GRID)
    assert [*map(task_settings, one.tasks)] == [*map(task_settings, other.tasks)]
    seeded = replace(suite, seed=1).make(GRID)
    for before, after in zip(one.tasks, seeded.tasks, strict=True):
        if before.name != "short-loss":  # these are fixed
            assert task_settings(before) != task_settings(after), before.name


def test_an_extended_window_is_measured_at_the_old_one_too(suite):
    perplexity = of(replace(suite, crop=256).make(GRID))["perplexity"]
    assert perplexity.all_lengths == (256, 512, 1024)
    assert perplexity.targets == 128
    assert of(replace(suite, crop=256).make(GRID))["short-loss"].length == 256


def test_reach_is_how_far_the_text_goes_back(suite):
    assert of(replace(suite, reach=1536).make(GRID))["perplexity"].full_reach == 1536
    assert of(suite.make(GRID))["perplexity"].full_reach == 1024


def test_what_has_no_room_is_an_error_or_left_out_and_said(suite):
    short = replace(GRID, lengths=(128, 1024))
    with pytest.raises(UserError, match="128 tokens have no room"):
        suite.make(short)
    made = replace(suite, strict=False).make(short)
    assert of(made)["retrieval"].lengths == (1024,)
    assert of(made)["perplexity"].lengths == (128, 1024)
    assert any(told.startswith("left out at 128 tokens: retrieval") for told in made.notices)


def test_a_task_with_room_at_no_length_is_left_out(suite):
    short = replace(GRID, lengths=(128,))
    assert "retrieval" not in of(replace(suite, strict=False).make(short))
    with pytest.raises(UserError, match="no task can be made: left out at 128 tokens"):
        replace(suite, strict=False, names=("retrieval",)).make(short)


def test_contexts_are_put_together_before_anything_is_asked(suite, documents):
    """Text that is full of what is asked about is found out then, and not hours later."""
    full = replace(suite, tokens=replace(suite.tokens, prose=documents[0].ids))
    with pytest.raises(UserError, match="free of the words asked about"):
        full.make(GRID)
    assert full.make(GRID, check=False).tasks


def test_a_tokenizer_without_words_says_why_not(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    documents = (Document("a", tuple(tokenizer.encode("some text " * 300, bos=False))),)
    tokens, _ = task_tokens(tokenizer, documents, 256)
    suite = Suite(("perplexity", "induction"), tokenizer, tokens, documents, strict=False)
    made = suite.make(replace(GRID, lengths=(256,)))
    assert list(of(made)) == ["perplexity", "short-loss"]
    assert made.notices[0].startswith("left out at 256 tokens: ")


def test_questions_are_hidden_in_text_where_that_leaves_room(tokenizer, documents):
    """Made-up text is of the very words that are asked about: none of it is free of them."""
    tokens, said = task_tokens(tokenizer, documents, 1024)
    assert tokens.prose == ()
    assert said.startswith("questions are hidden among words, not in text: ")
    free = Document("free", tuple(tokenizer.encode("0123456789 -> <- " * 9000, bos=False)))
    tokens, said = task_tokens(tokenizer, (free,), 1024)
    assert (len(tokens.prose), said) == (1 << 16, "")


def test_what_tasks_look_at(suite):
    assert replace(suite, names=("perplexity",)).matters == {"lengths", "windows"}
    assert replace(suite, names=NAMES).matters == ENTRIES


@pytest.mark.parametrize(
    ("window", "original", "lengths"),
    [
        (8192, None, (1024, 2048, 4096, 8192)),
        (8192, 2048, (256, 512, 1024, 2048, 4096, 8192)),
        (2048, 2048, (256, 512, 1024, 2048)),
        (1000, None, (500, 1000)),
        (256, None, (128, 256)),
        (1, None, (1,)),
    ],
)
def test_lengths_go_up_to_the_window_by_doublings(window, original, lengths):
    assert default_lengths(window, original) == lengths


@pytest.mark.parametrize("lengths", [(256, 512), (512, 1024), (1024, 4096)])
def test_what_is_asked_by_default_has_room_at_every_length(suite, lengths):
    """A vocabulary whose phrase of the passkey is four tokens, as it is of those that are used."""
    tokens = replace(suite.tokens, label=suite.tokens.label[:4])
    asked = replace(suite, tokens=tokens, names=("retrieval", "reasoning", "induction"))
    made = asked.make(replace(default_grid(lengths), instances=1))
    assert all(task.lengths == lengths for task in made.tasks)
