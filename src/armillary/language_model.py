"""A decoder with its tokenizer: load, save, generate, chat.

lm = armillary.load("smollm2-135m", dtype="float32")
lm.generate("The capital of France is", max_tokens=8, temperature=0).text
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Integral
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.locate import locate, prompt_directory
from armillary.checkpoints.sums import Sums
from armillary.config import DecoderConfig
from armillary.engine.coverage import NoKernelError
from armillary.engine_choice import CACHES, WIDTHS, EngineName, choose_engine
from armillary.errors import UserError
from armillary.generation.batch import generate
from armillary.generation.decode import FinishReason, TokenEvent, TokenLogprob
from armillary.generation.engine import Engine, TextDecoder, TextEngine
from armillary.generation.sampling import SamplingConfig, temperature
from armillary.generation.speculation import DraftProposer, Proposer, SuffixProposer
from armillary.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from armillary.chat import ChatTemplate
    from armillary.decoder import Decoder
    from armillary.engine.decoder import EngineDecoder
    from armillary.engine.prompts import PromptCache

DTYPES = ("float32", "float64", "bfloat16", "float16")
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """A finished completion.

    `finish_reason`: "eos" for an end-of-sequence token (the last of `token_ids`, without text),
    "stop" for a stop string (which is not in `text`), "length" for the last token allowed.
    `logprobs` has an entry per token when they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass
