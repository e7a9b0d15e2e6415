"""lm-eval's own tasks over files of this machine, and what it says of each of their questions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

# Our name → lm-eval's, the folder of its configuration, and the split that it asks.
_TASKS = {
    "lambada": ("lambada_openai", "lambada", "test"),
    "hellaswag": ("hellaswag", "hellaswag", "validation"),
    "arc_easy": ("arc_easy", "arc", "test"),
    "arc_challenge": ("arc_challenge", "arc", "test"),
    "piqa": ("piqa", "piqa", "validation"),
}


def lm_eval_tasks(files: Mapping[str, Path], scratch: Path) -> dict[str, Any]:
    """Return lm-eval's task of each of our names, reading the file (.jsonl or .arrow) instead."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.__file__).parent / "tasks"
    configurations = scratch / "tasks"
    configurations.mkdir(parents=True)
    for task, path in files.items():
        name, folder, split = _TASKS[task]
        changed = {
            "include": str(root / folder / f"{name}.yaml"),
            "task": name,
            "dataset_path": "arrow" if path.suffix == ".arrow" else "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(path)}, "cache_dir": str(scratch)},
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{split}_split": split,
        }
        (configurations / f"{name}.yaml").write_text(yaml.safe_dump(changed))
    manager = TaskManager(include_path=str(configurations), include_defaults=False)
    return dict(manager.load([_TASKS[task][0] for task in files])["tasks"])


def lm_eval_answers(model: Any, tasks: Mapping[str, Any], limit: int) -> dict[str, list[Any]]:
    """Return what lm-eval notes of each question of its tasks, by our names, in order.

    An entry has `resps` (a log-probability and whether it is greedy, of each choice), `acc` and,
    where there are choices, `acc_norm`.
    """
    from lm_eval.evaluator import evaluate

    found = evaluate(lm=model, task_dict=dict(tasks), limit=limit, bootstrap_iters=0)
    ours = {theirs: name for name, (theirs, _, _) in _TASKS.items()}
    return {
        ours[name]: sorted(samples, key=lambda sample: sample["doc_id"])
        for name, samples in found["samples"].items()
    }
