"""GGUF headers byte by byte, for files that no writer would write."""

import struct

TYPES = {"u8": 0, "i8": 1, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "arr": 9, "u64": 10}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def entry(
    name: str | bytes,
    dims: tuple[int, ...] = (4,),
    kind: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    """One tensor's entry; `dims` with the fastest dimension first, as the file has them."""
    count = len(dims) if n_dims is None else n_dims
    return (
        string(name)
        + struct.pack("<I", count)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_bytes(
    pairs: tuple[bytes, ...] = (),
    entries: tuple[bytes, ...] = (),
    body: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = b"\3\0\0\0",
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file: header, padding to the alignment, body."""
    counts = (
        len(entries) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    header = magic + version + struct.pack("<QQ", *counts) + b"".join(pairs) + b"".join(entries)
    return header + b"\0" * (-len(header) % alignment) + body
