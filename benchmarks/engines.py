"""The engines that generation is measured on, each in a process of its own.

A worker loads a model, then answers requests on its standard input, one JSON object a line, so
that engines can take turns on the same machine and each one's peak memory is its own.

    {"do": "prefill", "tokens": […]}            → {"seconds": s}
    {"do": "decode", "tokens": […], "new": n}   → {"seconds": s of n steps, "ids": […]}
    {"do": "batch", "prompts": […], "new": n}   → {"seconds": s of n steps of all}
    {"do": "guess", "tokens": […], "new": n, "seed": s or null, "speculate": bool}
                                                → {"seconds": s of n − 1 tokens, "ids": […]}
    {"do": "memory"}                            → {"peak_bytes": b}

Greedy, but for "guess" with a seed; the prompt's own time is not part of "decode", and a prompt
that is asked for again at once is not taken in again.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    def prefill(self, tokens: Sequence[int]) -> int:
        """Take a prompt in from nothing; the likeliest next token."""

    def step(self, token: int) -> int:
        """Take one more token in; the likeliest next one."""

    def rewind(self, length: int) -> None:
        """Forget all but the first tokens."""


class Armillary:
    """The engine for the CPU. `dtype` is that of the weights, "auto" for those of the file."""

    def __init__(
        self, path: str, dtype: str, threads: int, context: int, cache: str = "auto"
    ) -> None:
        from armillary.language_model import load

        del threads, context
        self._lm = load(path, engine="numba", dtype=dtype, cache=cache)
        self._decoder = self._lm.decoder
        self._cache: Any = None

    def prefill(self, tokens: Sequence[int]) -> int:
        self._cache = self._decoder.new_cache()
        return self._take(tokens)

    def step(self, token: int) -> int:
        return self._take([token])

    def rewind(self, length: int) -> None:
        self._cache.trim(self._cache.length - length)

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Seconds for `new` tokens after each of some prompts."""
        caches = [self._decoder.new_cache() for _ in prompts]
        taken = [self._decoder.take([c], [p]) for c, p in zip(caches, prompts, strict=True)]
        last = [int(logits[0][-1].argmax()) for logits in taken]
        started = time.perf_counter()
        for _ in range(new):
            logits = self._decoder.take(caches, [[token] for token in last])
            last = [int(each[-1].argmax()) for each in logits]
        return time.perf_counter() - started

    def guess(
        self, tokens: Sequence[int], new: int, seed: int | None, speculate: bool
    ) -> tuple[float, list[int]]:
        """Seconds for all of `new` tokens but the first, with guesses or not, and the tokens."""
        how = {"temperature": 0.0} if seed is None else {"seed": seed, "temperature": 1.0}
        options = {**how, "max_tokens": new, "ignore_eos": True, "speculate": speculate}
        events = self._lm.stream(list(tokens), **options)
        ids = [next(events).token_id]
        started = time.perf_counter()
        ids += [event.token_id for event in events]
        return time.perf_counter() - started, ids

    def _take(self, tokens: Sequence[int]) -> int:
        return int(self._decoder.take([self._cache], [list(tokens)])[0][-1].argmax())


class Torch:
    """Our decoder in torch."""

    def __init__(self, path: str, dtype: str, threads: int, context: int) -> None:
        import torch

        import armillary

        del context
        torch.set_num_threads(threads)
        self._torch = torch
        self._lm = armillary.load(path, dtype=dtype)
        self._cache: Any = None

    def prefill(self, tokens: Sequence[int]) -> int:
        from armillary.parts.kv_cache import KVCache

        self._cache = KVCache(self._lm.config)
        with self._torch.no_grad():
            logits = self._lm.decoder.prefill(self._torch.tensor([list(tokens)]), self._cache)
        return int(logits[0, -1].argmax())

    def step(self, token: int) -> int:
        with self._torch.no_grad():
            logits = self._lm.decoder(self._torch.tensor([[token]]), cache=self._cache)
        return int(logits[0, -1].argmax())

    def rewind(self, length: int) -> None:
        self._cache.trim(self._cache.length - length)


