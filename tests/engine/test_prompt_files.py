"""Prompts in files: which are found, which go, and that nothing wrong with one is an error."""

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from armillary.checkpoints.sums import Sums
from armillary.engine.cache import TextCache
from armillary.engine.prompt_files import LONG, SHORTEST, PromptFiles, common_prefix
from support.engine import text
from support.models import VARIANTS

CONFIG = VARIANTS["plain"]
TOKENS = text(300)
REGIMES = (0,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(b"some weights")
    return tmp_path / "prompts"


def files(folder: Path, **options: object) -> PromptFiles:
    sums = Sums([folder.parent / "weights"], folder / "weights.json")
    given = {"config": CONFIG, "width": "stored", "stored": "BF16", **options}
    return PromptFiles(folder, sums, **given)  # type: ignore[arg-type]


def cache(tokens: list[int], stored: str = "BF16") -> TextCache:
    """A prompt's cache with numbers that depend on the tokens."""
    made = TextCache(CONFIG, stored, room=len(tokens))  # type: ignore[arg-type]
    for number, part in enumerate(made.arrays().values()):
        part[:] = np.random.default_rng(sum(tokens) + number).integers(0, 999, part.shape)
    made.tokens += tokens
    return made


def prompts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)


def found(files: PromptFiles, tokens: list[int]) -> int:
    held = files.read(tokens, SHORTEST, REGIMES, len(tokens))
    return 0 if held is None else held.length


def test_what_is_read_is_what_was_written(folder: Path) -> None:
    written = cache(TOKENS)
    files(folder).write(written, REGIMES)
    read = files(folder).read([*TOKENS[:250], 60, 60], SHORTEST, REGIMES, 400)
    assert read is not None
    assert (read.tokens, read.room) == (TOKENS[:250], 448)
    for name, part in written.arrays().items():
        width = part.shape[1] // written.room
        np.testing.assert_array_equal(
            read.arrays()[name][:, : 250 * width], part[:, : 250 * width], err_msg=name
        )


def test_the_longest_beginning_is_taken(folder: Path) -> None:
    for length in (260, 420):
        files(folder).write(cache([*TOKENS[:length], *text(length, seed=length)]), REGIMES)
    assert found(files(folder), TOKENS) == 300
    assert found(files(folder), TOKENS[:100]) == 100
    assert found(files(folder), TOKENS[: SHORTEST - 1]) == 0
    assert found(files(folder), text(300, seed=5)) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"config": VARIANTS["plain"].model_copy(update={"max_positions": 4096})},
        {"width": "float32"},
        {"stored": "F32"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_was_computed_otherwise_is_not_taken(folder: Path, other: dict[str, object]) -> None:
    files(folder).write(cache(TOKENS), REGIMES)
    assert found(files(folder, **other), TOKENS) == 0
    assert found(files(folder), TOKENS) == 300


def test_other_weights_and_other_frequencies_are_not_taken(folder: Path) -> None:
    files(folder).write(cache(TOKENS), REGIMES)
    assert files(folder).read(TOKENS, SHORTEST, (1,), 300) is None
    (folder.parent / "weights").write_bytes(b"same weightz")
    assert found(files(folder), TOKENS) == 0


def test_other_code_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(folder).write(cache(TOKENS), REGIMES)
    monkeypatch.setattr("armillary.engine.prompt_files._code", lambda: "another version")
    assert found(files(folder), TOKENS) == 0


def test_prompts_are_their_owners_alone(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    files(folder).write(cache(TOKENS), REGIMES)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
        lambda data: data.replace(b"sha256", b"sha257"),
    ],
    ids=["cut", "half", "four bytes", "empty", "longer", "a bit", "huge header", "no sum"],
)
def test_a_damaged_file_is_removed_and_no_error(folder: Path, damage: object) -> None:
    files(folder).write(cache(TOKENS), REGIMES)
    (path,) = prompts(folder)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert found(files(folder), TOKENS) == 0
    files(folder).write(cache(TOKENS), REGIMES)
    assert found(files(folder), TOKENS) == 300
    assert prompts(folder) == [path], "written anew"


@pytest.mark.parametrize("twice", ["keys.0", "values.1", "tokens", "more"])
def test_arrays_of_another_shape_are_not_taken_in(folder: Path, twice: str) -> None:
    """A file that claims this model's name and holds another's numbers, its sum in order."""
    from safetensors.numpy import load_file, save_file

    from armillary.engine.prompt_files import _sum

    files(folder).write(cache(TOKENS), REGIMES)
    (path,) = prompts(folder)
    arrays = load_file(path)
    part = arrays.get(twice, np.zeros(9, np.int32))
    arrays[twice] = np.concatenate([part, part], axis=-1)
    save_file(arrays, path, {"sha256": _sum(arrays)})
    assert found(files(folder), TOKENS) == 0
    assert not prompts(folder)


