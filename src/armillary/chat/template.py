"""A chat template bound to the tokenizer that it was written for."""

from armillary.chat.messages import checked_messages, plain
from armillary.chat.sandbox import compile_template, render
from armillary.chat.veil import ControlTexts, Veil, all_text
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer


class ChatTemplate:
    """Renders messages by a Jinja template, as transformers does, within a sandbox and a budget.

    The template sees messages, tools, documents, add_generation_prompt, the tokenizer's named
    tokens (bos_token, eos_token, …) and the caller's variables. Raises UserError, in one line,
    for a template that is no Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self.tokenizer = tokenizer
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
        given = _given(messages, tools, documents, variables)
        veil = Veil(self._controls, self.source + all_text(given))
        rendered = self._render(veil.hide(given), add_generation_prompt)
        parts = [
            veil.restore(part) if isinstance(part, str) else part
            for part in self.tokenizer.split_specials(rendered)
        ]
        return self.tokenizer.begin(self.tokenizer.encode_parts(parts))

    def _render(self, given: dict[str, object], add_generation_prompt: bool) -> str:
        return render(
            self._template,
            {
                **self.tokenizer.named_tokens,
                "add_generation_prompt": add_generation_prompt,
                **given,
            },
        )


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
