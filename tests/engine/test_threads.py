"""Teams run programs the same way every time, whoever asks and however long they have slept."""

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from armillary.engine import threads
from armillary.engine.gate import FIRST_THREAD, LINE
from armillary.engine.library import library
from armillary.engine.program import Program
from armillary.engine.threads import Team, physical_cores, team
from support.engine import engine, text
from support.models import VARIANTS

COUNTS = pytest.mark.parametrize("count", [1, 2, 4])
N = 64


class Chain:
    """x ← x + y, y ← row `flip` of (y, x), …: steps that each need all of the one before."""

    def __init__(self, seed: int, steps: int = 6) -> None:
        generator = np.random.default_rng(seed)
        self.x = generator.integers(-9, 9, (5, N)).astype(np.float32)
        self.y = generator.integers(-9, 9, (5, N)).astype(np.float32)
        self.order = generator.permutation(5)
        self.rows = np.array([5])
        self.start = self.x.copy(), self.y.copy()
        self.program = Program(library())
        sizes = {"stride": 4 * N, "n": N, "rows": self.rows}
        for _ in range(steps):
            self.program.add("add", wait=True, x=self.x, y=self.y, **sizes)
            picked = {"x": self.x, "x_stride": 4 * N, "out": self.y, "out_stride": 4 * N}
            picked |= {"n": N, "numbers": self.order, "rows": self.rows}
            self.program.add("pick", wait=True, **picked)

    def check(self, steps: int = 6) -> None:
        """Whether a run gave what NumPy gives; begins anew."""
        x, y = self.start
        for _ in range(steps):
            x = x + y
            y = x[self.order]
        np.testing.assert_array_equal(self.x, x)
        np.testing.assert_array_equal(self.y, y)
        self.x[:], self.y[:] = self.start


@COUNTS
def test_programs_give_the_same_run_after_run(count: int) -> None:
    """2,000 of them (fewer where threads outnumber cores), longer and shorter ones in turns."""
    chains = [Chain(seed, steps) for seed, steps in enumerate((6, 1, 3))]
    for _ in range(150 if count > physical_cores() else 700):
        for chain, steps in zip(chains, (6, 1, 3), strict=True):
            team(count).run(chain.program)
            chain.check(steps)


@COUNTS
def test_threads_that_fell_asleep_wake_for_the_next_program(count: int) -> None:
    """Pauses around the time after which they sleep, so that some are just about to."""
    chain = Chain(0)
    for number in range(120):
        team(count).run(chain.program)
        chain.check()
        time.sleep([0, 0.0002, 0.0005, 0.001, 0.002, 0.01][number % 6])


def test_a_team_sleeps_when_nothing_comes() -> None:
    """Its threads would else take the cores that others need."""
    own = Team(library(), 3)
    chain = Chain(0)
    for _ in range(3):
        own.run(chain.program)
        chain.check()
        flags = [own._gate.view(np.int64)[(FIRST_THREAD + LINE * n) // 8 + 1 :][:1] for n in (1, 2)]
        for _ in range(2000):
            if all(flags):
                break
            time.sleep(0.005)
        assert all(flags)


def test_calls_from_several_python_threads_do_not_mix() -> None:
    chains = [Chain(seed) for seed in range(4)]

    def many(chain: Chain) -> None:
        for _ in range(150):
            team(2).run(chain.program)
            chain.check()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, chains))


def test_decoders_share_a_team() -> None:
    before = threading.active_count()
    first, second = (engine(VARIANTS[name], threads=2) for name in ("plain", "layer norm"))
    assert first._team is second._team is team(2)
    assert threading.active_count() <= before + 1
    ids = text(20)
    alone = [each.take([each.new_cache()], [ids])[0] for each in (first, second)]

    def many(each: object) -> list[np.ndarray]:
        return [each.take([each.new_cache()], [ids])[0] for _ in range(20)]  # type: ignore[attr-defined]

    with ThreadPoolExecutor(2) as pool:
        for expected, results in zip(alone, pool.map(many, (first, second)), strict=True):
            for result in results:
                np.testing.assert_array_equal(result, expected)


def _in_another_process(queue: "multiprocessing.Queue[bool]") -> None:
    chain = Chain(0)
    for _ in range(20):
        team(2).run(chain.program)
        chain.check()
    queue.put(True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_process_that_is_forked_off_has_threads_of_its_own() -> None:
    """It inherits the team and none of its threads: it would wait for them for ever."""
    chain = Chain(0)
    team(2).run(chain.program)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_another_process, args=(queue,), daemon=True)
    child.start()
    try:
        assert queue.get(timeout=60)
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("count", [0, -2])
def test_a_team_has_at_least_one_thread(count: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {count}"):
        team(count)


def test_cores_are_counted_once_however_many_threads_they_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, shared in enumerate(("0,4", "1,5", "2,6", "3,7") * 2):
        (tmp_path / f"cpu{number}").write_text(shared + "\n")

    class Files:
        def __init__(self, path: str) -> None:
            self.number = path.split("/")[5]

        def read_text(self) -> str:
            return (tmp_path / self.number).read_text()

    monkeypatch.setattr(threads, "Path", Files)
    for allowed, expected in ((range(8), 4), ({0, 4}, 1), ({0, 1, 5}, 2), ({2, 9}, 2)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, to=allowed: set(to), raising=False)
        assert physical_cores() == expected
