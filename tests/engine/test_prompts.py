"""Prompts that begin as an earlier one did: what is computed, and that nothing shows it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from armillary.checkpoints.sums import Sums
from armillary.config import DecoderConfig
from armillary.engine.decoder import EngineDecoder
from armillary.engine.prompt_files import LONG, SHORTEST, PromptFiles
from armillary.engine.prompts import PromptCache
from armillary.generation.engine import TextEngine
from armillary.rope_scaling import DynamicNTK
from support.engine import engine, text, with_attention
from support.models import VARIANTS

CONFIG = VARIANTS["plain"].model_copy(update={"max_positions": 2048})
ROTARY = CONFIG.layers[0].attention.rotary
assert ROTARY is not None
DYNAMIC = ROTARY.model_copy(update={"scaling": DynamicNTK(factor=2.0, original_window=128)})
CONFIGS = {
    "plain": CONFIG,
    "windowed": with_attention(CONFIG, window=30),
    "dynamic": with_attention(CONFIG, rotary=DYNAMIC),
}
PROMPT = text(300)
NEW = 5
Make = Callable[[DecoderConfig], PromptCache]


def files(folder: Path, config: DecoderConfig) -> PromptFiles:
    weights = folder / "weights"
    weights.write_bytes(b"some weights")
    sums = Sums([weights], folder / "prompts" / "weights.json")
    return PromptFiles(folder / "prompts", sums, config, "stored", "BF16")


@pytest.fixture(params=["memory", "files"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A prompt cache that has the last prompt in memory, or one that has it from a file only."""
    if request.param == "memory":
        return PromptCache
    return lambda config: PromptCache(config, files(tmp_path, config))


def continued(
    decoder: EngineDecoder, known: PromptCache | None, prompt: list[int], length: int = 700
) -> list[np.ndarray]:
    """The logits after a prompt, and after a few more tokens, which are the likeliest."""
    texts = TextEngine(decoder, known).texts([length])
    rows = texts.begin([prompt])
    for _ in range(NEW):
        rows += texts.step([int(rows[-1].argmax())])
    return rows


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("encoding", ["F32", "BF16"])
def test_nothing_shows_what_was_known(name: str, encoding: str, make: Make) -> None:
    """Case 58: longer, edited, a pure prefix, the same, another; also past a window."""
    config = CONFIGS[name]
    decoder = engine(config, encoding=encoding, threads=1, cache="BF16")
    known = make(config)
    continued(decoder, known, PROMPT)
    known.save()
    reused = []
    for prompt in (
        [*PROMPT, *text(40, seed=2)],
        [*PROMPT[:200], *text(9, seed=3)],
        PROMPT[:150],
        PROMPT[:150],
        text(90, seed=4),
        PROMPT,
    ):
        expected = continued(decoder, None, prompt)
        np.testing.assert_array_equal(continued(decoder, known, prompt), expected)
        reused.append(known.reused)
    in_files = make is not PromptCache
    # In memory the last prompt alone is known.
    assert reused == [300, 200, 149, 149, 0, 299 if in_files else 0]


def test_what_was_written_after_a_prompt_is_computed_anew() -> None:
    """It was computed in another way, of which the last bits tell."""
    decoder, known = engine(CONFIG, threads=1), PromptCache(CONFIG)
    rows = continued(decoder, known, PROMPT)
    longer = [*PROMPT, *(int(row.argmax()) for row in rows), 7]
    np.testing.assert_array_equal(
        continued(decoder, known, longer), continued(decoder, None, longer)
    )
    assert known.reused == len(PROMPT)


def test_a_text_that_goes_on_is_not_disturbed_by_another_that_begins_alike() -> None:
    decoder, known = engine(CONFIG, threads=1), PromptCache(CONFIG)
    alone = continued(decoder, None, PROMPT)
    texts = [TextEngine(decoder, known).texts([700]) for _ in range(2)]
    first, second = (each.begin([PROMPT]) for each in texts)
    for _ in range(NEW):
        first += texts[0].step([int(first[-1].argmax())])
        second += texts[1].step([9])
    np.testing.assert_array_equal(first, alone)


def test_other_frequencies_are_another_prompt(make: Make) -> None:
    decoder = engine(CONFIGS["dynamic"], threads=1, cache="BF16")
    known = make(CONFIGS["dynamic"])
    continued(decoder, known, PROMPT, 700)
    known.save()
    for length, reused in ((701, 0), (700, 299 if make is not PromptCache else 0)):
        np.testing.assert_array_equal(
            continued(decoder, known, PROMPT, length), continued(decoder, None, PROMPT, length)
        )
        assert known.reused == reused


def test_short_beginnings_are_not_worth_it() -> None:
    decoder, known = engine(CONFIG, threads=1), PromptCache(CONFIG)
    for shared, reused in ((SHORTEST - 1, 0), (SHORTEST, SHORTEST)):
        continued(decoder, known, PROMPT)
        continued(decoder, known, [*PROMPT[:shared], 60, 60, 60])
        assert known.reused == reused
    continued(decoder, known, PROMPT[:SHORTEST])
    continued(decoder, known, PROMPT)
    assert known.reused == 0


def test_memory_is_free_before_another_prompt_is_computed() -> None:
    decoder, known = engine(CONFIG, threads=1), PromptCache(CONFIG)
    continued(decoder, known, PROMPT)
    assert known._last is not None
    known.find(text(100, seed=9), decoder.new_cache())
    assert known._last is None


def test_only_long_prompts_go_to_files(tmp_path: Path) -> None:
    decoder = engine(CONFIG, threads=1, cache="BF16")
    known = PromptCache(CONFIG, files(tmp_path, CONFIG))
    for length, there in ((LONG - 1, 0), (LONG, 1)):
        continued(decoder, known, text(length, seed=length))
        known.save()
        assert len(list((tmp_path / "prompts").glob("*.safetensors"))) == there
