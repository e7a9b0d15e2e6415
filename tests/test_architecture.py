"""The source stands as ARCHITECTURE.md says, and importing it brings in nothing before its time."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.architecture import read_floors, violations

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
HEAVY = [
    *("torch", "numpy", "pydantic", "transformers", "huggingface_hub", "tokenizers", "jinja2"),
    *("gguf", "yaml", "numba", "llvmlite"),
]


def test_the_source_stands_on_its_floors():
    assert violations(ROOT / "src" / "armillary", DOCUMENT) == []


def test_the_table_is_found():
    floors = read_floors(DOCUMENT)
    assert floors["errors"].level == 0
    assert floors["decoder"].level < floors["language_model"].level < floors["cli"].level


MADE_UP = """
| floor | module | what it is for | torch |
| --- | --- | --- | --- |
| 0 | `errors` | – | never |
| 1 | `reference` | – | never |
| 2 | `left` | – | yes |
| 2 | `right` | – | never |
| 3 | `top` | – | in functions |

Never imported, anywhere: `pickle`.
"""

SOUND = {
    "__init__.py": "",
    "errors.py": "import json",
    "reference.py": "import numpy",
    "left/__init__.py": "from house.left.part import thing",
    "left/part.py": "import torch\nfrom house.errors import E",
    "right.py": "from house import errors",
    "top.py": "from house.left import thing\ndef f():\n    import torch\n    import house.right",
}


def check(tmp_path: Path, changes: dict[str, str]) -> list[str]:
    for name, text in (SOUND | changes).items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(tmp_path / "house", MADE_UP)


def test_a_sound_tree_passes(tmp_path):
    assert check(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "errors.py",
            "\nfrom house.top import x",
            "house/errors.py:2: errors (floor 0) imports",
        ),
        ("errors.py", "from house import top", "errors (floor 0) imports top (floor 3)"),
        ("errors.py", "def f():\n    import house.top", "errors (floor 0) imports top (floor 3)"),
        (
            "errors.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.top import x",
            "errors (floor 0) imports top (floor 3)",
        ),
        ("right.py", "import house.left", "right (floor 2) imports left (floor 2)"),
        ("left/part.py", "from house.right import x", "left (floor 2) imports right (floor 2)"),
        (
            "right.py",
            "import torch",
            "house/right.py:1: torch is imported, which",
        ),
        ("right.py", "def f():\n    from torch.nn import Module", "torch is imported"),
        ("top.py", "try:\n    import torch.nn\nfinally:\n    pass", "may: in functions"),
        ("reference.py", "from house.errors import E", "reference imports nothing of ours"),
        ("top.py", "def f():\n    import pickle", "house/top.py:2: pickle is never imported"),
        ("top.py", "from .errors import E", "house/top.py:1: a relative import"),
        ("extra.py", "", "extra: stands on no floor"),
        ("more/deep.py", "", "more: stands on no floor"),
        ("left/part.py", "import house.left", "a circle: "),
    ],
)
def test_each_kind_of_fault_is_found(tmp_path, name, text, fault):
    faults = check(tmp_path, {name: text})
    assert any(fault in line for line in faults), faults


def test_a_floor_for_something_that_is_not_there_is_found(tmp_path):
    check(tmp_path, {})
    (tmp_path / "house" / "right.py").unlink()
    (tmp_path / "house" / "top.py").write_text("")
    faults = violations(tmp_path / "house", MADE_UP)
    assert faults == ["right: is in ARCHITECTURE.md and not there"]


@pytest.mark.parametrize(
    ("program", "allowed"),
    [
        ("import armillary; armillary.__version__; dir(armillary)", []),
        ("from armillary.cli import main; main(['--help'])", []),
        # typer reads a command's options with pydantic.
        ("from armillary.cli import main; main(['generate', '--help'])", ["pydantic"]),
        ("from armillary.cli import main; main(['generate'])", ["pydantic"]),
        ("import armillary.language_model", ["numpy", "pydantic", "tokenizers"]),
    ],
    ids=["import", "help", "help of a command", "usage error", "language model"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(program, allowed):
    program += "\nimport sys; print('\\n', *sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    imported = done.stderr.splitlines()[-1].split()
    assert "armillary" in imported
    assert {name for name in HEAVY if name in imported} <= set(allowed)
