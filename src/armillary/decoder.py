"""The decoder: embedding → layers → final norm → projection to the vocabulary.

Read this first. A layer adds the results of attention and of a feed-forward network to its
input; everything else is a part chosen by the configuration. Nothing here knows of files,
tokenizers or the command line.

    U = X + Attn(Norm1(X))            X, U, Y: (B, T, d)
    Y = U + FFN(Norm2(U))
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from armillary.config import AnyFeedForward, DecoderConfig, LayerConfig, MixtureConfig
from armillary.parts.attention import Attention, KeyValueStore
from armillary.parts.experts import MixtureOfExperts
from armillary.parts.feedforward import build_feedforward
from armillary.parts.kv_cache import KVCache
from armillary.parts.latent_attention import LatentAttention
from armillary.parts.mask import Visibility, counted_positions, split_mask
from armillary.parts.norm import build_norm
from armillary.parts.positions import LearnedPositions, SinusoidalPositions
from armillary.parts.rotary import Rotation, rotation, rotation_under, varies_with_length
from armillary.parts.slots import Slots

_WRITES_TO_RESIDUAL = (
    "attention.out.weight",
    "feedforward.down.weight",
    "feedforward.experts.down.weight",
    "feedforward.shared.down.weight",
)


class SequencePart(Protocol):
    """What of each sequence is computed here, where others compute the rest."""

    store: KeyValueStore
    """Gives the keys and values of whole sequences for those of this part, in any layer."""

    def take(self, rows: Tensor) -> Tensor:
        """(..., T) → the places of this part, (..., T')."""

    def narrow(self, visibility: Visibility) -> Visibility:
        """The rule for the queries of this part and the keys of whole sequences."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward on the residual path.

    Shapes: x (B, T, d) → (B, T, d). norm1 and norm2 normalise what the sub-layers read,
    post_norm1 and post_norm2 what they give, as the configuration places them.
    """

    def __init__(self, d: int, config: LayerConfig) -> None:
        super().__init__()

        def norm(wanted: bool) -> nn.Module:
            return build_norm(config.norm, d) if wanted else nn.Identity()

        reads, gives = config.norm_placement != "post", config.norm_placement != "pre"
        self.residual = config.residual
        self.residual_scale = config.residual_scale
        self.norm1 = norm(reads)
        self.attention: Attention | LatentAttention = (
            Attention(d, config.attention)
            if config.attention.latent is None
            else LatentAttention(d, config.attention)
        )
        self.post_norm1 = norm(gives)
        self.norm2 = norm(reads and config.residual != "parallel_shared_norm")
        self.feedforward = _build_feedforward(d, config.feedforward)
        self.post_norm2 = norm(gives)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        visibility: Visibility,
        turn: Rotation | None = None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """x (B, T, d) → (B, T, d)."""
        normed = self.norm1(x)
        attended = self.post_norm1(self.attention(normed, visibility, turn, store))
        u = x + self._scaled(self.dropout(attended))
        read = {
            "sequential": lambda: self.norm2(u),
            "parallel": lambda: self.norm2(x),
            "parallel_shared_norm": lambda: normed,
        }[self.residual]()
        out: Tensor = u + self._scaled(self.dropout(self.post_norm2(self.feedforward(read))))
        return out

    def _scaled(self, result: Tensor) -> Tensor:
        return result if self.residual_scale == 1 else result * self.residual_scale


def _build_feedforward(d: int, config: AnyFeedForward) -> nn.Module:
    if isinstance(config, MixtureConfig):
        return MixtureOfExperts(d, config)
    return build_feedforward(d, config)


class Head(nn.Module):
    """The projection to the vocabulary, with a matrix of its own or the embedding's.

    Shapes: hidden (..., d) → logits (..., V), scaled and softly capped when configured.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, d = config.vocab_size, config.d_model
        self.weight = None if config.tie_head else nn.Parameter(torch.empty(size, d))
        self.bias = nn.Parameter(torch.empty(size)) if config.head_bias else None
        self.scale = config.logit_scale
        self.soft_cap = config.final_soft_cap

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """hidden (..., d) → (..., V); `embedding` (V, d) serves when the head is tied to it."""
        logits = F.linear(hidden, embedding if self.weight is None else self.weight, self.bias)
        if self.scale != 1:
            logits = logits * self.scale
        return (
            logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
        )


class Decoder(nn.Module):
    """A decoder-only language model, put together from a configuration.

    Built with random weights (see `initialise`), or on the meta device for a loader to fill.

        logits = decoder(tokens)                    # (B, T) → (B, T, V)
        logits = decoder(tokens, cache=cache)       # positions and mask from the cache
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        d = config.d_model
        # Its own constructor would draw random numbers, which on the meta device costs a second.
        self.embedding: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            torch.empty(config.vocab_size, d), freeze=False
        )
        self.position_table: LearnedPositions | SinusoidalPositions | None = None
        if config.position_table == "learned":
            self.position_table = LearnedPositions(config.max_positions, d)
        elif config.position_table == "sinusoidal":
            self.position_table = SinusoidalPositions(d)
        self.dropout = nn.Dropout(config.input_dropout)
        self.layers = nn.ModuleList(DecoderLayer(d, layer) for layer in config.layers)
        self.final_norm = build_norm(config.final_norm, d) if config.final_norm else nn.Identity()
        self.head = Head(config)
        # Each rotation is computed once a pass, however many layers turn by it.
        self._rotaries = config.rotaries
        self._rotary_of = [
            None if rotary is None else self._rotaries.index(rotary)
            for rotary in (layer.attention.rotary for layer in config.layers)
        ]
        if self.embedding.weight.device.type != "meta":
            self.initialise()

    def initialise(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Fill every parameter anew.

        Matrices and tables are normal with standard deviation `std`; those that write to the
        residual path (attention's out, feed-forward's down) with std / √(2N), so that the path's
        variance does not grow with depth (Radford et al. 2019, §2.3). Biases and sinks are 0,
        norms 1.
        """
        for name, parameter in self.named_parameters():
            self.draw(name, parameter, std, generator)

    @torch.no_grad()
    def draw(
        self, name: str, into: Tensor, std: float = 0.02, generator: torch.Generator | None = None
    ) -> None:
        """Fill a tensor with what `initialise` gives the parameter of that name."""
        if name.endswith(("bias", "sinks")):
            into.zero_()
        elif "norm" in name.split(".")[-2]:
            module = self.get_submodule(name.rpartition(".")[0])
            into.fill_(1.0 - getattr(module, "offset", 0.0))
        else:
            narrow = name.endswith(_WRITES_TO_RESIDUAL)
            scale = (2 * self.config.n_layers) ** -0.5 if narrow else 1.0
            into.normal_(0.0, std * scale, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        rotary_length: int | Sequence[int] | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> Tensor:
        """tokens (B, T) → logits (B, T, V), or (B, 1, V) for the last position only.

        positions: (T,) or (B, T), any integers; counted from 0 when left out, padding not
        counted, and from 0 again in each document.
        mask: (B, T) for tokens that may be read (false is padding), or (B, T, T), (B, 1, T, T)
        for pairs; boolean or 0/1. Combined with the causal rule.
        documents: (B, T), equal numbers belong together and read only each other.
        cache: what came before. It sets positions and mask; no gradients are recorded.
        rotary_length: the text length that rules which vary with it shall see (one, or one per
        row); otherwise the largest position + 1.
        Without a cache this compiles to one graph, unless numbers in a tensor decide what is
        computed: a mask of 0/1, a learned table, a varying rule without `rotary_length`.
        Raises ValueError for arguments that do not fit each other.
        """
        _check_tokens(tokens)
        hidden = self.hidden(
            tokens,
            positions=positions,
            mask=mask,
            documents=documents,
            cache=cache,
            rotary_length=rotary_length,
        )
        return self.project(hidden[:, -1:] if logits == "last" else hidden)

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        rotary_length: int | Sequence[int] | None = None,
        part: SequencePart | None = None,
    ) -> Tensor:
        """tokens (B, T) → the last layer's output after the final norm, (B, T, d).

        For who never holds all logits; arguments as in `forward`. With a `part`, only its places
        are computed: (B, T', d).
        """
        if cache is not None:
            if any(given is not None for given in (positions, documents, rotary_length, part)):
                raise ValueError(
                    "a cache sets positions, documents and rotary_length itself; leave them out"
                )
            return self._hidden_with_cache(tokens, cache, mask)
        batch, length = tokens.shape
        readable, allowed = split_mask(mask, batch, length, length)
        if positions is None:
            positions = _default_positions(tokens, readable, documents)
        elif positions.shape not in {(length,), (batch, length)}:
            raise ValueError(
                f"positions of shape {tuple(positions.shape)} for tokens of shape "
                f"{(batch, length)}; they must be (T,) or (B, T)"
            )
        visibility = Visibility(
            n_queries=length,
            n_keys=length,
            readable=readable,
            documents=documents,
            allowed=allowed,
        )
        if rotary_length is None and self._varies:
            real = positions if readable is None else positions.masked_fill(~readable, -1)
            rotary_length = (real.view(-1, length).amax(-1) + 1).tolist()
        if part is None:
            return self._run(tokens, positions, visibility, rotary_length)
        return self._run(
            part.take(tokens),
            part.take(positions),
            part.narrow(visibility),
            rotary_length,
            [part.store] * len(self.layers),
        )

    @torch.no_grad()
    def _hidden_with_cache(self, tokens: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        with cache.step(self.config, tokens, mask) as step:
            hidden = self._run(
                step.tokens, step.positions, step.visibility, step.lengths, cache.layers
            )
        return hidden[:, -tokens.shape[1] :]

    @torch.no_grad()
    def next(self, tokens: Tensor, slots: Slots) -> Tensor:
        """Take one more token of each text into its slot → logits of what follows, (B, 1, V).

        Shapes: tokens (B, 1). The logits are those that the cache would give; but shapes, memory
        and numbers in Python stay the same from step to step, so that this can be recorded or
        compiled once. The caller asks the cache for the slot before, which sees to positions that
        a table has, and tells it afterwards (`KVCache.make_slot`, `fill_slot`).
        """
        x = self._embedded(tokens)
        if self.position_table is not None:
            x = x + self.position_table.rows(slots.positions, x.dtype)
        turns = [
            rotation_under(rotary, theta, slots.positions, dtype=x.dtype)
            for rotary, theta in zip(self._rotaries, slots.frequencies, strict=True)
        ]
        return self.project(self._through(x, slots.visibility(), turns, slots.stores))

    @torch.no_grad()
    def branches(self, tokens: Tensor, parents: Sequence[int], cache: KVCache) -> Tensor:
        """Several continuations of what a cache holds, in one pass → (B, T, d) as `hidden` gives.

        tokens (B, T) are a tree: parents[i] < i is the number of the token that token i follows,
        −1 where it follows the cached text. A token reads the cached ones and those on its own
        way, at the positions that they would have if that way were all. The cache stays as it was.
        Raises ValueError for parents that are no tree, and where a rule's frequencies vary with
        the length of the ways.
        """
        with cache.branches(self.config, tokens, parents) as step:
            return self._run(
                step.tokens, step.positions, step.visibility, step.lengths, cache.layers
            )

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visibility: Visibility,
        lengths: int | Sequence[int] | None,
        stores: Sequence[KeyValueStore] | None = None,
    ) -> Tensor:
        x = self._embedded(tokens)
        if self.position_table is not None:
            x = x + self.position_table(positions, x.dtype)
        x = self.dropout(x)
        turns = [
            rotation(rotary, positions, lengths=lengths, dtype=x.dtype) for rotary in self._rotaries
        ]
        return self._through(x, visibility, turns, stores)

    def _through(
        self,
        x: Tensor,
        visibility: Visibility,
        turns: Sequence[Rotation],
        stores: Sequence[KeyValueStore] | None,
    ) -> Tensor:
        """The layers and the final norm. Shapes: x (B, T, d) → (B, T, d)."""
        for number, (layer, rotary) in enumerate(zip(self.layers, self._rotary_of, strict=True)):
            turn = None if rotary is None else turns[rotary]
            x = layer(x, visibility, turn, None if stores is None else stores[number])
        normed: Tensor = self.final_norm(x)
        return normed

    def _embedded(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        return x if self.config.embedding_scale == 1 else x * self.config.embedding_scale

    def project(self, hidden: Tensor) -> Tensor:
        """hidden (..., d) → logits (..., V)."""
        logits: Tensor = self.head(hidden, self.embedding.weight)
        return logits

    def prefill(
        self, tokens: Tensor, cache: KVCache, *, mask: Tensor | None = None, chunk: int = 512
    ) -> Tensor:
        """Take a long prompt into the cache in chunks → logits of the last position, (B, 1, V).

        Shapes: tokens (B, T), mask (B, T). The memory of activations is that of one chunk.
        Raises ValueError for arguments that do not fit each other.
        """
        _check_tokens(tokens)
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; at least one token must be taken at a time")
        for start in range(0, tokens.shape[1], chunk):
            part = slice(start, start + chunk)
            hidden = self._hidden_with_cache(
                tokens[:, part], cache, None if mask is None else mask[:, part]
            )
        return self.project(hidden[:, -1:])

    @property
    def _varies(self) -> bool:
        return any(varies_with_length(rotary.scaling) for rotary in self._rotaries)


def _default_positions(tokens: Tensor, readable: Tensor | None, documents: Tensor | None) -> Tensor:
    if documents is not None and documents.shape != tokens.shape:
        raise ValueError(
            f"documents of shape {tuple(documents.shape)} for tokens of shape {tuple(tokens.shape)}"
        )
    if readable is None and documents is None:
        return torch.arange(tokens.shape[1], device=tokens.device)
    if readable is None:
        readable = torch.ones_like(tokens, dtype=torch.bool)
    return counted_positions(readable, documents)


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.numel() == 0:
        raise ValueError(
            f"tokens must be integers of shape (B, T), not {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
