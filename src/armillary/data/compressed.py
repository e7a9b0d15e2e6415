"""gzip and Zstandard as streams in which a file that ends too soon is an error."""

import gzip
import io
import zlib
from typing import Any, BinaryIO, cast

from armillary.errors import UserError


class DamagedError(Exception):
    """The compressed data is not whole."""


DAMAGE = (DamagedError, EOFError, zlib.error, gzip.BadGzipFile)


def open_decompressed(stream: BinaryIO | io.BufferedReader, compression: str) -> BinaryIO:
    """Return the stream's content. Reading it raises one of `DAMAGE` where it is not whole.

    Raises UserError when Zstandard's library is not installed.
    """
    if compression == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
    if compression == "zstd":
        return cast(BinaryIO, io.BufferedReader(_Zstandard(stream), 1 << 20))
    return stream


class _Zstandard(io.RawIOBase):
    """Frame after frame. The library's own reader takes a cut frame for the end of the file."""

    def __init__(self, stream: BinaryIO | io.BufferedReader) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError(
                'reading .zst files needs the library zstandard: pip install "armillary[data]"'
            ) from error
        self._stream = stream
        self._library = zstandard
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._output:
            # A small step in bounds what one step can give, however well it is compressed.
            self._input = self._input or self._stream.read(1 << 14)
            if not self._input:
                if self._frame is not None:
                    raise DamagedError("the compressed data ends before its end mark")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._library.ZstdError as error:
                raise DamagedError(str(error)) from error
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
