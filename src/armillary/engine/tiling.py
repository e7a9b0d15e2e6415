"""How blocks of rows meet matrices, for the kernels that multiply and the plan that calls them.

All is in words of 32 bits: a float32 number, or two bfloat16 numbers that are used one after the
other. Sums of products are float32.
"""

from typing import Literal

from armillary.engine.formats import Format
from armillary.engine.kv_layout import CHUNK
from armillary.engine.machine import Machine

Number = Literal["F32", "BF16"]
"""What numbers are multiplied as."""

LANES = 16
"""Words of a vector: columns that lie together."""

MOST_ROWS, MOST_VECTORS = 8, 3
"""Rows and vectors of columns that meet at once at most, so that their sums are in registers."""

AMX_VECTORS = 2 * MOST_VECTORS
"""Vectors of columns in two-byte numbers that take no more memory than those in four."""

WHOLE_ROWS = 16
"""Products compute rows up to a multiple of it."""

PART = 256
"""Numbers of a row of weights that are brought to another layout together."""

_LINE = 64
_SECOND_CACHE = 1 << 20


def tile_rows(machine: Machine) -> int:
    """Rows that meet at once: a divisor of MOST_ROWS."""
    return MOST_ROWS if machine.wide else 4


def tile_vectors(machine: Machine) -> int:
    """Vectors of columns that meet at once."""
    return MOST_VECTORS if machine.wide else 1


def multiplied_as(form: Format, machine: Machine) -> Number:
    """What weights of a format without blocks are multiplied as, by a machine's instructions."""
    return "BF16" if machine.bf16_dot and form.name == "BF16" else "F32"


def words(number: Number, k: int) -> int:
    """Words of a row of k numbers, as whole vectors."""
    numbers = -(-k // (2 * LANES)) * 2 * LANES
    return numbers if number == "F32" else numbers // 2


def row_stride(number: Number, k: int) -> int:
    """Bytes from one row of k numbers to the next.

    An odd count of cache lines, so that the rows of a tile fall on different places of the cache.
    """
    lines = words(number, k) * 4 // _LINE
    return _LINE * (lines | 1)


def panel_bytes(k: int) -> int:
    """Bytes that a thread needs for the columns that it multiplies by, and to lay them out."""
    return 4 * LANES * (MOST_VECTORS * words("F32", k) + PART + 2 * AMX_VECTORS)


def multiplied_by_amx(number: Number, machine: Machine) -> bool:
    """Whether products of such numbers are AMX's."""
    return number == "BF16" and machine.bf16_tiles


def query_vectors(number: Number, machine: Machine) -> int:
    """Vectors of queries that meet a chunk of keys at once."""
    return 2 if multiplied_by_amx(number, machine) else tile_vectors(machine)


def query_blocks(number: Number, machine: Machine, d_head: int, d_value: int) -> int:
    """Blocks of queries that meet a chunk together at most.

    One where the chunk is read as it is; else as many as half of a usual second cache holds.
    """
    if not multiplied_by_amx(number, machine):
        return 1
    return max(1, min(8, _SECOND_CACHE // 2 // _block_bytes(d_head, d_value)))


def _block_bytes(d_head: int, d_value: int) -> int:
    """Bytes of a block of queries, their sums, and what is kept of each query."""
    return 4 * LANES * MOST_VECTORS * (words("F32", d_head) + d_value + 6)


def attention_bytes(d_head: int, d_value: int, blocks: int) -> int:
    """Bytes that a thread needs for the blocks of queries that it takes at once."""
    wide = words("F32", d_head)
    scores = 4 * LANES * MOST_VECTORS * CHUNK
    # Queries as they come; or keys and values of a chunk in two bytes, and two float32 for each of
    # its tokens; the same turned.
    stage = max(4 * LANES * max(wide, d_value), 2 * CHUNK * (d_head + d_value + 4))
    area = 2 * CHUNK * (wide + d_value + 4)
    return blocks * _block_bytes(d_head, d_value) + scores + stage + area
