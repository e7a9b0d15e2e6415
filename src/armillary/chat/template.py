"""A chat template bound to the tokenizer that it was written for."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from armillary.chat.answers import Span, compared_spans, marked_spans
from armillary.chat.messages import checked_messages, plain
from armillary.chat.sandbox import compile_template, marks_generation, render
from armillary.chat.veil import ControlTexts, Veil, all_text
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer


class ChatTemplate:
    """Renders messages by a Jinja template, as transformers does, within a sandbox and a budget.

    The template sees messages, tools, documents, add_generation_prompt, the tokenizer's named
    tokens (bos_token, eos_token, …) and the caller's variables. `now` is the time for a template
    that writes the date; the clock's when left out. Raises UserError, in one line, for a template
    that is no Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, now: datetime | None = None) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self._clock = {} if now is None else {"strftime_now": partial(datetime.strftime, now)}
        self._marks_answers = marks_generation(source)
        self._template = compile_template(source)
        self._controls = ControlTexts(tokenizer.special_tokens)

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        tools: object = None,
        documents: object = None,
        **variables: object,
    ) -> str:
        """Return the text of a chat. To encode it use `encode`, which keeps users' texts apart.

        Messages are mappings with a role and a content, which is a string or a list of text parts.
        Raises UserError for messages that are not so, and for a template that fails, reaches for
        Python's internals or exceeds its budget.
        """
        given = _given(messages, tools, documents, variables)
        return self._render(given, add_generation_prompt)

    def encode(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        tools: object = None,
        documents: object = None,
        **variables: object,
    ) -> list[int]:
        """Return the ids of a chat, as transformers gives them for harmless messages.

        Only the template writes control tokens; what messages, tools, documents or variables spell
        stays text. The chat begins as the tokenizer has texts begin, once, whether the template
        writes that or not. Raises what `render` raises.
        """
        hidden, veil = self._hidden(_given(messages, tools, documents, variables))
        rendered = self._render(hidden, add_generation_prompt)
        parts = [
            veil.restore(part) if isinstance(part, str) else part
            for part in self.tokenizer.split_specials(rendered)
        ]
        return self.tokenizer.begin(self.tokenizer.encode_parts(parts))

    def encode_answers(
        self,
        messages: object,
        *,
        tools: object = None,
        documents: object = None,
        **variables: object,
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat without a generation prompt, and which are the assistant's.

        The ids are those of `encode`. The assistant's are what {% generation %} marks, or, where a
        template lacks it, what follows a generation prompt up to the token that ends the answer,
        this one included. A token that reaches over the border is not among them.

        Raises UnclearAnswersError where the template does not show what is whose (see `answers`),
        and what `render` raises.
        """
        hidden, veil = self._hidden(_given(messages, tools, documents, variables))
        rendered = self._render(hidden, add_generation_prompt=False)
        parts: list[str | int] = []
        answered: list[bool] = []
        for part, whole in self._cut(rendered, self._answers(hidden, veil, rendered)):
            parts.append(veil.restore(part) if isinstance(part, str) else part)
            answered.append(whole)
        ids, places = self.tokenizer.encode_located(parts)
        before = np.cumsum([0, *answered])
        first, last = places[:, 0], places[:, 1] + 1
        mask = before[last] - before[first] == last - first
        begun = self.tokenizer.begin(ids)
        return begun, [False] * (len(begun) - len(ids)) + mask.tolist()

    def _answers(self, hidden: dict[str, Any], veil: Veil, rendered: str) -> list[Span]:
        if self._marks_answers:
            marks = veil.draw(), veil.draw()
            marked = self._render(hidden, add_generation_prompt=False, marks=marks)
            return marked_spans(marked, marks, rendered)
        messages = hidden["messages"]
        return compared_spans(
            lambda count, ask: self._render({**hidden, "messages": messages[:count]}, ask),
            [message["role"] for message in messages],
            rendered,
            self._controls.whole,
        )

    def _cut(self, rendered: str, spans: Sequence[Span]) -> Iterator[tuple[str | int, bool]]:
        """Yield the rendering's texts and control tokens, and whether each lies in a span.

        Texts are cut at the spans' borders.
        """
        starts = [start for start, _ in spans]
        borders = sorted(border for span in spans for border in span)
        place = 0
        for part in self.tokenizer.split_specials(rendered):
            stop = place + (len(part) if isinstance(part, str) else self._controls.lengths[part])
            inner = borders[bisect_right(borders, place) : bisect_left(borders, stop)]
            cuts = [place, *(inner if isinstance(part, str) else []), stop]
            for begin, end in pairwise(cuts):
                span = bisect_right(starts, begin) - 1
                whole = span >= 0 and end <= spans[span][1]
                yield (rendered[begin:end] if isinstance(part, str) else part), whole
            place = stop

    def _hidden(self, given: dict[str, object]) -> tuple[dict[str, Any], Veil]:
        """What a template is given, with the texts that read like control tokens hidden."""
        veil = Veil(self._controls, self.source + all_text(given))
        return veil.hide(given), veil

    def _render(
        self,
        given: dict[str, object],
        add_generation_prompt: bool,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        variables = {
            **self.tokenizer.named_tokens,
            "add_generation_prompt": add_generation_prompt,
            **self._clock,
            **given,
        }
        return render(self._template, variables, marks)


def _given(
    messages: object, tools: object, documents: object, variables: dict[str, object]
) -> dict[str, object]:
    """Everything that comes from outside, in plain values."""
    for name, value in (("tools", tools), ("documents", documents)):
        if value is not None and (
            not isinstance(value, list | tuple) or not all(isinstance(x, dict) for x in value)
        ):
            raise UserError(f"{name}: must be a list of mappings")
    return {
        "messages": checked_messages(messages),
        "tools": plain(tools, "tools"),
        "documents": plain(documents, "documents"),
        **{name: plain(value, name) for name, value in variables.items()},
    }
