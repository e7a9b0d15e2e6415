"""Messages → the text or the ids that a chat model expects, and which ids are its own answers.

Knows templates and tokenizers, not models. The template is untrusted (see `sandbox`), and so are
the messages: what a user writes stays text, even where it spells a control token.
"""

from armillary.chat.answers import UnclearAnswersError
from armillary.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "UnclearAnswersError"]
