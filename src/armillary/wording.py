"""Numbers as a person reads them."""

import math
import unicodedata


def bytes_text(count: int) -> str:
    """Return a count of bytes in powers of ten: 98.4 MB."""
    size, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def count_text(count: float) -> str:
    """Return a count in full up to 9,999, then with three digits: 12.3 k, 134 M, 1.07 B."""
    size, unit = float(count), ""
    for larger in ("k", "M", "B", "T"):
        if size < (9999.5 if not unit else 999.5):
            break
        size, unit = size / 1000, larger
    if not unit:
        return f"{size:,.0f}"
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:,.{digits}f} {unit}"


def clock_text(seconds: float) -> str:
    """Return a duration in hours, minutes and seconds: 0:07:30."""
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: 7 min 30 s."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def loss_text(value: float) -> str:
    """Return a loss, or bits per byte, to three places; "no number" for what is none."""
    return f"{value:.3f}" if math.isfinite(value) else "no number"


def escaped(text: str) -> str:
    """Return a text whose control characters (a stranger's text may hold them) are escapes.

    Newlines, tabs and spaces of any width stay.
    """
    return "".join(c if _is_shown(c) else ascii(c)[1:-1] for c in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"