class LanguageModel:
    """A decoder, its tokenizer, and how its makers sample from it.

    `decoder` is a `Decoder` on the torch engine, an `EngineDecoder` on the numba engine.
    `defaults` are the sampling options that the checkpoint states; what a call passes goes before
    them. `eos_ids` end a completion. `notices` are things about the checkpoint that a user should
    hear of. `prompts`, on the numba engine, are what calls go on from without being told: the last
    prompt's beginning is not computed again, which changes nothing of any text; None computes all.
    """

    decoder: Any
    tokenizer: Tokenizer
    defaults: Mapping[str, object] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()
    prompts: "PromptCache | None" = None

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        config: DecoderConfig = self.decoder.config
        return config

    @property
    def engine(self) -> EngineName:
        """What computes."""
        return "numba" if isinstance(self.decoder, TextDecoder) else "torch"

    def new_cache(self, *, capacity: int | None = None, rotary_length: int | None = None) -> Any:
        """An empty cache to go on from: a KVCache, or the numba engine's TextCache.

        `capacity` None grows as needed; `rotary_length` fixes the length that varying rules see.
        """
        return self._engine().new_cache(capacity=capacity, rotary_length=rotary_length)

    @property
    def chat_template(self) -> "ChatTemplate":
        """The checkpoint's chat template. Raises UserError when it has none."""
        from armillary.chat import ChatTemplate

        if self.tokenizer.chat_template is None:
            raise UserError("this model has no chat template; use generate with a plain prompt")
        return ChatTemplate(self.tokenizer.chat_template, self.tokenizer)

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], **options: Any
    ) -> list[Generation]: ...

    def generate(self, prompt: Any, **options: Any) -> Generation | list[Generation]:
        """Continue a prompt (a text or token ids), or each of a list of prompts as one batch.

        `options` are those of SamplingConfig: max_tokens, temperature, top_k, top_p, min_p,
        repetition_penalty, seed, stop, logprobs, ignore_eos. For one prompt only: `cache`, one of
        `new_cache` to go on from; `speculate`, whether to guess at what comes next from the text
        itself, or `draft`, a smaller LanguageModel of the same vocabulary to guess with, which
        makes the text sooner and changes nothing of it. A batch gives each prompt the text that it
        gets alone.
        Raises UserError for options out of range, an empty prompt, or one too long.
        """
        prompts = _as_batch(prompt)
        if prompts is None:
            return self._generate([prompt], options)[0]
        return self._generate(prompts, options)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[TokenEvent]:
        """Continue one prompt, giving each token with the text that it made certain.

        An event's text may be empty and never ends inside a character. Dropping the iterator
        stops the work. Options and errors as for `generate`; errors come before the first token.
        """
        return self._events([self.encode(prompt)], options)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answer a conversation: messages are {"role": …, "content": …} dicts."""
        return self.generate(self.chat_template.encode(messages), **options)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text under the tokenizer's own BOS rule; ids are passed on as they are.

        Control tokens written in a text stay text.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return [index(token) for token in prompt]

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write config, weights, tokenizer and a manifest with checksums, all or nothing.

        Raises UserError when the directory cannot be written or holds something else, ValueError
        on the numba engine, which reads weights in place.
        """
        if self.engine == "numba":
            raise ValueError("the numba engine does not save; load the model with engine='torch'")
        from armillary.weights import to_write

        generation = {**self.defaults, "eos_token_id": list(self.eos_ids)}
        save_armillary(
            Path(directory), self.config, to_write(self.decoder), self.tokenizer, generation
        )

    def sampling(self, prompt_tokens: int, options: Mapping[str, Any]) -> SamplingConfig:
        """The options of a call over the checkpoint's own over the general defaults.

        A `max_tokens` that nobody asked for is cut to the room that the window leaves.
        """
        known = [entry.name for entry in fields(SamplingConfig)]
        for name in options:
            if name not in known:
                raise UserError(f"{name} is no option of generation; known are {', '.join(known)}")
        merged: dict[str, Any] = {**self.defaults, **options}
        if "max_tokens" not in merged:
            room = self.config.max_positions - prompt_tokens
            merged["max_tokens"] = max(1, min(SamplingConfig.max_tokens, room))
        return SamplingConfig(**merged)

    def _generate(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[Generation]:
        ids = [self.encode(prompt) for prompt in prompts]
        events: list[list[TokenEvent]] = [[] for _ in ids]
        for event in self._events(ids, options):
            events[event.index].append(event)
        return [_joined(part, len(prompt)) for part, prompt in zip(events, ids, strict=True)]

    def _events(
        self, prompts: Sequence[list[int]], options: Mapping[str, Any]
    ) -> Iterator[TokenEvent]:
        options = dict(options)
        cache = options.pop("cache", None)
        speculate, draft = options.pop("speculate", False), options.pop("draft", None)
        configs = [self.sampling(len(prompt), options) for prompt in prompts]
        proposer: Proposer | None = None
        if draft is not None:
            proposer = self._drafted(draft)
        elif speculate:
            proposer = SuffixProposer()
        return self._saving(
            generate(
                self._engine(),
                self.tokenizer,
                prompts,
                configs,
                eos_ids=self.eos_ids,
                cache=cache,
                proposer=proposer,
                weigh=self.decoder.weigh if self.engine == "numba" else temperature,
            )
        )

    def _saving(self, events: Iterator[TokenEvent]) -> Iterator[TokenEvent]:
        """The events; after them, or when they are dropped, the prompt may go to a file."""
        try:
            yield from events
        finally:
            if self.prompts is not None:
                self.prompts.save()

    def _drafted(self, draft: "LanguageModel") -> Proposer:
        """Guesses of another model. Raises UserError when its tokens are not this one's."""
        here, there = self.tokenizer, draft.tokenizer
        size = min(here.vocab_size, there.vocab_size)
        same = here.vocab_size == there.vocab_size and all(
            here.token_bytes(token) == there.token_bytes(token) for token in range(size)
        )
        if not same:
            raise UserError("the draft has another vocabulary than the model; take one of its own")
        return DraftProposer(draft._engine(), self.config.vocab_size)

    def _engine(self) -> Engine:
        if self.engine == "numba":
            return TextEngine(self.decoder, self.prompts)
        from armillary.torch_engine import TorchEngine

        return TorchEngine(self.decoder)


def load(
    name: str | os.PathLike[str],
    *,
    engine: str = "torch",
    dtype: str = "auto",
    device: str = "auto",
    cache: str = "auto",
    ignore_keys: Sequence[str] = (),
    allow_missing: bool = False,
    prompt_files: bool = False,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> LanguageModel:
    """The model that an alias, a directory, a .gguf file or a Hub id names.

    `engine`: torch; numba, which runs on the CPU and needs no torch; auto is numba on the CPU,
    unless the configuration has parts without a kernel, which a notice then names.
    `dtype`: float32, float64, bfloat16 or float16; auto is bfloat16 for files in it, else
    float32. The numba engine has float32 and bfloat16, and auto takes weights as they are stored.
    `device`: as torch names it; auto is a GPU where torch finds one, else the CPU.
    `cache`: what the numba engine keeps keys and values in, float32, bfloat16 or int8; auto is
    float32 where the weights are, else bfloat16.
    `ignore_keys` are configuration keys to pass over that are otherwise refused as unknown.
    With `prompt_files` the numba engine keeps what it computes of long prompts in private files,
    for the processes that come after (see engine/prompt_files.py); torch has none.
    `progress` is called with the parameters filled and their count (by torch), `notice` with each
    line of `notices` as soon as it is known.
    Raises UserError in one line for what cannot be found, read or used.
    """
    if allow_missing and engine != "torch":
        raise ValueError(f"allow_missing leaves weights unset, which engine {engine!r} cannot hold")
    chosen = choose_engine(engine, device, dtype)
    if (
        engine == "auto"
        and chosen == "torch"
        and device == "auto"
        and _device("auto").type == "cpu"
    ):
        # A driver's files are there, but no GPU that this torch can use.
        chosen = choose_engine(engine, "cpu", dtype)
    if cache != "auto":
        choose_engine(chosen, device, dtype, cache)
    path = locate(os.fspath(name))
    with _collector_paused():
        checkpoint = open_checkpoint(path, ignore_keys=ignore_keys, allow_missing=allow_missing)
    if checkpoint.tokenizer is None:
        raise UserError(f"{checkpoint.source}: has no tokenizer; put tokenizer.json beside it")
    notices: list[str] = []

    def tell(line: str) -> None:
        notices.append(line)
        if notice is not None:
            notice(line)

    for line in checkpoint.notices:
        tell(line)
    decoder: Decoder | EngineDecoder | None = None
    if chosen == "numba":
        decoder = _on_numba(checkpoint, dtype, cache, tell, or_none=engine == cache == "auto")
    if decoder is None:
        decoder = _on_torch(checkpoint, dtype, device, allow_missing, progress)
    defaults, eos_ids = _stated(checkpoint)
    prompts = None
    if chosen == "numba" and isinstance(decoder, TextDecoder):
        prompts = _prompts(checkpoint, dtype, decoder, prompt_files, tell)
    return LanguageModel(decoder, checkpoint.tokenizer, defaults, eos_ids, tuple(notices), prompts)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """For who makes a vocabulary: of its hundred thousand objects none is garbage."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _on_numba(
    checkpoint: Checkpoint,
    dtype: str,
    cache: str,
    notice: Callable[[str], None],
    *,
    or_none: bool,
) -> "EngineDecoder | None":
    """None, with a notice, where the engine cannot compute and that is no error."""
    cause: Exception
    try:
        from armillary.engine.decoder import EngineDecoder

        return EngineDecoder(
            checkpoint.config,
            checkpoint.tensors,
            width=WIDTHS[dtype],
            cache=CACHES[cache],
            notice=notice,
        )
    except ImportError as error:
        said, cause = f"the numba engine cannot be imported ({error})", error
        remedy = "install numba, or take --engine torch"
    except NoKernelError as error:
        said, remedy, cause = str(error), "take --engine torch", error
    if not or_none:
        raise UserError(f"{said}; {remedy}") from cause
    notice(f"{said}; torch computes instead")
    return None


def _prompts(
    checkpoint: Checkpoint,
    dtype: str,
    decoder: "EngineDecoder",
    in_files: bool,
    notice: Callable[[str], None],
) -> "PromptCache":
    """What the numba engine knows of earlier prompts."""
    from armillary.engine.prompts import PromptCache

    if not in_files:
        return PromptCache(decoder.config)
    from armillary.engine.prompt_files import PromptFiles

    folder = prompt_directory()
    weights = sorted({Path(tensor.where) for tensor in checkpoint.tensors.values()})
    sums = Sums(weights, folder / "weights.json", notice)
    files = PromptFiles(folder, sums, decoder.config, WIDTHS[dtype], decoder.stored)
    return PromptCache(decoder.config, files)


def _on_torch(
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    allow_missing: bool,
    progress: Callable[[int, int], None] | None,
) -> "Decoder":
    from armillary.weights import build_filled

    return build_filled(
        checkpoint.config,
        checkpoint.tensors,
        dtype=_dtype(dtype, checkpoint),
        device=_device(device),
        allow_missing=allow_missing,
        progress=progress,
    )


def _stated(checkpoint: Checkpoint) -> tuple[dict[str, object], tuple[int, ...]]:
    """The sampling options and the EOS ids that a checkpoint states."""
    assert checkpoint.tokenizer is not None
    options = {entry.name for entry in fields(SamplingConfig)}
    stated = dict(checkpoint.generation)
    eos = stated.get("eos_token_id", checkpoint.tokenizer.eos_ids)
    eos_ids = (eos,) if isinstance(eos, int) else tuple(eos)
    defaults = {name: value for name, value in stated.items() if name in options}
    try:
        SamplingConfig(**defaults)
    except UserError as error:
        raise UserError(f"{checkpoint.source}: suggests what cannot be: {error}") from error
    return defaults, eos_ids


def _dtype(name: str, checkpoint: Checkpoint) -> "torch.dtype":
    import torch

    if name == "auto":
        return torch.bfloat16 if _encodings(checkpoint) == {"BF16"} else torch.float32
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not known; known are auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _encodings(checkpoint: Checkpoint) -> set[str]:
    """What its matrices are stored in."""
    return {tensor.encoding for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1}


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # some kinds of device hold shapes and no values
        return probe.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(f"device {name!r} cannot be used: {reason}") from error


def _as_batch(prompt: Any) -> Sequence[Prompt] | None:
    """The prompts of a batch, or None when `prompt` is a single one."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return None
    return None if all(isinstance(item, Integral) for item in prompt) else prompt


def _joined(events: Sequence[TokenEvent], prompt_tokens: int) -> Generation:
    reason = events[-1].finish_reason
    assert reason is not None
    logprobs = tuple(event.logprob for event in events if event.logprob is not None)
    return Generation(
        text="".join(event.text for event in events),
        token_ids=tuple(event.token_id for event in events),
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        logprobs=logprobs or None,
    )
