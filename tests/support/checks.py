"""The comparisons that hold the decoder: with the specification, and cached with the whole pass.

tests/test_decoder.py asserts them; tests/mutation shows that they fail when the code is wrong.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from armillary import reference
from armillary.config import DecoderConfig, RotaryConfig
from armillary.decoder import Decoder
from armillary.parts.kv_cache import KVCache
from armillary.parts.rotary import convert_layout
from armillary.parts.slots import Slots
from support.models import arrays

SPECIFICATION = 1e-10
CACHE = 1e-12
LENGTH = 13
CHUNKINGS = {
    "one by one": [1] * LENGTH,
    "3 + 1 + 4": [3, 1, 4, 1, 4],
    "prompt, then steps": [7, 1, 1, 1, 1, 1, 1],
    "all but one": [LENGTH - 1, 1],
}


def gap(ours: torch.Tensor, other: np.ndarray | torch.Tensor) -> float:
    """The greatest difference between two tensors of one shape."""
    if isinstance(other, torch.Tensor):
        other = other.detach().numpy()
    assert tuple(ours.shape) == other.shape
    return float(np.abs(ours.detach().numpy() - other).max())


def specification(decoder: Decoder, ids: torch.Tensor, **arguments: object) -> np.ndarray:
    """Logits (B, T, V) of float64 NumPy for the decoder's weights; arguments as the decoder's."""
    plain = {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    return reference.forward(decoder.config.to_dict(), arrays(decoder), ids.numpy(), **plain)  # type: ignore[arg-type]


def specification_gap(decoder: Decoder, ids: torch.Tensor, **arguments: object) -> float:
    """How far logits are from the specification's; those of padding (mask (B, T)) do not count."""
    ours = decoder(ids, **arguments)
    theirs = specification(decoder, ids, **arguments)
    mask = arguments.get("mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        ours, theirs = ours[mask.bool()], theirs[mask.bool().numpy()]
    return gap(ours, theirs)


def padded(batch: int, *padding: int) -> torch.Tensor:
    """A mask (B, LENGTH): row i begins with padding[i] slots of padding (ends, when negative)."""
    mask = torch.ones(batch, LENGTH, dtype=torch.bool)
    for row, count in enumerate(padding):
        mask[row, : max(count, 0)] = False
        mask[row, LENGTH - max(-count, 0) :] = False
    return mask


def caches(of: DecoderConfig, batch: int) -> dict[str, KVCache]:
    """An empty cache of each kind."""
    return {
        "fixed": KVCache(of, batch, capacity=LENGTH),
        "growing": KVCache(of, batch),
        "windowed": KVCache(of, batch, windowed=True),
    }


def in_chunks(
    decoder: Decoder,
    cache: KVCache,
    ids: torch.Tensor,
    sizes: Sequence[int],
    mask: torch.Tensor | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Take ids in, chunk by chunk; yield the end of each chunk and its logits."""
    end = 0
    for size in sizes:
        part = slice(end, end + size)
        end += size
        yield end, decoder(ids[:, part], cache=cache, mask=None if mask is None else mask[:, part])


def cache_gap(
    decoder: Decoder,
    cache: KVCache,
    ids: torch.Tensor,
    sizes: Sequence[int],
    mask: torch.Tensor | None = None,
) -> float:
    """How far the logits of each chunk are from those of a whole pass over the text so far.

    A rule that varies with the length has other frequencies for each such prefix.
    """
    worst = 0.0
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    for end, logits in in_chunks(decoder, cache, ids, sizes, mask):
        whole = decoder(ids[:, :end], mask=None if mask is None else mask[:, :end])
        new = slice(end - logits.shape[1], end)
        if real[:, new].any():
            worst = max(worst, gap(logits[real[:, new]], whole[:, new][real[:, new]]))
    return worst


def slot_gap(
    decoder: Decoder, cache: KVCache, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> float:
    """How far logits are from those of whole passes when each token is put into its slot.

    A cache takes a prompt of 5 in; where it makes no slot, it takes in a token too.
    """
    start, slots, worst = 5, None, 0.0
    length = cache._fixed
    decoder(ids[:, :start], cache=cache, mask=None if mask is None else mask[:, :start])
    for end in range(start + 1, ids.shape[1] + 1):
        new = ids[:, end - 1 : end]
        if cache.make_slot(decoder.config, new):
            if slots is None or not slots.are_of(cache):
                slots = Slots(cache)
            slots.follow(cache)
            logits = decoder.next(new, slots)
            cache.fill_slot(new)
        else:
            logits = decoder(new, cache=cache)
        real = None if mask is None else mask[:, :end]
        whole = decoder(ids[:, :end], mask=real, rotary_length=length, logits="last")
        worst = max(worst, gap(logits.cpu(), whole.detach().cpu()))
    return worst


# Two ways from the cached text, which part again, and one that is long enough to wrap a window.
PARENTS = [-1, 0, 1, 0, -1, 4, 3, 2]


def branch_gap(
    decoder: Decoder, cache: KVCache, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> float:
    """How far the logits of branches are from those of whole passes over the text of each.

    The last ids are the branches' (PARENTS), those before are cached first.
    """
    cut = ids.shape[1] - len(PARENTS)
    readable = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    length = cache._fixed
    decoder(ids[:, :cut], cache=cache, mask=None if mask is None else mask[:, :cut])
    logits = decoder.project(decoder.branches(ids[:, cut:], PARENTS, cache))
    worst = 0.0
    for number in range(len(PARENTS)):
        way, at = list[int](), number
        while at >= 0:
            way.insert(0, cut + at)
            at = PARENTS[at]
        whole = decoder(
            ids[:, [*range(cut), *way]],
            mask=readable[:, [*range(cut), *way]],
            rotary_length=length,
        )
        worst = max(worst, gap(logits[:, number], whole[:, -1]))
    return worst


def with_other_layout(decoder: Decoder) -> Decoder:
    """The decoder that does the same with rotary channels paired the other way."""
    layers, weights = [], dict(decoder.state_dict())
    for number, layer in enumerate(decoder.config.layers):
        attention = layer.attention
        assert isinstance(attention.rotary, RotaryConfig)
        to = "interleaved" if attention.rotary.layout == "half_split" else "half_split"
        heads = {"q": attention.n_heads, "k": attention.n_kv_heads, "q_norm": 1, "k_norm": 1}
        for part, count in heads.items():
            for name in ("weight", "bias"):
                key = f"layers.{number}.attention.{part}.{name}"
                if key in weights:
                    weights[key] = convert_layout(
                        weights[key],
                        n_heads=count,
                        d_head=attention.d_head,
                        d_rotary=attention.rotary.d_rotary,
                        to=to,
                    )
        rotary = attention.rotary.model_copy(update={"layout": to})
        changed = attention.model_copy(update={"rotary": rotary})
        layers.append(layer.model_copy(update={"attention": changed}))
    other = Decoder(decoder.config.model_copy(update={"layers": tuple(layers)})).double().eval()
    other.load_state_dict(weights)
    return other


def layout_gap(decoder: Decoder, ids: torch.Tensor) -> float:
    """How far the decoder in the other layout is from the specification of this one."""
    return gap(with_other_layout(decoder)(ids), specification(decoder, ids))
