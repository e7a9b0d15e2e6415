"""The formats that keys and values are kept in: one class for each, which the kernels ask."""

from armillary.engine.cache_formats.format import CacheFormat
from armillary.engine.cache_formats.int8 import Int8
from armillary.engine.cache_formats.plain import BF16, F32
from armillary.engine.kv_layout import Stored

CACHE_FORMATS: dict[Stored, CacheFormat] = {"F32": F32(), "BF16": BF16(), "int8": Int8()}

__all__ = ["CACHE_FORMATS", "CacheFormat"]
