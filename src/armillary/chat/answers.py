"""Which parts of a rendered chat are the assistant's: what a model learns to write.

A template that has blocks of {% generation %} says it itself. Of any other one the rendering of the
chat's beginnings is compared: an answer is what stands between the end of a rendering that asks for
it and its end token, which is where a model stops. Where the beginnings of a chat are not rendered
as the beginning of the whole, nothing says what belongs to whom, and the chat is refused.
"""

import re
from collections.abc import Callable, Sequence

from armillary.errors import UserError

_COMPARED = 1 << 30  # answers times characters, some twenty seconds

Span = tuple[int, int]  # characters start … stop − 1 of a rendering


class UnclearAnswersError(UserError):
    """What a template writes does not show what the assistant wrote."""


def compared_spans(
    render: Callable[[int, bool], str],
    roles: Sequence[object],
    whole: str,
    control: re.Pattern[str],
) -> list[Span]:
    """Return the answers of a chat, found by comparison.

    render    gives the rendering of the first n messages, with a generation prompt or without
    roles     who wrote each message
    whole     the rendering of all of them
    control   finds control tokens; white space after an answer's last one is not the answer's

    Raises UnclearAnswersError naming the message whose answer cannot be told apart.
    """
    numbers = [number for number, role in enumerate(roles) if role == "assistant"]
    if len(numbers) * len(whole) > _COMPARED:
        raise UnclearAnswersError(
            f"{len(numbers)} answers in {len(whole)} characters are too many to find by comparing; "
            "a template with {% generation %} blocks finds them at once"
        )
    spans: list[Span] = []
    for number in numbers:
        try:
            asked, answered = render(number, True), render(number + 1, False)
        except UserError as error:
            raise UnclearAnswersError(
                f"messages[{number}]: the template does not render a chat that ends there: {error}"
            ) from error
        if not answered.startswith(asked) or (spans and spans[-1][1] > len(asked)):
            raise UnclearAnswersError(
                f"messages[{number}]: the template asks for an answer with a text that does not "
                "stand before this one"
            )
        if not whole.startswith(answered):
            raise UnclearAnswersError(
                f"messages[{number}]: the template writes it, or what is before it, in another way "
                "where more follows"
            )
        spans.append((len(asked), _end(answered, len(asked), control)))
    return spans


def _end(text: str, start: int, control: re.Pattern[str]) -> int:
    ends = [match.end() for match in control.finditer(text, start)]
    return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)


def marked_spans(marked: str, marks: tuple[str, str], whole: str) -> list[Span]:
    """Return what stands between two marks, as places of the same rendering without marks.

    Raises UnclearAnswersError where the marks changed what was rendered, as when a template cuts or
    measures what it has marked.
    """
    begin, end = marks
    spans: list[Span] = []
    place = start = depth = 0
    pieces = re.split(f"([{begin}{end}])", marked)
    for piece in pieces:
        if piece == begin:
            start = start if depth else place
            depth += 1
        elif piece == end:
            depth -= 1
            if depth == 0 and place > start:
                spans.append((start, place))
        else:
            place += len(piece)
    if "".join(piece for piece in pieces if piece not in marks) != whole or depth:
        raise UnclearAnswersError(
            "the template uses what stands in its {% generation %} blocks for something else too"
        )
    return spans
