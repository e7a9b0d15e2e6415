"""`armillary generate`: continue a prompt."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from armillary.cli._options import Debug, IgnoreKey, Json, Model, dim, print_json, utf8
from armillary.cli._sampling import (
    CacheType,
    Device,
    Draft,
    Dtype,
    Engine,
    MaxTokens,
    MinP,
    PromptCache,
    RepetitionPenalty,
    Seed,
    Speculate,
    Stop,
    Temperature,
    TopK,
    TopP,
    given,
    load_model,
)
from armillary.errors import UserError

if TYPE_CHECKING:
    from armillary.language_model import Generation, LanguageModel


def generate(
    model: Model,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="What to continue; - reads standard input. Several make one batch.",
            show_default=False,
        ),
    ] = None,
    *,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            "-f",
            metavar="FILE",
            help="Read the prompt from a UTF-8 text file.",
            rich_help_panel="Prompt",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="The prompt is a message: put it through the model's chat template.",
            rich_help_panel="Prompt",
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A system message before it (with --chat).",
            rich_help_panel="Prompt",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on past the token that ends a text.",
            rich_help_panel="Sampling",
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: each token's log-probability, and those of the N likeliest.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    speculate: Speculate = False,
    draft: Draft = None,
    engine: Engine = "auto",
    dtype: Dtype = "auto",
    cache_type: CacheType = "auto",
    device: Device = "auto",
    ignore_key: IgnoreKey = None,
    prompt_cache: PromptCache = True,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, showing the text as it comes.

    Examples:
      armillary generate smollm2-135m "The capital of France is" --max-tokens 8 --temperature 0
      armillary generate smollm2-135m "Why is the sky blue?" --chat --seed 1
      armillary generate smollm2-135m "Once upon a time" "In the year 2100" --json
      cat notes.txt | armillary generate smollm2-135m - --stop "###"

    The completion alone goes to standard output.
    """
    prompts = _read_prompts(prompt or [], prompt_file)
    if system is not None and not chat:
        raise UserError("--system is a message of a conversation; give --chat as well")
    options = given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop) if stop else None,
        logprobs=logprobs,
        ignore_eos=ignore_eos or None,
    )
    if logprobs is not None and not json:
        raise UserError("--logprobs are shown with --json only; give --json as well")
    if len(prompts) > 1 and (speculate or draft is not None):
        raise UserError("--speculate and --draft are for one prompt; leave them out")
    _check(options)
    lm = load_model(model, dtype, device, ignore_key, engine, cache_type, prompt_cache)
    if draft is not None:
        options["draft"] = load_model(draft, dtype, device, None, engine, cache_type)
    elif speculate:
        options["speculate"] = True
    ids = [_ids(lm, text, chat, system) for text in prompts]
    if json or len(ids) > 1:
        _together(lm, prompts, ids, options, json)
    else:
        _streaming(lm, prompts[0], ids[0], options, show_prompt=not chat)


def _check(options: dict[str, Any]) -> None:
    """Refuse what is out of range before a model is loaded for it."""
    from armillary.generation.sampling import SamplingConfig

    SamplingConfig(**options)


def _read_prompts(prompts: list[str], file: Path | None) -> list[str]:
    texts = [utf8(sys.stdin.buffer.read(), "standard input") if p == "-" else p for p in prompts]
    if file is not None:
        try:
            texts.append(utf8(file.read_bytes(), str(file)))
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    if not texts:
        raise UserError("no prompt: give one as an argument, with --prompt-file, or - for stdin")
    return texts


def _ids(lm: "LanguageModel", text: str, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return lm.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    ids: list[int] = lm.chat_template.encode(messages)
    return ids


def _streaming(
    lm: "LanguageModel", prompt: str, ids: list[int], options: dict[str, Any], show_prompt: bool
) -> None:
    """Write each piece as it comes; on a terminal the prompt stands before it, dimmed."""
    events = lm.stream(ids, **options)  # a prompt is refused here, before anything is written
    on_terminal = sys.stdout.isatty()
    if on_terminal and show_prompt:
        sys.stdout.write(dim(prompt, sys.stdout))
    started, first, count, reason = time.perf_counter(), 0.0, 0, None
    try:
        for event in events:
            first = first or time.perf_counter()
            count += 1
            reason = event.finish_reason
            sys.stdout.write(event.text)
            sys.stdout.flush()
    finally:
        if count or on_terminal:
            sys.stdout.write("\n")
    if sys.stderr.isatty():
        rate = (count - 1) / (time.perf_counter() - first) if count > 1 else 0.0
        reused = 0 if lm.prompts is None else lm.prompts.reused
        known = f" ({reused} of them known)" if reused else ""
        said = (
            f"{len(ids)} prompt tokens{known}, first token after {first - started:.2f} s; "
            f"{count} tokens, {rate:.1f} tokens/s; ended by {reason}; {lm.engine} engine"
        )
        sys.stderr.write(dim(said, sys.stderr) + "\n")


def _together(
    lm: "LanguageModel",
    prompts: list[str],
    ids: list[list[int]],
    options: dict[str, Any],
    json: bool,
) -> None:
    started = time.perf_counter()
    results = lm.generate(ids, **options)
    seconds = time.perf_counter() - started
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        if json:
            print_json({"prompt": prompt, **_facts(result), "batch_seconds": round(seconds, 3)})
        else:
            typer.echo(f"{'' if number == 0 else chr(10)}--- {prompt}")
            typer.echo(result.text)


def _facts(result: "Generation") -> dict[str, object]:
    facts: dict[str, object] = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "token_ids": list(result.token_ids),
    }
    if result.logprobs is not None:
        facts["logprobs"] = [
            {"token": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in result.logprobs
        ]
    return facts
