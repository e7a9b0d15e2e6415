"""Beginnings of prompts that were computed before, which need not be computed again.

What comes out is the same to the last bit. Only prompts are kept, not what was written after them:
a prompt is computed in passes of many rows, in which no row depends on the others, and
`EngineDecoder.take(prompts=True)` computes the rest of one in such passes, however short it is.
"""

from collections.abc import Sequence

from armillary.config import DecoderConfig
from armillary.engine.cache import TextCache
from armillary.engine.prompt_files import SHORTEST, PromptFiles, common_prefix

Regimes = tuple[int, ...]


class PromptCache:
    """The last prompt, in memory, and where there are `files` the long ones of earlier processes.

    Its memory is one prompt's, and is free again before another is computed that shares nothing.
    `reused` tells how many tokens of the last prompt were not computed.
    """

    def __init__(self, config: DecoderConfig, files: PromptFiles | None = None) -> None:
        self.reused = 0
        self._rotaries, self._files = config.rotaries, files
        self._last: TextCache | None = None

    def find(self, prompt: Sequence[int], empty: TextCache) -> TextCache:
        """A cache like the empty one that holds the longest known beginning, if any.

        At least SHORTEST tokens, and at most all but the last, whose logits are wanted.
        """
        wanted = list(prompt[:-1])
        length = empty.rotary_length or len(prompt)
        found, last = empty, self._last
        if last is not None and self._regimes(last.filled_at) == self._regimes(length):
            common = common_prefix(last.tokens, wanted)
            if common >= SHORTEST:
                found = last.beginning(common, room=length, rotary_length=empty.rotary_length)
        if found is empty:
            self._last = last = None
        if self._files is not None and found.length + SHORTEST <= len(wanted):
            held = self._files.read(wanted, found.length + SHORTEST, self._regimes(length), length)
            if held is not None:
                held.rotary_length, held.filled_at = empty.rotary_length, length
                found = held
        self.reused = found.length
        return found

    def keep(self, cache: TextCache) -> None:
        """Remember a prompt, computed just now, in the cache that its text goes on in."""
        self._last = cache.seen() if cache.length > SHORTEST else None

    def save(self) -> None:
        """Write the last prompt to a file, where there are files and it is worth it."""
        if self._files is not None and self._last is not None:
            self._files.write(self._last, self._regimes(self._last.filled_at))

    def _regimes(self, length: int) -> Regimes:
        """What rules whose frequencies vary with the length make of one."""
        return tuple(rotary.scaling.regime(length) for rotary in self._rotaries)
