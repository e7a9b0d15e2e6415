"""Checks of settings: each raises ConfigError in one line with setting, value and what is right."""

import math
from collections.abc import Sequence
from numbers import Integral

from armillary.errors import ConfigError
from armillary.strict_dict import nearest


def check_whole(name: str, value: object, least: int) -> None:
    """A whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")


def check_number(
    name: str,
    value: object,
    least: float,
    most: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
) -> None:
    """A finite number from `least` to `most`; `above` and `below` leave the bounds out."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        low = value > least if above else value >= least
        high = value < most if below else value <= most
        if low and high:
            return
    range_ = f"{'above' if above else 'at least'} {least:g}"
    if most < math.inf:
        range_ += f" and {'below' if below else 'at most'} {most:g}"
    raise ConfigError(f"{name} is {value!r}; it must be a number {range_}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """One of several words."""
    if value not in choices:
        known = ", ".join(choices)
        raise ConfigError(f"{name} is {value!r}{nearest(str(value), choices)}; known are {known}")


def check_flag(name: str, value: object) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
