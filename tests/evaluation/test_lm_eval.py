"""The adapter by itself: what it asks of the model for what lm-eval asks of it.

That lm-eval's own numbers come out is in tests/parity/test_lm_eval.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.lm_eval import as_lm_eval
from armillary.evaluation.scoring import Continuation, Scored
from armillary.tokenizer import Tokenizer
from support.vocabularies import byte_level


class Base:
    """As much of lm_eval.api.model.LM as the adapter sees."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any, Any]] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *facts: self.kept.append(facts))


@dataclass
class Request:
    args: tuple[Any, ...]


class Noting:
    """Notes every token that it is asked to score, with what came before it."""

    vocab_size = 300

    def __init__(self, window: int = 99) -> None:
        self.window = window
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def begin(self) -> None: ...

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        self.asked += [(tuple(context), each.tokens) for each in continuations]
        return [
            Scored(-np.array(each.tokens, float), np.ones(len(each.tokens), bool))
            for each in continuations
        ]


@pytest.fixture(params=[False, True], ids=["no BOS", "BOS"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level(add_bos_token=request.param))


def test_log_likelihoods_come_in_the_order_asked_and_are_handed_to_the_cache(tokenizer):
    scorer = Noting()
    model = as_lm_eval(Base, scorer, tokenizer)
    texts = [("b", " x"), ("a", " yz"), ("b", " w")]
    answers = model.loglikelihood([Request(pair) for pair in texts])
    expected = [-sum(tokenizer.encode(text, bos=False)) for text in (" x", " yz", " w")]
    assert answers == [(float(value), True) for value in expected]
    kept = [("loglikelihood", pair, answer) for pair, answer in zip(texts, answers, strict=True)]
    assert sorted(model.kept) == sorted(kept)
    assert [context for context, _ in scorer.asked] == sorted(c for c, _ in scorer.asked)


def test_each_path_begins_a_text_once(tokenizer):
    """lm-eval puts BOS before BOS in rolling requests of models whose tokenizer adds it."""
    scorer, prompts = Noting(999), []
    wanted = 1 if tokenizer.encode("a")[0] == tokenizer.bos_id else 0

    def generate(batch: list[list[int]], **options: Any) -> list[Any]:
        prompts.extend(batch)
        return [SimpleNamespace(text="") for _ in batch]

    model = as_lm_eval(Base, scorer, tokenizer, generate)
    model.loglikelihood([Request(("ab", " cd")), Request(("", " cd"))])
    model.loglikelihood_rolling([Request(("ab cd",))])
    model.generate_until([Request(("ab", {})), Request(("", {}))])
    likelihood, empty = sorted(scorer.asked[:2], key=lambda pair: -len(pair[0]))
    assert sum(likelihood, ()).count(tokenizer.bos_id) == wanted
    assert empty == ((tokenizer.bos_id,), tuple(tokenizer.encode(" cd", bos=False)))
    assert sum(scorer.asked[2], ()) == (
        tokenizer.bos_id,
        *tokenizer.encode("ab cd", bos=False),
    )
    assert prompts[0].count(tokenizer.bos_id) == wanted
    assert prompts[1] == [tokenizer.bos_id]


@pytest.mark.parametrize("window", [2, 3, 4, 5, 6, 99])
def test_rolling_scores_each_token_once_with_as_much_before_it_as_fits(window, tokenizer):
    text = "zyxwvutsrq"
    ids = tokenizer.encode(text, bos=False)
    scorer = Noting(window)
    (total,) = as_lm_eval(Base, scorer, tokenizer).loglikelihood_rolling([Request((text,))])
    assert total == -sum(ids)
    whole = [tokenizer.bos_id, *ids]
    at = {token: place for place, token in enumerate(whole)}  # no letter stands there twice
    for context, tokens in scorer.asked:
        first = at[tokens[0]]
        assert context == tuple(whole[first - len(context) : first])
        assert len(context) + len(tokens) == min(window, len(whole))
    assert sorted(at[t] for _, tokens in scorer.asked for t in tokens) == list(range(1, 11))


def test_an_empty_text_has_nothing_to_score(tokenizer):
    assert as_lm_eval(Base, Noting(), tokenizer).loglikelihood_rolling([Request(("",))]) == [0]


def test_what_is_cut_is_counted_in_a_warning(tokenizer):
    scorer = Noting(window=4)
    model = as_lm_eval(Base, scorer, tokenizer)
    with pytest.warns(UserWarning, match="1 texts are longer than the window of 4 tokens"):
        model.loglikelihood([Request(("xyz", "vuts"[:2])), Request(("", "ab"))])
    assert max(len(context) for context, _ in scorer.asked) == 2


def test_generation_options_are_ours_or_refused(tokenizer):
    seen: list[dict[str, Any]] = []

    def generate(batch: list[list[int]], **options: Any) -> list[Any]:
        seen.append(options)
        return [SimpleNamespace(text=tokenizer.decode(ids[-1:]).upper()) for ids in batch]

    model = as_lm_eval(Base, Noting(999), tokenizer, generate)
    greedy = {"until": ["\n\n", ""], "max_gen_toks": 7, "do_sample": False, "temperature": 0.0}
    drawn = {"until": "Q:", "temperature": 0.5, "top_p": 0.9}
    requests = [Request(("a", greedy)), Request(("b", drawn)), Request(("c", greedy))]
    assert model.generate_until(requests) == ["A", "B", "C"]
    assert seen == [
        {"max_tokens": 7, "stop": ("\n\n",), "temperature": 0.0},
        {"max_tokens": 256, "stop": ("Q:",), "temperature": 0.5, "top_p": 0.9},
    ]
    assert [facts[0] for facts in model.kept] == ["generate_until"] * 3
    with pytest.raises(UserError, match="num_beams is no option of generation here"):
        model.generate_until([Request(("a", {"num_beams": 2}))])


def test_a_prompt_without_room_for_its_answer_is_refused(tokenizer):
    model = as_lm_eval(Base, Noting(10), tokenizer, lambda batch, **_: pytest.fail("asked"))
    with pytest.raises(UserError, match=r"a prompt of \d tokens leaves no room for 8 more"):
        model.generate_until([Request(("xyz", {"max_gen_toks": 8}))])
    with pytest.raises(UserError, match="give as_lm_eval a `generate`"):
        as_lm_eval(Base, Noting(), tokenizer).generate_until([Request(("a", {}))])
