"""The tasks of an evaluation, made from a few settings for whatever model and text there are.

suite = Suite.of(lm.tokenizer, documents, window=2048, original_window=2048)
tasks = suite.tasks(Grid(lengths=(512, 1024, 2048))).tasks
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from armillary.errors import UserError
from armillary.evaluation.budget import Grid
from armillary.evaluation.induction import Induction
from armillary.evaluation.perplexity import Document, Perplexity, ShortLoss
from armillary.evaluation.reasoning import PointerChase, VariableTracking
from armillary.evaluation.records import Cell, Task
from armillary.evaluation.retrieval import Retrieval
from armillary.evaluation.short import ShortTasks
from armillary.evaluation.short_data import Question
from armillary.evaluation.vocabulary import TaskTokens
from armillary.tokenizer import Tokenizer

NAMES = ("perplexity", "retrieval", "reasoning", "induction", "short")
_MATTERS = {
    "perplexity": {"lengths", "windows"},
    "retrieval": {"lengths", "instances", "depths", "distractors"},
    "reasoning": {"lengths", "instances", "hops"},
    "induction": {"lengths", "instances", "depths"},
    "short": {"limit"},
}
_TARGETS = 256  # tokens that one window's loss is of
_SHORTEST = 16  # tokens of a context
_SHORT = 512  # tokens of a short text
_HAYSTACK = 1 << 16  # tokens of prose that questions are hidden in; more where contexts are longer


@dataclass(frozen=True)
class Made:
    """Tasks, and what is to be said of those that could not be made as asked."""

    tasks: tuple[Task, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """What tasks are made of. The same suite and grid make the same tasks.

    names      of NAMES; "perplexity" brings the loss of short texts along
    tokens     what questions are composed of; None where the tokenizer has no words for that, and
               `why_not` then says why
    documents  that losses are measured on
    questions  of the short tasks
    crop       the window before any extension: losses are measured at it too
    reach      see `Perplexity`; keys too
    strict     whether a task that cannot be made is an error; else it is left out and told
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    tokens: TaskTokens | None
    documents: tuple[Document, ...]
    questions: Mapping[str, Sequence[Question]] = field(default_factory=dict)
    crop: int | None = None
    reach: int | None = None
    keys: Mapping[str, tuple[int, ...]] | None = None
    seed: int = 0
    strict: bool = True
    why_not: str = ""

    @property
    def matters(self) -> frozenset[str]:
        """The entries of a grid that the tasks look at."""
        return frozenset().union(*(_MATTERS[name] for name in self.names))

    def make(self, grid: Grid, *, check: bool = True) -> Made:
        """Make the tasks of a grid. Raises UserError for what does not fit, when strict.

        With `check` every context is put together once, so that none fails hours later.
        """
        tasks: list[Task] = []
        notices: list[str] = []
        makers = self._makers(grid)
        for name in self.names:
            for make in makers[name]:
                task, said = self._made(make, grid.lengths, check)
                tasks += [] if task is None else [task]
                notices += said
        if not tasks:
            raise UserError(f"no task can be made: {'; '.join(notices)}")
        notices += [told for task in tasks for told in getattr(task, "notices", ())]
        return Made(tuple(tasks), tuple(notices))

    def _made(
        self, make: Callable[[tuple[int, ...]], Task], lengths: tuple[int, ...], check: bool
    ) -> tuple[Task | None, list[str]]:
        """A task at all lengths; where one has no room for it, at those that have."""

        def made(lengths: tuple[int, ...]) -> Task:
            task = make(lengths)
            if check:
                _compose(task)
            return task

        try:
            return made(lengths), []
        except UserError as error:
            if self.strict:
                raise
            said = str(error)
        fit = []
        for length in lengths:
            with contextlib.suppress(UserError):
                made((length,))
                fit.append(length)
        gone = ", ".join(f"{length:,}" for length in lengths if length not in fit)
        return (made(tuple(fit)) if fit else None), [f"left out at {gone} tokens: {said}"]

    def _makers(self, grid: Grid) -> Mapping[str, list[Callable[[tuple[int, ...]], Task]]]:
        depths = _depths(grid.depths)
        instances, seed = grid.instances, self.seed
        chased = tuple(hops for hops in grid.hops if hops >= 2) or (2,)
        return {
            "perplexity": [
                lambda lengths: self._perplexity(lengths, grid.windows),
                lambda _: self._short_loss(2 * grid.windows),
            ],
            "retrieval": [
                lambda lengths: Retrieval(
                    self._words(), lengths, depths, grid.distractors, instances=instances, seed=seed
                )
            ],
            "reasoning": [
                lambda lengths: VariableTracking(
                    self._words(), lengths, grid.hops, instances=instances, seed=seed
                ),
                lambda lengths: PointerChase(
                    self._words(), lengths, chased, instances=instances, seed=seed
                ),
            ],
            "induction": [
                lambda lengths: Induction(
                    self._words(), lengths, depths, instances=instances, seed=seed
                )
            ],
            "short": [lambda _: self._short_tasks(grid.limit)],
        }

    def _words(self) -> TaskTokens:
        if self.tokens is None:
            raise UserError(self.why_not)
        return self.tokens

    @property
    def _bos(self) -> int | None:
        begin = self.tokenizer.begin([])
        return begin[0] if begin else None

    def _perplexity(self, lengths: tuple[int, ...], windows: int) -> Perplexity:
        crop = self.crop if self.crop is not None and self.crop < max(lengths) else None
        shortest = min([*lengths, *([] if crop is None else [crop])])
        if shortest < _SHORTEST:
            raise UserError(
                f"perplexity: a context of {shortest} tokens is below {_SHORTEST}, the least that "
                "losses are measured under; ask for a greater length"
            )
        return Perplexity(
            self.documents,
            lengths,
            targets=min(_TARGETS, shortest // 2),
            windows=windows,
            crop=crop,
            reach=None if self.reach is None else max(self.reach, *lengths),
            bos=self._bos,
            keys=self.keys,
            seed=self.seed,
        )

    def _short_loss(self, texts: int) -> ShortLoss:
        length = _SHORT if self.crop is None else min(_SHORT, self.crop)
        return ShortLoss(self.documents[:texts], length, bos=self._bos)

    def _short_tasks(self, limit: int | None) -> ShortTasks:
        return ShortTasks(
            self.tokenizer, {name: asked[:limit] for name, asked in self.questions.items()}
        )


def task_tokens(
    tokenizer: Tokenizer, documents: Sequence[Document], longest: int
) -> tuple[TaskTokens | None, str]:
    """Return what questions are made of, hidden in the documents' text; or why there is none.

    Where the text holds too few stretches that are free of what is asked about, as with a small
    vocabulary, questions are hidden among words, and the second says so.
    """
    wanted = max(_HAYSTACK, 2 * longest)
    prose: list[int] = []
    for document in documents:
        prose += document.ids[: wanted - len(prose)]
    try:
        tokens = TaskTokens.of_tokenizer(tokenizer, prose=prose)
    except UserError as error:
        return None, str(error)
    try:
        for task in (PointerChase(tokens, (_HAYSTACK,)), Induction(tokens, (_HAYSTACK,))):
            _compose(task)
    except UserError as error:
        return replace(tokens, prose=()), f"questions are hidden among words, not in text: {error}"
    return tokens, ""


def default_lengths(window: int, original_window: int | None = None) -> tuple[int, ...]:
    """From an eighth of the original window, or 256 tokens at least, to the window by doublings.

    So a model that was extended is asked at all lengths that the one before is asked at, where its
    window is a power of two times that.
    """
    original = original_window or window
    least = max(1, original // 8, min(256, original // 2))
    lengths = [window]
    while lengths[0] // 2 >= least:
        lengths.insert(0, lengths[0] // 2)
    return tuple(lengths)


def default_grid(lengths: tuple[int, ...]) -> Grid:
    """What is asked unless it is said: less of what the shortest length has no room for."""
    if lengths[0] >= 512:
        return Grid(lengths)
    few = Grid(lengths, depths=5, distractors=(4,), hops=(1, 2))
    return few if lengths[0] >= 256 else replace(few, depths=3, distractors=(2,))


def _depths(count: int) -> tuple[float, ...]:
    return tuple(step / (count - 1) for step in range(count)) if count > 1 else (0.5,)


def _compose(task: Task) -> None:
    """Put together every context of a task that composes some. Raises UserError as that does."""
    compose: Callable[[Cell], object] | None = getattr(
        task, "prompts", getattr(task, "prompt", None)
    )
    if compose is not None:
        for cell in task.cells():
            compose(cell)
