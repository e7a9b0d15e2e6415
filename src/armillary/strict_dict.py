"""A mapping that knows which of its entries were read, so that none is passed over in silence.

Knows nothing of what the entries mean.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, overload

from armillary.errors import ConfigError

T = TypeVar("T")
D = TypeVar("D")


class _Required:
    """The default of an entry that must be there."""


REQUIRED: Final = _Required()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class StrictDict:
    """Entries of a file, read once each and by type; `finish` complains about what is left.

    `where` names the file (and section) in messages. A null counts as absent. An int is accepted
    where a float is asked for, a bool never as a number, a float only when it is finite, an int
    only when it has 64 bits.
    All errors are ConfigErrors.
    """

    def __init__(self, entries: Mapping[str, object], where: str) -> None:
        self.where = where
        self._entries = dict(entries)
        self._known: set[str] = set()
        self._sections: dict[str, StrictDict] = {}

    def __contains__(self, key: str) -> bool:
        """Whether there is an entry that is not null; looking does not count as reading."""
        return self._entries.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether there is an entry that is null, which some formats tell from an absent one."""
        return key in self._entries and self._entries[key] is None

    @overload
    def take(self, key: str, kind: type[T]) -> T: ...
    @overload
    def take(self, key: str, kind: type[T], default: D) -> T | D: ...
    @overload
    def take(self, key: str, kind: tuple[type, ...], default: object = ...) -> Any: ...

    def take(self, key: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Return the entry, which must be of `kind` (or one of several); `default` when absent."""
        self._known.add(key)
        value = self._entries.get(key)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.where}: {key!r} is missing")
            return default
        return self._checked(key, value, kind if isinstance(kind, tuple) else (kind,))

    @overload
    def take_optional(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def take_optional(self, key: str, kind: tuple[type, ...]) -> Any: ...

    def take_optional(self, key: str, kind: Any) -> Any:
        """Return the entry, or None when it is absent or null."""
        return self.take(key, kind, None)

    @overload
    def take_list(self, key: str, kind: type[T]) -> list[T]: ...
    @overload
    def take_list(self, key: str, kind: type[T], default: D) -> list[T] | D: ...

    def take_list(self, key: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Return a list whose items are all of `kind`."""
        items = self.take(key, list, default)
        if items is default:
            return items
        return [self._checked(f"{key}[{i}]", item, (kind,)) for i, item in enumerate(items)]

    def section(self, key: str) -> "StrictDict":
        """Return the mapping under `key`; `finish` of this one then covers it too."""
        if key not in self._sections:
            entries = self.take(key, dict)
            self._sections[key] = StrictDict(entries, f"{self.where}: {key}")
        return self._sections[key]

    def ignore(self, *keys: str) -> None:
        """Count entries as read that have no bearing on what is computed."""
        self._known.update(keys)

    def unread(self) -> list[str]:
        """Return the keys of this mapping that nobody asked for; a null was said by nobody."""
        return [key for key in self._entries if key not in self._known and key in self]

    def finish(self, remedy: str = "") -> None:
        """Raise ConfigError when an entry was never read, naming the nearest key that was.

        `remedy`, what the user can do about it, ends the message.
        """
        for section in self._sections.values():
            section.finish(remedy)
        unread = self.unread()
        if unread:
            named = ", ".join(f"{key!r}{nearest(key, self._known)}" for key in unread)
            plural = "s" if len(unread) > 1 else ""
            ending = f"; {remedy}" if remedy else ""
            raise ConfigError(f"{self.where}: unknown key{plural} {named}{ending}")

    def _checked(self, key: str, value: object, kinds: tuple[type, ...]) -> object:
        if float in kinds and isinstance(value, int) and int not in kinds:
            value = value if isinstance(value, bool) else _as_float(value)
        matches = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
        if not matches:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            found = f"{type(value).__name__} {_short(value)}"
            raise ConfigError(f"{self.where}: {key!r} must be {wanted}, not {found}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{self.where}: {key!r} is {_short(value)}, beyond 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.where}: {key!r} must be a finite number, not {value}")
        return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: object, limit: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
