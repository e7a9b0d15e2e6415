"""Choosing a token: our sampler with its kernel beside itself without and llama.cpp's, in one run.

The logits are SmolLM2-135M's after 40 places of a text, 49,152 each; every sampler takes the same
options in the order that it takes them in, and makes one draw. llama.cpp's list of candidates is
filled as `llama_sampler_sample` fills it, by a copy; its own loop for that is not counted.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints import open_checkpoint
from armillary.checkpoints.locate import locate
from armillary.engine.decoder import EngineDecoder
from armillary.generation.sampling import SamplingConfig, Weigh, choose, temperature
from generate import TEXT_MODULES, has, prompts
from protocol import Row, finish, parser

PLACES = 40
OPTIONS = {
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "temperature 0.8, top-k 40, top-p 0.9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "temperature 0.8, min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}
Logits = NDArray[np.float32]
Sampler = Callable[[Logits, float], Any]


def main() -> None:
    """Measure, print and check."""
    chosen = parser(__doc__).parse_args()
    checkpoint = open_checkpoint(locate("smollm2-135m"))
    decoder = EngineDecoder(checkpoint.config, checkpoint.tensors)
    text = prompts(16 * PLACES)[TEXT_MODULES.index("datetime.py")]
    logits = list(decoder.take([decoder.new_cache()], [text], every=True)[0][::16])
    rows = []
    for name, options in OPTIONS.items():
        config = SamplingConfig(**options)
        samplers = {
            "with the kernel": _ours(config, decoder.weigh),
            "NumPy alone": _ours(config, temperature),
        }
        if has("llama_cpp"):
            samplers["llama.cpp"] = _theirs(options)
        ours, *peers = _microseconds(samplers, logits, 3 if chosen.quick else 15).items()
        rows += [
            Row(name, ours[1], peer, seconds, "µs", higher_is_better=False)
            for peer, seconds in peers
        ]
    finish(rows, chosen)


def _microseconds(
    samplers: dict[str, Sampler], logits: list[Logits], repeats: int
) -> dict[str, float]:
    """Of each sampler, taken in turns: the median over places and repeats."""
    draws = np.random.default_rng(0).random(len(logits)).tolist()
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for repeat in range(repeats + 1):
        for name, sampler in samplers.items():
            for row, draw in zip(logits, draws, strict=True):
                started = time.perf_counter()
                sampler(row, draw)
                if repeat:
                    taken[name].append(time.perf_counter() - started)
    return {name: 1e6 * statistics.median(each) for name, each in taken.items()}


def _ours(config: SamplingConfig, weigh: Weigh) -> Sampler:
    return lambda logits, draw: choose(logits, config, draw, None, weigh)


def _theirs(options: dict[str, Any]) -> Sampler:
    import llama_cpp

    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    parts = {
        "top_k": llama_cpp.llama_sampler_init_top_k,
        "top_p": lambda p: llama_cpp.llama_sampler_init_top_p(p, 1),
        "min_p": lambda p: llama_cpp.llama_sampler_init_min_p(p, 1),
        "temperature": llama_cpp.llama_sampler_init_temp,
    }
    for option, make in parts.items():
        if option in options:
            llama_cpp.llama_sampler_chain_add(chain, make(options[option]))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(1))
    one = llama_cpp.llama_token_data
    kind = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    filled: dict[int, NDArray[Any]] = {}
    candidates: NDArray[Any] | None = None

    def sample(logits: Logits, _draw: float) -> int:
        nonlocal candidates
        if logits.ctypes.data not in filled:
            fresh = np.zeros(len(logits), kind)
            fresh["id"], fresh["logit"] = np.arange(len(logits)), logits
            filled[logits.ctypes.data] = fresh
        if candidates is None:
            candidates = np.empty(len(logits), kind)
        candidates[:] = filled[logits.ctypes.data]
        pointer = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(one))
        row = llama_cpp.llama_token_data_array(pointer, len(logits), -1, False)
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(row))
        return int(candidates["id"][row.selected])

    return sample


if __name__ == "__main__":
    main()
