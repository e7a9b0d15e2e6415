"""llama.cpp as the peer of parity tests."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def llama_cpp_peer(path: Path, window: int) -> Iterator[Any]:
    """With a float32 cache and plain attention, so that nothing is rounded to float16."""
    import llama_cpp

    opened = llama_cpp.Llama(
        str(path),
        n_ctx=window,
        n_batch=window,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )
    try:
        yield opened
    finally:
        opened.close()


def logits_of(opened: Any, ids: list[int]) -> np.ndarray:
    """Of a whole text, in one batch."""
    opened.reset()
    opened.eval(ids)
    return np.array(opened.scores[: len(ids)])


def requantise(source: Path, target: Path, file_type: int, **choices: Any) -> None:
    """A GGUF file in a type of llama.cpp's (`llama_ftype`), by llama.cpp's own quantiser."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 1, file_type, True
    for name, value in choices.items():
        setattr(params, name, value)
    names = [str(path).encode() for path in (source, target)]
    assert llama_cpp.llama_model_quantize(*names, ctypes.byref(params)) == 0
