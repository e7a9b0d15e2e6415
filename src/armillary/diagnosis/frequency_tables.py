"""Rotary frequencies that a file carries as numbers, and the precision that they are held in.

An angle is a position times a frequency, so an error of the frequency grows with the position:
rounded to bfloat16, a frequency of 1/2 is off by a radian within a few hundred positions.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.checkpoints.safetensors import read_sharded
from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig, RotaryConfig
from armillary.diagnosis.findings import Check, Finding
from armillary.diagnosis.frequencies import frequencies_at
from armillary.rope_scaling import LongRoPE

# Bits of a float32 that the narrower type does not have, and its unit roundoff.
_NARROW = {"bf16": (16, 2.0**-9), "f16": (13, 2.0**-12)}
_FEWEST = 4
"""So many different numbers at least, of which none needs more bits, are no accident."""
_RADIANS = 0.05
"""An error of the largest angle that is worth a word."""


@dataclass(frozen=True)
class Table:
    """Frequencies, or divisors of them, that a file states."""

    name: str
    numbers: NDArray[np.float32]
    encoding: str
    divides: bool


def check_frequency_tables(
    config: DecoderConfig, source: Path, format_name: str
) -> tuple[Check, list[Finding]]:
    """Hold every table that a file carries against the precision that positions need."""
    tables = [*stored_tables(source, format_name), *stated_tables(config)]
    findings: list[Finding] = []
    seen: set[tuple[bytes, str]] = set()
    for table in tables:
        key = (table.numbers.tobytes(), table.encoding)
        if key in seen:
            continue
        seen.add(key)
        findings += _judged(table, config, len(tables))
    if not tables:
        return Check("frequency tables", True, "none in the file; computed in float32"), []
    told = "; ".join(finding.fault for finding in findings)
    return Check("frequency tables", not findings, told or f"{len(tables)}, all of full width"), (
        findings
    )


def stored_tables(source: Path, format_name: str) -> Iterator[Table]:
    """Tensors of frequencies or of their divisors."""
    for name, tensor in _all_tensors(source, format_name).items():
        divides = name.startswith(("rope_freqs", "rope_factors"))
        if divides or name.endswith("inv_freq"):
            yield Table(name, tensor.to_float32(), tensor.encoding, divides)


def _all_tensors(source: Path, format_name: str) -> Mapping[str, StoredTensor]:
    """What is in the file, read by the decoder or not."""
    if format_name == "gguf":
        return read_gguf_file(source).tensors
    ours = format_name == "armillary"
    return read_sharded(source, allow_missing=True, blocks=ours, raw=not ours)[0]


def stated_tables(config: DecoderConfig) -> Iterator[Table]:
    """Lists of divisors in the configuration."""
    rotaries = dict.fromkeys(layer.attention.rotary for layer in config.layers)
    for rotary in rotaries:
        if rotary is not None and isinstance(rotary.scaling, LongRoPE):
            for name in ("short_factor", "long_factor"):
                numbers = np.array(getattr(rotary.scaling, name), np.float32)
                yield Table(name, numbers, "F32", divides=True)


def _judged(table: Table, config: DecoderConfig, count: int) -> Iterator[Finding]:
    rotary = next(
        (layer.attention.rotary for layer in config.layers if layer.attention.rotary), None
    )
    narrow = _narrow_type(table)
    if rotary is None or narrow is None:
        return
    error = _angle_error(table, rotary, config.max_positions, _NARROW[narrow][1])
    if error < _RADIANS:
        return
    alike = f", with {count - 1} more," if count > 1 else ""
    yield Finding(
        code="frequency-table",
        fault=f"{table.name}{alike} is a frequency table in {narrow}",
        evidence=f"an angle at position {config.max_positions - 1:,} is off by {error:.2g} radians",
        remedy="compute the frequencies from the base in float32, and leave the table out"
        if not table.divides
        else "write the divisors anew in float32, from the rule that they stand for",
    )


def _narrow_type(table: Table) -> str | None:
    """The narrow type in which the numbers are held, or were before they were widened."""
    by_encoding = {"BF16": "bf16", "F16": "f16"}.get(table.encoding)
    if by_encoding is not None:
        return by_encoding
    numbers = table.numbers[np.isfinite(table.numbers)]
    if len(np.unique(numbers)) < _FEWEST:
        return None
    bits = numbers.view(np.uint32)
    for name, (missing, _) in _NARROW.items():
        if (
            not (bits & ((1 << missing) - 1)).any()
            and not np.equal(numbers, np.rint(numbers)).all()
        ):
            return name
    return None


def _angle_error(table: Table, rotary: RotaryConfig, window: int, roundoff: float) -> float:
    """Radians by which the largest angle is off: measured, or where the truth is lost, at worst."""
    exact = frequencies_at(rotary, window)
    if not table.divides and exact.shape == table.numbers.shape:
        return float(np.abs(table.numbers - exact).max()) * (window - 1)
    rounded = ~np.isclose(table.numbers, np.rint(table.numbers), atol=0.0)
    if not rounded.any() or exact.shape != table.numbers.shape:
        return math.inf if exact.shape != table.numbers.shape else 0.0
    return float(exact[rounded].max()) * roundoff * (window - 1)
