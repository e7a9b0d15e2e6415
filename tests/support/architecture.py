"""Holds a source tree to a table of floors, by reading both and importing neither."""

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TORCH = {"never", "in functions", "yes"}


@dataclass(frozen=True)
class Floor:
    """Where a top-level module stands, and whether it may import torch."""

    level: int
    torch: str


@dataclass(frozen=True)
class Import:
    """One imported name with its place; `inside` says that it stands in a function."""

    module: str
    line: int
    inside: bool
    for_types: bool


def read_floors(markdown: str) -> dict[str, Floor]:
    """Return the rows `| floor | module | … | torch |` of the document's table."""
    floors: dict[str, Floor] = {}
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and cells[0].isdigit():
            level, module, torch = cells[0], cells[1].strip("`"), cells[3]
            if module in floors or torch not in TORCH:
                raise ValueError(f"ARCHITECTURE.md: the row of {module} is there twice or unclear")
            floors[module] = Floor(int(level), torch)
    return floors


def read_never_imported(markdown: str) -> set[str]:
    """Return the names in backquotes of the paragraph that begins with "Never imported"."""
    (paragraph,) = (p for p in markdown.split("\n\n") if p.startswith("Never imported"))
    return set(paragraph.split("`")[1::2])


def imports_of(path: Path) -> Iterator[Import]:
    """Yield what a file imports, as full dotted names; `from a import b` gives a.b."""
    yield from _imports(ast.parse(path.read_text("utf-8")), inside=False, for_types=False)


def _imports(node: ast.AST, inside: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for name in child.names:
                yield Import(name.name, child.lineno, inside, for_types)
        elif isinstance(child, ast.ImportFrom):
            start = "." * child.level + (child.module or "")
            for name in child.names:
                yield Import(f"{start}.{name.name}", child.lineno, inside, for_types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), inside, for_types=True)
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), inside, for_types)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, inside or function, for_types)


def violations(package: Path, markdown: str) -> list[str]:
    """Return one line for each way in which the package does not stand as the document says."""
    floors, never = read_floors(markdown), read_never_imported(markdown)
    files = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    units = {name.split(".")[1] for name in files if "." in name}
    faults = [f"{unit}: stands on no floor of ARCHITECTURE.md" for unit in units - set(floors)]
    faults += [f"{unit}: is in ARCHITECTURE.md and not there" for unit in set(floors) - units]
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        unit = name.partition(".")[2].split(".")[0]
        graph[name] = set()
        for imported in imports_of(path):
            where = f"{path.relative_to(package.parent)}:{imported.line}: "
            if imported.module.startswith("."):
                faults.append(f"{where}a relative import; write the full name")
            elif imported.module.split(".")[0] == package.name:
                target = _module(imported.module, files)
                if not imported.for_types and not imported.inside and target != name:
                    graph[name].add(target)
                faults += [where + fault for fault in _upward(unit, target, floors)]
            else:
                outside = imported.module.split(".")[0]
                if outside in never:
                    faults.append(f"{where}{outside} is never imported")
                if outside == "torch" and unit in floors and not imported.for_types:
                    faults += [where + fault for fault in _torch(floors[unit], imported)]
    return sorted(faults) + _circles(graph)


def _upward(unit: str, target: str, floors: dict[str, Floor]) -> list[str]:
    other = target.partition(".")[2].split(".")[0]
    if other == unit or not other or unit not in floors or other not in floors:
        return []  # siblings; the package's own names; or unlisted, which is a fault already
    if unit == "reference":
        return ["reference imports nothing of ours"]
    here, there = floors[unit].level, floors[other].level
    return [] if there < here else [f"{unit} (floor {here}) imports {other} (floor {there})"]


def _torch(floor: Floor, imported: Import) -> list[str]:
    if floor.torch == "yes" or (floor.torch == "in functions" and imported.inside):
        return []
    return [f"torch is imported, which this floor may: {floor.torch}"]


def _circles(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["a circle: " + " ← ".join(error.args[1])]
    return []


def _dotted(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(name: str, files: dict[str, Path]) -> str:
    """Return the module that a dotted name is, or is a name in."""
    while name not in files and "." in name:
        name = name.rpartition(".")[0]
    return name
