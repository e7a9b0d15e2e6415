"""Quantised weights in Hugging Face directories: several tensors of the file are one of the model.

`quantization_config` in config.json says by which method; each is a class of its own. Applying it
puts a tensor that reads as numbers under the name that the weight has in files that are not
quantised, so that nothing after it knows of the method.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Protocol

from armillary.checkpoints.fp8 import FP8
from armillary.checkpoints.mxfp4 import MXFP4
from armillary.checkpoints.tensors import RAW, StoredTensor
from armillary.errors import CheckpointError
from armillary.strict_dict import StrictDict

_SAY_NOTHING_ALONE = frozenset({"F8_E4M3", RAW})


class Method(Protocol):
    """A method with its settings."""

    def apply(self, kept: MutableMapping[str, StoredTensor]) -> Sequence[str]:
        """Put what the method stores in parts together, in place; return notices.

        Raises CheckpointError for parts that are missing or do not fit.
        """


_METHODS: Mapping[str, Callable[[StrictDict], Method]] = {
    "fp8": FP8.from_entries,
    "mxfp4": MXFP4.from_entries,
}


def read_method(entries: StrictDict) -> Method | None:
    """What `quantization_config` says, None where there is none. Raises CheckpointError."""
    if "quantization_config" not in entries:
        return None
    section = entries.section("quantization_config")
    name = section.take_optional("quant_method", str)
    if name is None or name not in _METHODS:
        raise CheckpointError(
            f"{entries.where}: quantised weights (quantization_config, quant_method {name!r:.40}) "
            f"are not read from this format, but for {' and '.join(_METHODS)}; take the original "
            "or a GGUF file"
        )
    return _METHODS[name](section)


def put_together(
    found: Mapping[str, StoredTensor], method: Method | None, where: str, notices: list[str]
) -> dict[str, StoredTensor]:
    """The tensors of a directory by the names of the weights.

    Raises CheckpointError as the method does, and for tensors that it says nothing of and that are
    no numbers by themselves.
    """
    kept = dict(found)
    if method is not None:
        notices += method.apply(kept)
    for name, tensor in kept.items():
        if tensor.encoding in _SAY_NOTHING_ALONE:
            fault = (
                "but config.json has no quantization_config that says how it is scaled"
                if method is None
                else "of which the method in quantization_config says nothing"
            )
            raise CheckpointError(f"{where}: {name} is {tensor.encoding}, {fault}")
    return kept
