"""A file's entries → a decoder's, by a family's tables: what all formats do alike."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from armillary.checkpoints.families.family import (
    FULL,
    MAX_LAYERS,
    Derived,
    Entries,
    Key,
    Patch,
    Values,
    patch,
    put,
)
from armillary.errors import ConfigError
from armillary.strict_dict import REQUIRED, StrictDict


def check_fixed(entries: StrictDict, fixed: Mapping[str, object]) -> None:
    """Raise ConfigError for a key that says something else than it may."""
    for key, only in fixed.items():
        value = entries.take(key, type(only), only)
        if value != only:
            raise ConfigError(f"{entries.where}: {key} is {value!r}; only {only!r} is supported")


def layer_count(entries: StrictDict, key: str) -> int:
    """Read the count of layers, which must be possible."""
    count = entries.take(key, int)
    if not 1 <= count <= MAX_LAYERS:
        raise ConfigError(
            f"{entries.where}: {key} is {count}; it must be between 1 and {MAX_LAYERS}"
        )
    return count


def read_keys(
    decoder: Entries, entries: StrictDict, keys: Iterable[Key], values: Values, notices: list[str]
) -> None:
    """Read each key, keep it under its name and set the paths that it has.

    Raises ConfigError for two keys that say two things of one path.
    """
    said: dict[str, tuple[str, Any]] = {}
    for key in keys:
        value = _read(entries, key, values, notices, len(decoder["layers"]))
        values[key.name] = value
        if value is not None and not isinstance(value, list):
            value = _formed(key, value, entries.where)
        for path in key.to:
            name, before = said.setdefault(path, (key.name, value))
            if before != value:
                raise ConfigError(
                    f"{entries.where}: {key.name} is {value}, but {name} is {before}; only equal "
                    "ones are supported"
                )
        put(decoder, key.to, value)


def _read(entries: StrictDict, key: Key, values: Values, notices: list[str], count: int) -> Any:
    if key.name in entries:
        value = entries.take(key.name, key.kind)
        if isinstance(value, list):
            return _one_each(entries, key, count)
        return value
    if key.nullable and entries.is_null(key.name):
        return entries.take_optional(key.name, key.kind)
    if key.default is REQUIRED:
        return entries.take(key.name, key.kind)
    entries.ignore(key.name)
    default = key.default(values) if callable(key.default) else key.default
    if key.loud:
        notices.append(f"{key.name} is absent; the family's default {default} is used")
    return default


def _one_each(entries: StrictDict, key: Key, count: int) -> list[Any]:
    """A list with an entry for each layer, of the kind that is not a list."""
    given = len(entries.take(key.name, list))
    if given != count:
        raise ConfigError(f"{entries.where}: {key.name} has {given} entries for {count} layers")
    kinds = key.kind if isinstance(key.kind, tuple) else (key.kind,)
    return entries.take_list(key.name, next(kind for kind in kinds if kind is not list))


def _formed(key: Key, value: Any, where: str) -> Any:
    try:
        return key.form.read(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {key.name} {error}") from error


def derive(decoder: Entries, derived: Iterable[Derived], values: Values) -> None:
    """Set what follows from entries that were read."""
    for each in derived:
        put(decoder, each.to, each.of(values))


def apply_patches(
    decoder: Entries,
    patches: Sequence[Patch],
    by_type: Mapping[str | None, Mapping[str, Any] | None],
    where: str,
) -> None:
    """Set where layers differ, and each layer's rotary settings: those of its kind, or of all.

    Raises ConfigError for a layer whose kind has none.
    """
    for layer, changes in zip(decoder["layers"], patches, strict=True):
        kind = changes.get("attention.rotary", FULL)
        if kind is not None and kind not in by_type and None not in by_type:
            raise ConfigError(
                f"{where}: there are no rope_parameters for layers of type {kind!r}; there are "
                f"for {', '.join(map(str, by_type))}"
            )
        rotary = None if kind is None else by_type.get(kind, by_type.get(None))
        patch(layer, {**changes, "attention.rotary": rotary})
