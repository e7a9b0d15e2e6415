"""The checkpoints of a run: written, found, and the old ones removed.

A folder belongs to one run at a time. What is named otherwise than by us is left alone.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.errors import CheckpointError, UserError
from armillary.files import MANIFEST, set_aside
from armillary.training.checkpoint import STATE, read_state, save_checkpoint, verify_checkpoint
from armillary.training.ranks import on_first_rank

_NAME = re.compile(r"step-(\d{8,})")
# What a killed process leaves: a checkpoint half written, or half removed.
_LEFT = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.(partial|removed)")


class CheckpointFolder:
    """Keeps the last few checkpoints of a run, and the best few beside them.

        folder = CheckpointFolder(run / "checkpoints", keep_last=2, keep_best=1)
        folder.save(step, objective, optimizer, facts, metric=validation_loss)
        path = folder.newest(report=print)

    keep_last   how many of the newest stay, 1 or more
    keep_best   how many of those with the lowest metric stay, wherever they are; 0 for none

    A checkpoint is `root`/step-00000020, as `save_checkpoint` writes it. One more than is kept is
    on the disk while a new one is written. With several ranks, all of them call every method.
    """

    def __init__(self, root: Path, keep_last: int = 2, keep_best: int = 1) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last is {keep_last}, keep_best {keep_best}; at least 1 and 0 are needed"
            )
        self.root = root
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: Optimizer,
        facts: Mapping[str, Any],
        metric: float | None = None,
    ) -> Path:
        """Write a checkpoint, then remove those that are no longer to be kept; return its path.

        One of the same step is replaced; if it is damaged, it is kept under another name.
        Arguments and errors are those of `save_checkpoint`. Until the new checkpoint is whole,
        none is removed.
        """
        path = self.root / f"step-{step:08}"
        on_first_rank(lambda: self._make_way(path))
        save_checkpoint(path, step, module, optimizer, facts, metric)
        on_first_rank(lambda: self._remove_old(path))
        return path

    def newest(self, report: Callable[[str], None]) -> Path | None:
        """The newest checkpoint whose checksums are right; None when there is none at all.

        A damaged one is reported, on rank 0, in a line that names the file and its fault, and the
        one before is tried.
        Raises UserError when there are checkpoints and all are damaged.
        """
        paths = on_first_rank(self._found)
        for path in reversed(paths):
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                fault = f"checkpoint is damaged and passed over: {error}"
                on_first_rank(lambda fault=fault: report(fault))  # type: ignore[misc]
            else:
                return path
        if paths:
            raise UserError(
                f"{self.root}: all {len(paths)} checkpoints are damaged; move them away to start "
                "from the beginning"
            )
        return None

    def best(self) -> Path | None:
        """The checkpoint with the lowest metric, the later one of equals; None without any."""
        ranked = on_first_rank(self._ranked)
        return ranked[0] if ranked else None

    def _found(self) -> list[Path]:
        """The checkpoints by rising step, whole or not."""
        self._bring_back()
        paths = [
            (int(match[1]), path)
            for path in self._entries()
            if (match := _NAME.fullmatch(path.name)) and _is_ours(path)
        ]
        return [path for _, path in sorted(paths)]

    def _ranked(self) -> list[Path]:
        """The whole checkpoints that have a metric, the best first."""
        metrics = []
        for path in self._whole():
            state = read_state(path)
            if state.metric is not None:
                metrics.append((state.metric, -state.step, path))
        return [path for _, _, path in sorted(metrics)]

    def _whole(self) -> list[Path]:
        return [path for path in self._found() if _is_whole(path)]

    def _make_way(self, path: Path) -> None:
        """Remove what killed processes left, and move a damaged checkpoint of that name aside."""
        self._bring_back()
        for entry in self._entries():
            if _LEFT.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        if path.exists() and _is_ours(path) and not _is_whole(path):
            path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}"))

    def _remove_old(self, written: Path) -> None:
        whole = self._whole()
        kept = {written, *whole[-self.keep_last :], *self._ranked()[: self.keep_best]}
        for path in whole:
            if path not in kept:
                # Under another name first: half removed, it must not look like a checkpoint.
                removed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
                try:
                    path.rename(removed)
                    shutil.rmtree(removed)
                except OSError as error:
                    raise UserError(f"{path}: cannot be removed: {error.strerror}") from error

    def _bring_back(self) -> None:
        """Bring back a checkpoint whose replacement was cut short between two renames."""
        for entry in self._entries():
            path = entry.with_name(entry.name.removeprefix(".").removesuffix(".previous"))
            if entry == set_aside(path) and _NAME.fullmatch(path.name):
                if path.exists():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.rename(path)

    def _entries(self) -> Iterator[Path]:
        return iter(sorted(self.root.iterdir())) if self.root.is_dir() else iter(())


def _is_ours(path: Path) -> bool:
    """Whether a directory was a checkpoint once; ours are never without both of these."""
    return path.is_dir() and ((path / MANIFEST).exists() or (path / STATE).exists())


def _is_whole(path: Path) -> bool:
    try:
        read_state(path)
    except CheckpointError:
        return False
    return True
