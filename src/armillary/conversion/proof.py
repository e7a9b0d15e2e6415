"""What shows that a written checkpoint is the one that was read: frequencies, factors, logits.

Logits are compared at places where a fault of the rotary settings shows: the first positions, both
sides of the original window L, the end. A few tokens are put at these positions, however far apart,
so that a long window costs no more than a short one; queries meet keys across every distance
between them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints import Checkpoint
from armillary.checkpoints.tensors import StoredTensor, decode, encode, plain_for
from armillary.config import DecoderConfig, RotaryConfig
from armillary.diagnosis.frequencies import frequencies_at
from armillary.errors import CheckpointError

_SEED = 0
# What each format may round: GGUF holds a base, a factor, a divisor as float32.
_FREQUENCIES = {"gguf": 1e-6}
_EXACT_FREQUENCIES = 1e-12
# Of the largest logit's size (at least 1): sums in another order, and what frequencies may differ.
_LOGITS = {"gguf": 1e-3}
_EXACT_LOGITS = 1e-4
_TEXTS = ("Hello world, it's 1234567 o'clock!", "def f(x):\n\treturn x**2", "Grüße, 今天 🙂")


@dataclass(frozen=True)
class Proof:
    """What reading a written checkpoint again has shown.

    window             the original window L
    positions          where logits were compared
    frequencies        the largest difference of a frequency, relative to itself
    attention_factor   the same of what cos and sin are multiplied by
    logits             at each position, the largest difference from the checkpoint that was read,
                       its weights rounded as they were to be written
    rounding           at each position, by how much that rounding moves a logit at most; None where
                       nothing was rounded
    largest_logit      the size of the largest, to hold these against
    texts              how many texts both tokenizers were held against each other on
    """

    window: int
    positions: tuple[int, ...]
    frequencies: float
    attention_factor: float
    logits: tuple[float, ...]
    rounding: tuple[float, ...] | None
    largest_logit: float
    texts: int

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def line(self) -> str:
        """In one line."""
        at = ", ".join(f"{position:,}" for position in self.positions)
        said = (
            f"read back: frequencies within {self.frequencies:.1e} of their own, "
            f"logits at {at} within {max(self.logits):.1e} (the largest is "
            f"{self.largest_logit:.1f})"
        )
        if self.rounding is None:
            return said
        return f"{said}; rounding moves them by up to {max(self.rounding):.1e}"


def prove(before: Checkpoint, after: Checkpoint, encodings: Mapping[str, str]) -> Proof:
    """Compare a checkpoint with what was written of it in `encodings` and read again.

    Each tensor is read two or three times, and held by blocks of rows.
    Raises CheckpointError when they are not the same decoder with the same tokenizer.
    """
    window, places = _places(before.config)
    largest = _compare_rotation(before, after, (1, window, places[-1] + 1))
    texts = _compare_texts(before, after)
    differences, rounding, size = _compare_logits(before, after, encodings, window, places)
    return Proof(window, places, *largest, differences, rounding, size, texts)


def _places(config: DecoderConfig) -> tuple[int, tuple[int, ...]]:
    """The original window L, and the positions 0, L − 1, L, L + 1 and the end, those there are."""
    windows = [
        _original_window(layer.attention.rotary, config.max_positions)
        for layer in config.layers
        if layer.attention.rotary is not None
    ]
    window = min(windows, default=config.max_positions)
    end = max(config.max_positions - 1, window + 1)
    wanted = {0, window - 1, window, window + 1, end}
    if config.position_table == "learned":
        wanted = {min(position, config.max_positions - 1) for position in wanted}
    return window, tuple(sorted(wanted))


def _original_window(rotary: RotaryConfig, max_positions: int) -> int:
    rule = rotary.scaling
    stated: int | None = getattr(rule, "original_window", None)
    if stated is not None:
        return stated
    return max(1, round(max_positions / getattr(rule, "factor", 1.0)))


def _compare_rotation(
    before: Checkpoint, after: Checkpoint, lengths: tuple[int, ...]
) -> tuple[float, float]:
    """The largest relative differences of frequencies, for texts of the lengths, and of factors."""
    allowed = _FREQUENCIES.get(after.format, _EXACT_FREQUENCIES)
    frequencies = factors = 0.0
    layers = zip(before.config.layers, after.config.layers, strict=True)
    for number, (one, other) in enumerate(layers):
        ours, theirs = one.attention.rotary, other.attention.rotary
        if ours is None or theirs is None:
            if ours is not theirs:
                raise _fault(after, f"layer {number} rotates in one of them only")
            continue
        if ours.d_rotary != theirs.d_rotary:
            raise _fault(after, f"layer {number} rotates {theirs.d_rotary} channels a head")
        for length in lengths:
            off = np.abs(frequencies_at(theirs, length) / frequencies_at(ours, length) - 1).max()
            frequencies = max(frequencies, float(off))
        off = theirs.scaling.attention_factor() / ours.scaling.attention_factor() - 1
        factors = max(factors, abs(off))
        if not max(frequencies, factors) <= allowed:
            raise _fault(
                after,
                f"the frequencies of layer {number} are off by {frequencies:.2g} of their own, its "
                f"attention factor by {factors:.2g}",
            )
    return frequencies, factors


def _compare_texts(before: Checkpoint, after: Checkpoint) -> int:
    ours, theirs = before.tokenizer, after.tokenizer
    if ours is None or theirs is None:
        if ours is not theirs:
            raise _fault(after, "a tokenizer is in one of them only")
        return 0
    for text in _TEXTS:
        if ours.encode(text) != theirs.encode(text):
            raise _fault(after, f"its tokenizer makes other tokens of {text!r}")
    return len(_TEXTS)


def _compare_logits(
    before: Checkpoint,
    after: Checkpoint,
    encodings: Mapping[str, str],
    window: int,
    places: tuple[int, ...],
) -> tuple[tuple[float, ...], tuple[float, ...] | None, float]:
    """At each place the largest difference, and by how much rounding moves; the largest logit."""

    def as_written(tensor: StoredTensor, start: int, stop: int) -> NDArray[np.float32]:
        rows = tensor.rows(start, stop)
        encoding = encodings[tensor.name]
        if _holds(encoding, tensor.encoding):
            return rows
        encoded = encode(rows, encoding).reshape(stop - start, -1)
        return decode(encoded, encoding).reshape(rows.shape)

    def read(checkpoint: Checkpoint, **how: Any) -> NDArray[np.float32]:
        return _logits(checkpoint, window, places, **how)

    exact = all(_holds(encodings[name], each.encoding) for name, each in before.tensors.items())
    ours = read(before)
    expected = ours if exact else read(before, rows=as_written)
    differences = np.abs(read(after) - expected).max(axis=-1)
    size = float(np.abs(expected).max())
    allowed = _LOGITS.get(after.format, _EXACT_LOGITS) * max(1.0, size)
    if not differences.max() <= allowed:  # not the other way round: NaN is refused too
        worst = int(np.argmax(~(differences <= allowed)))
        raise _fault(
            after,
            f"its logits at position {places[worst]} differ by {differences[worst]:.2g}, "
            f"{allowed:.2g} are allowed",
        )
    moved = None if exact else tuple(np.abs(ours - expected).max(axis=-1).tolist())
    return tuple(differences.tolist()), moved, size


def _logits(
    checkpoint: Checkpoint, window: int, places: tuple[int, ...], **how: Any
) -> NDArray[np.float32]:
    """Logits at the places, (places, V); between them stand a few more tokens to be read."""
    from armillary.conversion.streamed import logits
    from armillary.parts.rotary import varies_with_length

    config = checkpoint.config
    near = {1, 2, 3, window // 2, window - 2, places[-1] - 1}
    positions = sorted({*places, *(at for at in near if 0 <= at <= places[-1])})
    tokens = np.random.default_rng(_SEED).integers(0, config.vocab_size, len(positions)).tolist()
    rules = [layer.attention.rotary.scaling for layer in config.layers if layer.attention.rotary]

    def run(upto: int) -> NDArray[np.float32]:
        count = sum(at <= upto for at in positions)
        found = logits(
            config,
            checkpoint.tensors,
            tokens[:count],
            positions[:count],
            length=positions[count - 1] + 1,
            **how,
        )
        return found[[positions.index(at) for at in places if at <= upto]]

    found = run(places[-1])
    if any(map(varies_with_length, rules)):
        # Short texts turn at other frequencies: what lies in the original window is one of them.
        short = run(window - 1)
        found[: len(short)] = short
    return found


def _holds(encoding: str, stored: str) -> bool:
    """Whether numbers stored in one encoding are exact in another."""
    return encoding in {stored, plain_for(stored), "F64"} or (encoding == "F32" and stored != "F64")


def _fault(after: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"{after.source.name}: was written and read back, but {what}; nothing was kept of it; "
        "please report this fault"
    )
