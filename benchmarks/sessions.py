"""llama.cpp's own file of a prompt that was computed: made when it is not there, else gone on from.

    python benchmarks/sessions.py MODEL.gguf PROMPT.txt SAVED THREADS

Prints the first token. Source: llama_state_save_file and llama_state_load_file of llama.h.
"""

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    """Load, or compute and save; then the last token."""
    path, prompt, saved, threads = sys.argv[1:]
    text = Path(prompt).read_bytes()
    model = llama_cpp.Llama(
        path,
        n_ctx=len(text) // 2,
        n_threads=int(threads),
        n_threads_batch=int(threads),
        flash_attn=True,
        verbose=False,
    )
    tokens = model.tokenize(text, add_bos=False)
    context = model.ctx
    if Path(saved).exists():
        held, count = (llama_cpp.llama_token * len(tokens))(), ctypes.c_size_t()
        if not llama_cpp.llama_state_load_file(
            context, saved.encode(), held, len(tokens), ctypes.byref(count)
        ):
            raise RuntimeError(f"{saved}: llama.cpp cannot read it")
        if list(held[: count.value]) != tokens:
            raise RuntimeError(f"{saved}: is of another prompt")
    else:
        model.eval(tokens)
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if not llama_cpp.llama_state_save_file(context, saved.encode(), array, len(tokens)):
            raise RuntimeError(f"{saved}: llama.cpp cannot write it")
    model.n_tokens = len(tokens) - 1
    model.eval(tokens[-1:])
    logits = model._ctx.get_logits_ith(-1)
    best = int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())
    print(model.detokenize([best]).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
