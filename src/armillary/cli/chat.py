"""`armillary chat`: talk with a model in the terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from armillary.cli._options import (
    Debug,
    IgnoreKey,
    Json,
    Model,
    dim,
    print_json,
    shows_styles,
    utf8,
)
from armillary.cli._sampling import (
    CacheType,
    Device,
    Dtype,
    Engine,
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    given,
    load_model,
)
from armillary.errors import UserError

if TYPE_CHECKING:
    from armillary.language_model import LanguageModel

HELP = """\
/reset        forget the conversation
/undo         take back the last question and its answer
/retry        answer the last question anew
/system TEXT  set the system message, and start over
/tokens       how full the window is
/quit         leave (so does Ctrl-D)
A line that ends in \\ goes on in the next. Ctrl-C stops an answer."""


def chat(
    model: Model,
    *,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The system message.",
            rich_help_panel="Conversation",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    engine: Engine = "auto",
    dtype: Dtype = "auto",
    cache_type: CacheType = "auto",
    device: Device = "auto",
    ignore_key: IgnoreKey = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Talk with a model; the answers stream, and earlier turns are not computed again.

    Examples:
      armillary chat smollm2-135m
      armillary chat smollm2-135m --system "You answer in one sentence." --temperature 0.2
      echo "Why is the sky blue?" | armillary chat smollm2-135m --json

    Each line of input is a message. With --json an object is printed for each answer.
    """
    options = given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop) if stop else None,
    )
    from armillary.generation.sampling import SamplingConfig

    SamplingConfig(**options)
    lm = load_model(model, dtype, device, ignore_key, engine, cache_type)
    conversation = Conversation(lm, system, options)
    interactive = sys.stdin.isatty() and not json
    if interactive:
        _terminal(conversation, model)
        return
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        line = utf8(raw, f"standard input, line {number}").rstrip("\r\n")
        if line.strip():
            answer = conversation.ask(line)
            if json:
                text = "".join(answer)
                print_json({"text": text, **conversation.facts})
            else:
                _show(answer)


class WindowFullError(UserError):
    """A conversation leaves no room for an answer."""


class Conversation:
    """The messages so far, and the cache that holds what was computed for them."""

    def __init__(self, lm: "LanguageModel", system: str | None, options: dict[str, Any]) -> None:
        self._lm = lm
        self._template = lm.chat_template
        self._options = options
        self.facts: dict[str, object] = {}
        self.start_over(system)

    def start_over(self, system: str | None = None) -> None:
        """Forget everything; with a text, under another system message."""
        if system is not None:
            self._system = [{"role": "system", "content": system}]
        elif not hasattr(self, "_system"):
            self._system = []
        self._messages = list(self._system)
        window = self._lm.config.max_positions
        # One rotary length for the whole talk, so that no turn changes what is cached.
        self._cache = self._lm.new_cache(rotary_length=window)

    @property
    def last_question(self) -> str | None:
        """What was asked last."""
        asked = [message for message in self._messages if message["role"] == "user"]
        return asked[-1]["content"] if asked else None

    def undo(self) -> None:
        """Take back the last question and its answer."""
        while self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()

    def tokens(self) -> tuple[int, int]:
        """Tokens of the conversation, and those that the window holds."""
        used = len(self._template.encode(self._messages)) if self._messages else 0
        return used, self._lm.config.max_positions

    def ask(self, question: str) -> Iterator[str]:
        """Give the answer piece by piece; what was given is kept, also of one broken off.

        Raises WindowFullError, and forgets the question, when the window has no room for an answer.
        """
        asked = {"role": "user", "content": question}
        ids = self._template.encode([*self._messages, asked])
        window = self._lm.config.max_positions
        if len(ids) >= window:
            raise WindowFullError(
                f"the conversation has {len(ids)} tokens, which leaves no room for an answer in "
                f"the window of {window}"
            )
        room = window - len(ids)
        options = {"max_tokens": room, **self._options}
        options["max_tokens"] = min(options["max_tokens"], room)
        events = self._lm.stream(ids, cache=self._cache, **options)
        return self._answering(asked, len(ids), events)

    def _answering(self, asked: dict[str, str], prompt: int, events: Any) -> Iterator[str]:
        pieces: list[str] = []
        count, reason = 0, "interrupted"
        try:
            for event in events:
                pieces.append(event.text)
                count += 1
                reason = event.finish_reason or reason
                yield event.text
        finally:
            self._messages += [asked, {"role": "assistant", "content": "".join(pieces)}]
            self.facts = {
                "finish_reason": reason,
                "prompt_tokens": prompt,
                "completion_tokens": count,
            }


def _show(answer: Iterator[str]) -> None:
    try:
        for piece in answer:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _terminal(conversation: Conversation, model: str) -> None:
    with contextlib.suppress(ImportError):
        import readline  # gives input() its line editing and history

        if "libedit" not in (readline.__doc__ or ""):
            # Pasted lines come as one message, and can be edited before they are sent.
            readline.parse_and_bind("set enable-bracketed-paste on")
    _note(f"{model}. /help shows what else can be typed; Ctrl-D leaves.")
    while True:
        try:
            line = _read_message()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _note("(Ctrl-D leaves)")
            continue
        if line.strip() == "/quit":
            return
        if line.strip():
            try:
                _turn(conversation, line)
            except WindowFullError as error:
                _note(f"{error}; /undo or /reset makes room")
            except UserError as error:
                _note(str(error))


def _note(text: str) -> None:
    print(dim(text, sys.stdout))


def _prompt(mark: str) -> str:
    """The mark, coloured in a way that leaves it one character wide for line editing."""
    return f"\x01\x1b[1;36m\x02{mark} \x01\x1b[0m\x02" if shows_styles(sys.stdout) else f"{mark} "


def _read_message() -> str:
    """Read one message; a line that ends in a backslash goes on in the next."""
    lines = [input(_prompt(">"))]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_prompt(".")))
    return "\n".join(lines)


def _turn(conversation: Conversation, line: str) -> None:
    command, _, rest = line.strip().partition(" ")
    if command == "/help":
        print(HELP)
    elif command == "/reset":
        conversation.start_over()
    elif command == "/system":
        conversation.start_over(rest)
    elif command == "/undo":
        conversation.undo()
    elif command == "/tokens":
        used, window = conversation.tokens()
        print(f"{used} of {window} tokens")
    elif command == "/retry":
        question = conversation.last_question
        if question is None:
            raise UserError("there is no question yet")
        conversation.undo()
        _answer(conversation, question)
    elif command.startswith("/") and command[1:].isalpha():
        raise UserError(f"{command} is not known; /help shows what is")
    else:
        _answer(conversation, line)


def _answer(conversation: Conversation, question: str) -> None:
    answer = conversation.ask(question)
    try:
        _show(answer)
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
        _note("(stopped)")
