"""YAML that a person wrote: safe, bounded, 1e-5 a number, no key twice.

Knows nothing of what the entries mean.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from armillary.errors import ConfigError

_FILE_LIMIT = 1 << 20  # bytes
_MAX_VALUES = 200_000


def read_text(path: Path) -> str:
    """Read a configuration's file. Raises ConfigError for one that is too large or no text."""
    try:
        size = path.stat().st_size
        if size > _FILE_LIMIT:
            raise ConfigError(f"{path}: has {size} bytes; at most {_FILE_LIMIT} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is no valid UTF-8") from error


def parse_yaml(text: str, where: str) -> Any:
    """Plain values out of YAML. Raises ConfigError in one line with `where` and the place."""
    try:
        return yaml.load(text, Loader=_YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


class _YamlLoader(yaml.SafeLoader):
    """Safe YAML in which 1e-5 is a number, as in JSON and YAML 1.2, and no key is there twice.

    What an alias stands for counts as often as it is used, so that a few lines cannot describe
    more than memory holds.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values = 0
        self._values_in: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        before = self._values
        self._values += 1
        node = super().compose_node(parent, index)
        if node in self._values_in:  # an alias of what was read before
            self._values = before + self._values_in[node]
        elif node is not None:
            self._values_in[node] = self._values - before
        if self._values > _MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=f"it has more than {_MAX_VALUES} values")
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is there twice; keep one",
                    problem_mark=key.start_mark,
                )
            seen.add(str(key.value))
        return node


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("+-0123456789"),
)
