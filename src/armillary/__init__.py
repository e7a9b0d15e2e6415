"""Armillary: modern decoder language models put together from parts.

    lm = armillary.load("smollm2-135m")
    lm.generate("The capital of France is", max_tokens=8, temperature=0).text

Importing the package imports nothing heavy; each name below is brought in when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from armillary.config import DecoderConfig
    from armillary.decoder import Decoder
    from armillary.language_model import LanguageModel, load
    from armillary.parts.kv_cache import KVCache

__version__ = "0.1.0"
__all__ = ["Decoder", "DecoderConfig", "KVCache", "LanguageModel", "load"]

_HOMES = {
    "Decoder": "armillary.decoder",
    "DecoderConfig": "armillary.config",
    "KVCache": "armillary.parts.kv_cache",
    "LanguageModel": "armillary.language_model",
    "load": "armillary.language_model",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'armillary' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
