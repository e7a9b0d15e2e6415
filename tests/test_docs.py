"""Every example in README.md and docs/ runs, and prints what the page says it prints.

The Python blocks of a page run in order, in one namespace and one empty directory. A block fenced
as `text` right after one is what that one prints. In a block fenced as `console`, what follows an
`armillary` command is what that one prints, on either stream.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from armillary.checkpoints.packaged import ALIASES
from armillary.cli import main
from support.downloads import smollm2_gguf

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)

_CONSOLE = re.compile(r"^```console\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A block of code, its line in the page, and what it must print, if the page says so."""

    line: int
    code: str
    output: str | None


def examples(page: str) -> list[Example]:
    return [
        Example(page.count("\n", 0, match.start("code")) + 1, match["code"], match["output"])
        for match in _FENCED.finditer(page)
    ]


def run(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for example in examples(page.read_text(encoding="utf-8")):
        # Errors and tracebacks name the page and its own line.
        code = compile("\n" * (example.line - 1) + example.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if example.output is not None:
            assert printed.getvalue() == example.output, f"{page}, line {example.line}"


def commands(page: str) -> list[tuple[list[str], str]]:
    """The arguments of each `armillary` command of the page, and what it prints."""
    shown = [
        part for block in _CONSOLE.findall(page) for part in re.split(r"^\$ ", block, flags=re.M)
    ]
    pairs = [part.split("\n", 1) for part in shown if part.startswith("armillary ")]
    return [(shlex.split(command)[1:], output) for command, output in pairs]


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: None) -> Iterator[None]:
    """An empty working directory, where the model of the examples is already fetched."""
    for alias, model in ALIASES.items():
        assert alias == "smollm2-135m"
        copy = tmp_path / "cache" / "models" / alias / model.members[0].name
        copy.parent.mkdir(parents=True)
        copy.symlink_to(smollm2_gguf())
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.download
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_runs_and_prints_what_the_page_says(page, fetched):
    run(page)


@pytest.mark.download
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_prints_what_the_page_says(page, fetched, capsys):
    for arguments, output in commands(page.read_text(encoding="utf-8")):
        main(arguments)
        assert "".join(capsys.readouterr()) == output, arguments


def test_the_pages_have_examples_with_output():
    """Otherwise the tests above would hold for pages whose blocks they do not find."""
    assert len(commands((ROOT / "README.md").read_text(encoding="utf-8"))) >= 3
    library = examples((ROOT / "docs" / "library.md").read_text(encoding="utf-8"))
    assert len(library) >= 10
    assert sum(example.output is not None for example in library) >= 5


def test_a_wrong_output_and_a_failing_block_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    right = "# A page\n\n```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n"
    page.write_text(right)
    run(page)
    page.write_text(right.replace("\n2\n", "\n3\n"))
    with pytest.raises(AssertionError, match=r"page\.md, line 4"):
        run(page)
    page.write_text(right + "\nThe next one fails.\n\n```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        run(page)
