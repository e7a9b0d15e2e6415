"""What must hold of any decoder (spec §2, §3), tried on the weights at hand.

A failure here is none of the file's conventions: it is a fault of what computes, or of numbers so
large that float32 loses them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from armillary.decoder import Decoder
from armillary.diagnosis.findings import Check, Finding
from armillary.parts.kv_cache import KVCache
from armillary.parts.rotary import rotate, rotation, varies_with_length

TOLERANCE = 1e-3
"""Of the largest logit: what the order of float32 sums may make of many layers."""

_ROTATION_TOLERANCE = 1e-9
_SHIFT = 1000
_PADDING = 3
_CHUNKS = (3, 1, 4, 2)


def check_invariants(decoder: Decoder, tokens: Tensor) -> tuple[list[Check], list[Finding]]:
    """Run one text, tokens (1, T), in every way that must give the same."""
    checks = list(_checks(decoder, tokens))
    findings = [
        Finding(
            code="invariant",
            fault=f"{check.name} does not hold on these weights",
            evidence=check.seen,
            remedy="compute in float32 or float64; if it fails there too, report it as a fault",
        )
        for check in checks
        if check.holds is False
    ]
    return checks, findings


@torch.no_grad()
def _checks(decoder: Decoder, tokens: Tensor) -> Iterator[Check]:
    yield _rotation_keeps_norms(decoder)
    whole = decoder(tokens)
    yield _shift(decoder, tokens, whole)
    yield _compared("cache = whole pass", _cached(decoder, tokens, [1] * tokens.shape[1]), whole)
    yield _compared("chunks = whole pass", _cached(decoder, tokens, _CHUNKS), whole)
    yield _compared("padding changes nothing", _padded(decoder, tokens), whole)


def _rotation_keeps_norms(decoder: Decoder) -> Check:
    name = "rotation keeps norms"
    for layer in decoder.config.layers:
        rotary = layer.attention.rotary
        if rotary is not None:
            break
    else:
        return Check(name, None, "no layer rotates")
    places = torch.tensor([0, 1, 17, decoder.config.max_positions - 1])
    turn = rotation(rotary, places, lengths=decoder.config.max_positions, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        1, 2, len(places), layer.attention.d_head, dtype=torch.float64, generator=generator
    )
    turned, width = rotate(x, turn), rotary.d_rotary
    wanted = x[..., :width].norm(dim=-1) * rotary.scaling.attention_factor()
    worst = float((turned[..., :width].norm(dim=-1) / wanted - 1).abs().max())
    return Check(name, worst <= _ROTATION_TOLERANCE, f"to {worst:.1e}")


def _shift(decoder: Decoder, tokens: Tensor, whole: Tensor) -> Check:
    name = "a shift changes nothing"
    config = decoder.config
    rotaries = [layer.attention.rotary for layer in config.layers]
    if config.position_table is not None:
        return Check(name, None, "positions are added to the input")
    if any(rotary is not None and varies_with_length(rotary.scaling) for rotary in rotaries):
        return Check(name, None, "frequencies vary with the length")
    places = torch.arange(tokens.shape[1])
    return _compared(name, decoder(tokens, positions=places + _SHIFT), whole)


def _cached(decoder: Decoder, tokens: Tensor, sizes: list[int] | tuple[int, ...]) -> Tensor:
    length, parts, start = tokens.shape[1], [], 0
    cache = KVCache(decoder.config, batch=1, capacity=length, rotary_length=length)
    for number in range(length):
        size = sizes[number % len(sizes)]
        if start >= length:
            break
        parts.append(decoder(tokens[:, start : start + size], cache=cache))
        start += size
    return torch.cat(parts, dim=1)


def _padded(decoder: Decoder, tokens: Tensor) -> Tensor:
    padding = torch.zeros(1, _PADDING, dtype=tokens.dtype)
    mask = torch.cat([torch.zeros(1, _PADDING), torch.ones_like(tokens)], dim=1).bool()
    logits: Tensor = decoder(torch.cat([padding, tokens], dim=1), mask=mask)
    return logits[:, _PADDING:]


def _compared(name: str, other: Tensor, whole: Tensor) -> Check:
    largest = whole.abs().max().clamp_min(torch.finfo(whole.dtype).tiny)
    worst = float((other - whole).abs().max() / largest)
    return Check(name, worst <= TOLERANCE, f"to {worst:.1e} of the largest logit")
