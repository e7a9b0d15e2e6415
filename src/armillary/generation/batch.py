"""The generation loop: several requests, one decoder, one cache.

Knows nothing of how tokens are chosen or made into text (decode.py), nor of how models are loaded.
Prompts of unequal length are padded on the left and the padding is masked, so positions count real
tokens and each request gets what it gets alone; a request that has ended leaves the batch.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from armillary.decoder import Decoder
from armillary.generation.decode import Request, TokenEvent, check_prompt
from armillary.generation.sampling import SamplingConfig
from armillary.parts.kv_cache import KVCache
from armillary.parts.layer_store import CacheError
from armillary.tokenizer import Tokenizer


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[SamplingConfig],
    *,
    eos_ids: Collection[int] | None = None,
    cache: KVCache | None = None,
    prefill_chunk: int = 512,
) -> Iterator[TokenEvent]:
    """Continue each prompt under its own options, a token of every request at a time.

    A request's events come in order, the last with its `finish_reason`; dropping the iterator
    stops the work. `eos_ids` replace the tokenizer's own.

    `cache`, for a single prompt, is one to go on from: what it shares with the prompt is not
    computed again, and in the end it holds prompt and completion, save the last token. Without
    one, rules whose frequencies vary with the length see prompt + max_tokens from the first token
    on, so that every step equals a whole pass with that `rotary_length`.

    Raises UserError for a prompt that the model cannot go on from, before anything is computed.
    """
    if len(prompts) != len(configs) or not prompts:
        raise ValueError(f"{len(prompts)} prompts and {len(configs)} configs; give one for each")
    if cache is not None and (len(prompts) != 1 or cache.batch != 1):
        raise ValueError(
            f"a cache of {cache.batch} rows for {len(prompts)} prompts; both must be 1"
        )
    if decoder.training:
        raise ValueError("the decoder is in training mode, with dropout; call decoder.eval() first")
    for prompt, config in zip(prompts, configs, strict=True):
        check_prompt(prompt, config, decoder.config)
    eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
    requests = [
        Request(index, prompt, config, tokenizer, eos_ids)
        for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]
    if cache is None:
        lengths = [request.full_length for request in requests]
        cache = KVCache(decoder.config, len(requests), windowed=True, rotary_length=lengths)
    return _run(decoder, requests, cache, prefill_chunk)


def _run(
    decoder: Decoder, requests: list[Request], cache: KVCache, prefill_chunk: int
) -> Iterator[TokenEvent]:
    device = decoder.embedding.weight.device
    tokens, mask = left_padded([request.prompt for request in requests])
    tokens = tokens[:, keep_common_prefix(cache, tokens) :]
    with torch.no_grad():
        logits = decoder.prefill(
            tokens.to(device),
            cache,
            mask=None if mask is None else mask.to(device),
            chunk=prefill_chunk,
        )
    while True:
        for request, row in zip(requests, logits[:, -1], strict=True):
            yield request.take(row)
        going = [row for row, request in enumerate(requests) if request.finish_reason is None]
        if not going:
            return
        if len(going) < len(requests):
            cache.reorder(going)
            requests = [requests[row] for row in going]
        last = torch.tensor([request.token_ids[-1:] for request in requests], device=device)
        with torch.no_grad():
            logits = decoder(last, cache=cache, logits="last")


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Prompts as one matrix, (B, T), and the mask of what is no padding, (B, T), if there is any.

    A row is padded with its own first token: no id has to be set aside, and nothing that the
    row does not hold anyway (an unused, perhaps unfilled embedding) comes near the computation.
    """
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    rows = [[prompt[0]] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)]
    tokens = torch.tensor(rows)
    if not any(padding):
        return tokens, None
    return tokens, torch.arange(width) >= torch.tensor(padding).unsqueeze(1)


def keep_common_prefix(cache: KVCache, tokens: Tensor) -> int:
    """Trim a cache to what it shares with the prompt, less one token, which must be computed.

    Shapes: tokens (1, T). Returns how many tokens stay; none when the cache cannot be trimmed, or
    holds padding, which is no part of a prompt.
    """
    if cache.length == 0:
        return 0
    if not bool(cache.readable.all()):
        cache.clear()
        return 0
    held = cache.tokens.to(tokens.device)
    width = min(cache.length, tokens.shape[1] - 1)
    differs = (held[0, :width] != tokens[0, :width]).nonzero()
    common = int(differs[0]) if len(differs) else width
    try:
        cache.trim(cache.length - common)
    except CacheError:
        cache.clear()
        return 0
    return common