class Transformers:
    def __init__(self, path: str, dtype: str, threads: int, context: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        del context
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self._past: Any = None

    def prefill(self, tokens: Sequence[int]) -> int:
        self._past = None
        return self._run([list(tokens)])

    def step(self, token: int) -> int:
        return self._run([[token]])

    def rewind(self, length: int) -> None:
        self._past.crop(length - self._past.get_seq_length())

    def _run(self, ids: list[list[int]]) -> int:
        with self._torch.no_grad():
            out = self._model(
                self._torch.tensor(ids),
                cache=self._past,
                use_cache=True,
                logits_to_keep=1,
            )
        self._past = out.cache
        return int(out.logits[0, -1].argmax())


class LlamaCpp:
    def __init__(self, path: str, dtype: str, threads: int, context: int) -> None:
        from llama_cpp import Llama

        del dtype
        self._model = Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=512,
            flash_attn=True,
            verbose=False,
        )

    def prefill(self, tokens: Sequence[int]) -> int:
        self._model.reset()
        return self._run(tokens)

    def step(self, token: int) -> int:
        return self._run([token])

    def rewind(self, length: int) -> None:
        # What lies behind is dropped when more is taken in.
        self._model.n_tokens = length

    def _run(self, tokens: Sequence[int]) -> int:
        self._model.eval(list(tokens))
        # The raw pointer: `scores` would copy a matrix over the whole context.
        logits = self._model._ctx.get_logits_ith(-1)
        import numpy as np

        return int(np.ctypeslib.as_array(logits, (self._model.n_vocab(),)).argmax())


INT8_CACHE = "armillary, cache in int8"
ENGINES: dict[str, Callable[[str, str, int, int], Engine]] = {
    "armillary": Armillary,
    INT8_CACHE: partial(Armillary, cache="int8"),
    "armillary torch": Torch,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


class Worker:
    """A process that holds one engine."""

    def __init__(self, name: str, path: Path, dtype: str, threads: int, context: int) -> None:
        self.name = name
        # OpenMP reads its thread count when it is loaded, before an engine can set it.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, name, str(path), dtype, str(threads), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def prefill(self, tokens: Sequence[int]) -> float:
        """Seconds to take a prompt in."""
        return float(self._ask(do="prefill", tokens=list(tokens))["seconds"])

    def decode(self, tokens: Sequence[int], new: int) -> tuple[float, list[int]]:
        """Seconds for `new` tokens after a prompt, and the tokens."""
        answer = self._ask(do="decode", tokens=list(tokens), new=new)
        return float(answer["seconds"]), answer["ids"]

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Seconds for `new` tokens after each of some prompts, together."""
        asked = [list(prompt) for prompt in prompts]
        return float(self._ask(do="batch", prompts=asked, new=new)["seconds"])

    def guess(
        self, tokens: Sequence[int], new: int, seed: int | None, *, speculate: bool
    ) -> tuple[float, list[int]]:
        """Seconds for all of `new` tokens but the first, with or without guesses; the tokens."""
        answer = self._ask(do="guess", tokens=list(tokens), new=new, seed=seed, speculate=speculate)
        return float(answer["seconds"]), answer["ids"]

    def memory(self) -> int:
        """The process's peak of resident memory in bytes."""
        return int(self._ask(do="memory")["peak_bytes"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} worker ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server:
    """Answers requests with one engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._prompt: list[int] = []
        self._next = 0

    def serve(self) -> None:
        """Answer until there are no more requests."""
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(self._answer(json.loads(line))), flush=True)

    def _answer(self, request: dict[str, Any]) -> dict[str, object]:
        what = request["do"]
        if what == "memory":
            return {"peak_bytes": _peak_bytes()}
        if what == "batch":
            return {"seconds": self._engine.batch(request["prompts"], request["new"])}
        if what == "guess":
            wanted = ("tokens", "new", "seed", "speculate")
            seconds, ids = self._engine.guess(*(request[name] for name in wanted))
            return {"seconds": seconds, "ids": ids}
        if what == "prefill":
            return {"seconds": self._prefill(request["tokens"])}
        if request["tokens"] != self._prompt:
            self._prefill(request["tokens"])
        ids = [self._next]
        started = time.perf_counter()
        for _ in range(request["new"]):
            ids.append(self._engine.step(ids[-1]))
        seconds = time.perf_counter() - started
        self._engine.rewind(len(self._prompt))
        return {"seconds": seconds, "ids": ids}

    def _prefill(self, tokens: list[int]) -> float:
        started = time.perf_counter()
        self._next = self._engine.prefill(tokens)
        self._prompt = tokens
        return time.perf_counter() - started


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("peak memory is read from /proc, which is not here")


if __name__ == "__main__":
    name, path, dtype, threads, context = sys.argv[1:]
    Server(ENGINES[name](path, dtype, int(threads), int(context))).serve()
