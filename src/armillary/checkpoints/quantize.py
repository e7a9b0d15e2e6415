"""A checkpoint with its matrices in another encoding, written by blocks of rows.

Which tensors are quantised is what llama.cpp does with its plain types, but for one: the matrix
that gives the logits. There llama.cpp takes 6 bits where the others have 4 or 5; ours are 8, which
both of our formats hold and every engine reads.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.gguf_write import write_gguf
from armillary.checkpoints.own_format import save_armillary
from armillary.checkpoints.tensors import (
    StoredTensor,
    block_size,
    encoded_bytes,
    plain_for,
    telling,
    to_write,
)

TARGETS: Mapping[str, str] = {
    "q8_0": "Q8_0",
    "q6_k": "Q6_K",
    "q5_k": "Q5_K",
    "q4_k": "Q4_K",
    "q4_1": "Q4_1",
    "q4_0": "Q4_0",
    "bf16": "BF16",
}

_FEW_BITS = frozenset({"Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q4_K", "Q5_K"})
# What llama.cpp takes where rows are no whole super-blocks.
_SHORTER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LOGITS = "Q8_0"
_NO_BLOCKS = "F16"  # llama.cpp's, of matrices whose rows are no whole blocks
_NOTHING_LOST = "F32"


def stays_exact(tensor: StoredTensor) -> bool:
    """Whether engines want a parameter in float32: vectors, stacks of them, positions, routers.

    A router's rounding picks other experts.
    """
    name = tensor.name
    exact = name == "position_table.weight" or name.endswith((".bias", "router.weight"))
    return exact or len(tensor.shape) < 2


def choose_encodings(checkpoint: Checkpoint, target: str) -> tuple[dict[str, str], list[str]]:
    """The encoding for each parameter when matrices are brought to `target`, and notices.

    Vectors, tables of positions and routers are F32 (`stays_exact`). Matrices whose rows are no
    whole count of super-blocks have the blocks of 32 that llama.cpp takes then; where these do not
    fit either they are F16. The matrix that gives the logits (the head, or the embedding when tied
    to it) has 8 bits where `target` has 4 or 5.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    logits = "embedding.weight" if config.tie_head else "head.weight"
    encodings: dict[str, str] = {}
    unfit: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        wanted = _LOGITS if name == logits and target in _FEW_BITS else target
        if stays_exact(tensor):
            wanted = _NOTHING_LOST
        else:
            fitting = _fitting(wanted, tensor.shape[-1])
            if fitting != wanted:
                unfit.setdefault(fitting, []).append(name)
            wanted = fitting
        encodings[name] = wanted
    notices = [
        f"rows that are no multiple of {_needed(target, instead)} are written as {instead}, in "
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for instead, names in unfit.items()
    ]
    before = sorted(
        {
            tensor.encoding
            for name, tensor in tensors.items()
            if encodings[name] not in {tensor.encoding, plain_for(tensor.encoding), _NOTHING_LOST}
            and block_size(tensor.encoding)[0] > 1
        }
    )
    if before:
        notices.append(
            f"the model is quantised already ({', '.join(before)}), and the errors add up; take "
            "the original where there is one"
        )
    return encodings, notices


def _fitting(wanted: str, width: int) -> str:
    """`wanted` where a row is a whole count of its blocks, else what comes nearest."""
    while width % block_size(wanted)[0]:
        wanted = _SHORTER_BLOCKS.get(wanted, _NO_BLOCKS)
    return wanted


def _needed(target: str, instead: str) -> int:
    """What rows that are written as `instead` are no multiple of."""
    return block_size(_LOGITS if instead == _NO_BLOCKS else target)[0]


def bytes_of(checkpoint: Checkpoint, encodings: Mapping[str, str] | None = None) -> int:
    """Bytes of all weights, as they are stored or as `encodings` would have them."""
    if encodings is None:
        return sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return sum(
        encoded_bytes(tensor.shape, encodings[name]) for name, tensor in checkpoint.tensors.items()
    )


def write_encoded(
    path: Path,
    checkpoint: Checkpoint,
    encodings: Mapping[str, str],
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Write a GGUF file (a path that ends in .gguf) or one of our directories; return notices.

    Atomic; memory is that of a block of rows. `progress` is called with the bytes of each block.
    Raises CheckpointError and ConfigError for what the format cannot say or the encoding not hold,
    UserError when it cannot be written.
    """
    if path.suffix == ".gguf":
        return write_gguf(path, checkpoint, encodings, progress=progress)
    tensors = (to_write(tensor, encodings[name]) for name, tensor in checkpoint.tensors.items())
    save_armillary(
        path,
        checkpoint.config,
        [telling(tensor, progress) for tensor in tensors],
        checkpoint.tokenizer,
        checkpoint.generation,
    )
    return []