def test_a_prompt_that_files_hold_almost_is_not_written_again(folder: Path) -> None:
    kept = files(folder)
    kept.write(cache(TOKENS), REGIMES)
    for more in (0, 20):
        kept.write(cache([*TOKENS, *text(more, seed=2)]), REGIMES)
        assert len(prompts(folder)) == 1
    kept.write(cache([*TOKENS[:200], *text(100, seed=3)]), REGIMES)
    assert len(prompts(folder)) == 2


def test_a_longer_prompt_takes_the_place_of_its_beginning(folder: Path) -> None:
    kept = files(folder)
    kept.write(cache(TOKENS), REGIMES)
    kept.write(cache([*TOKENS, *text(100, seed=2)]), REGIMES)
    assert len(prompts(folder)) == 1
    assert found(files(folder), [*TOKENS, *text(100, seed=2)]) == 400


def test_short_prompts_are_not_written(folder: Path) -> None:
    files(folder).write(cache(TOKENS[: LONG - 1]), REGIMES)
    assert not folder.exists()


def test_what_was_of_no_use_for_longest_goes_first(folder: Path) -> None:
    texts = [text(300, seed=seed) for seed in range(4)]
    files(folder).write(cache(texts[0]), REGIMES)
    limit = 3 * prompts(folder)[0].stat().st_size
    kept = files(folder, limit=limit)
    for ids in texts[1:3]:
        kept.write(cache(ids), REGIMES)
    now = time.time()
    for age, path in enumerate(reversed(prompts(folder))):
        os.utime(path, (now - 60 * age - 60, now - 60 * age - 60))
    assert found(kept, texts[0]) == 300, "and so it is of use now"
    kept.write(cache(texts[3]), REGIMES)
    assert [found(kept, ids) for ids in texts] == [300, 0, 300, 300]


def test_a_prompt_larger_than_the_limit_is_not_written_and_costs_none(folder: Path) -> None:
    files(folder).write(cache(TOKENS), REGIMES)
    size = prompts(folder)[0].stat().st_size
    files(folder, limit=size - 1).write(cache(text(400, seed=8)), REGIMES)
    assert found(files(folder), TOKENS) == 300
    assert len(prompts(folder)) == 1


def test_what_a_process_left_that_died_goes_after_an_hour(folder: Path) -> None:
    folder.mkdir()
    old, new = folder / ".a.safetensors.01234567.partial", folder / ".b.safetensors.0.partial"
    for path in (old, new):
        path.write_bytes(b"begun")
    os.utime(old, (1, 1))
    files(folder).write(cache(TOKENS), REGIMES)
    assert not old.exists()
    assert new.exists(), "another process may be writing it now"


def test_processes_need_not_know_of_each_other(folder: Path) -> None:
    """Each writes, reads and removes as it goes; what is read is always what was written."""
    texts = [text(300, seed=seed) for seed in range(6)]
    files(folder).write(cache(texts[0]), REGIMES)
    limit = 2 * prompts(folder)[0].stat().st_size

    def work(turn: int) -> int:
        right = 0
        for ids in texts[turn:] + texts[:turn]:
            written = cache(ids)
            kept = files(folder, limit=limit)
            kept.write(written, REGIMES)
            read = kept.read(ids, SHORTEST, REGIMES, 300)
            if read is not None:
                for name, part in read.arrays().items():
                    np.testing.assert_array_equal(part, written.arrays()[name])
                right += 1
        return right

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0


def test_a_place_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"some weights")
    (tmp_path / "prompts").write_text("a file, where a directory should be")
    kept = files(tmp_path / "prompts")
    kept.write(cache(TOKENS), REGIMES)
    assert found(kept, TOKENS) == 0


def test_weights_that_are_gone_are_no_error(folder: Path) -> None:
    kept = files(folder)
    (folder.parent / "weights").unlink()
    kept.write(cache(TOKENS), REGIMES)
    assert found(kept, TOKENS) == 0


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2], 2), ([1, 9], [1, 2], 1), ([], [1], 0)],
)
def test_the_common_prefix_ends_where_texts_part(
    one: list[int], other: list[int], count: int
) -> None:
    assert common_prefix(one, other) == count
