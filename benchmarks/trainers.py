"""The trainers that benchmarks/train.py compares, each in a process of its own.

A worker builds a model and an optimiser, makes its first steps (which compile), then answers
requests on its standard input, one JSON object a line, so that trainers can take turns on the same
machine and each one's peak memory is its own.

    {"do": "step"}      → {"seconds": s of forward, backward and optimiser, "loss": nats a token}
    {"do": "memory"}    → {"peak_bytes": b}

All make the same step: bfloat16 or float32 products over float32 weights, gradients clipped to a
norm of 1, torch's fused AdamW, on batches of random tokens that are the same for all.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

THREADS = 2


@dataclass(frozen=True)
class Size:
    """The model and the batch; the defaults are 32.0 M parameters and 8 × 512 tokens."""

    d_model: int = 512
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 4
    d_ff: int = 1408
    vocab_size: int = 8192
    batch: int = 8
    length: int = 512

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


# (B, T) tokens and labels → nats a token, after a whole step
Step = Callable[[Any, Any], float]


def _armillary(size: Size, compute: str, compiled: bool) -> Step:
    import torch

    from armillary import Decoder
    from armillary.training.compilation import compile_objective
    from armillary.training.objective import Objective
    from armillary.training.optimizer import OptimizerConfig, build_optimizer
    from armillary.training.precision import Precision

    objective = Objective(Decoder(armillary_config(size)).train())
    optimizer = build_optimizer(objective.decoder, OptimizerConfig())
    precision = Precision("bfloat16" if compute == "bf16" else "float32")
    if compiled:
        how = compile_objective(objective, precision.dtype, torch.device("cpu"))
        print(how, file=sys.stderr, flush=True)

    def step(tokens: Any, labels: Any) -> float:
        with precision.autocast():
            loss = objective(tokens, labels)
        precision.backward(loss.total / loss.count)
        precision.step(optimizer, max_norm=1.0)
        return float(loss.cross_entropy / loss.count)

    return step


def armillary_config(size: Size) -> Any:
    """The decoder's configuration."""
    from armillary import DecoderConfig

    return DecoderConfig.uniform(
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        n_layers=size.n_layers,
        n_heads=size.n_heads,
        n_kv_heads=size.n_kv_heads,
        d_ff=size.d_ff,
        max_positions=size.length,
    )


def _transformers(size: Size, compute: str, compiled: bool) -> Step:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocab_size,
            hidden_size=size.d_model,
            num_hidden_layers=size.n_layers,
            num_attention_heads=size.n_heads,
            num_key_value_heads=size.n_kv_heads,
            intermediate_size=size.d_ff,
            max_position_embeddings=size.length,
            tie_word_embeddings=False,
            use_cache=False,
        )
    ).train()
    run = torch.compile(model) if compiled else model
    # Its loss shifts labels by itself; given ones that are shifted already, it does not.
    return _usual_step(
        model,
        lambda tokens, labels: run(input_ids=tokens, labels=labels, shift_labels=labels).loss,
        compute,
    )


def _litgpt(size: Size, compute: str, compiled: bool) -> Step:
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    model = GPT(
        Config(
            block_size=size.length,
            padded_vocab_size=size.vocab_size,
            n_layer=size.n_layers,
            n_head=size.n_heads,
            n_query_groups=size.n_kv_heads,
            n_embd=size.d_model,
            intermediate_size=size.d_ff,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    ).train()
    run = torch.compile(model) if compiled else model
    return _usual_step(
        model, lambda tokens, labels: chunked_cross_entropy(run(tokens), labels), compute
    )


def _usual_step(model: Any, loss_of: Callable[[Any, Any], Any], compute: str) -> Step:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step(tokens: Any, labels: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bf16"):
            loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


TRAINERS: dict[str, Callable[[Size, str, bool], Step]] = {
    "armillary": _armillary,
    "transformers": _transformers,
    "litgpt": _litgpt,
}


class Worker:
    """A process that trains one model, `mode` being "eager" or "compiled"."""

    def __init__(self, trainer: str, mode: str, compute: str, size: Size) -> None:
        self.trainer = trainer
        self.name = f"{trainer} {mode}"
        request = {"trainer": trainer, "mode": mode, "compute": compute, "size": asdict(size)}
        # OpenMP reads its thread count when it is loaded, before a trainer can set it.
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        # A first step, with compiling, takes longer than the second by what compiling costs.
        self.first_seconds = float(self._answer()["seconds"])

    def step(self) -> float:
        """Seconds of a step that follows another, as in training.

        The one before is not counted: while others had their turns the system took back what this
        process had freed, and a machine that is a guest pays for it again page by page.
        """
        self._ask("step")
        return float(self._ask("step")["seconds"])

    def memory(self) -> int:
        """The process's peak of resident memory in bytes."""
        return int(self._ask("memory")["peak_bytes"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} trainer ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _serve(trainer: str, mode: str, compute: str, size: Size) -> None:
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    step = TRAINERS[trainer](size, compute, mode == "compiled")
    generator = torch.Generator().manual_seed(1)

    def timed() -> dict[str, float]:
        rows = torch.randint(size.vocab_size, (size.batch, size.length + 1), generator=generator)
        started = time.perf_counter()
        loss = step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        return {"seconds": time.perf_counter() - started, "loss": loss}

    print(json.dumps(timed()), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)["do"]
        print(json.dumps({"peak_bytes": _peak_bytes()} if asked == "memory" else timed()))
        sys.stdout.flush()


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("peak memory is read from /proc, which is not here")


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    _serve(request["trainer"], request["mode"], request["compute"], Size(**request["size"]))
