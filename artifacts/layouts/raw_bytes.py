"""`raw-bytes-v1`, the encoding of resources: the bytes are the resource (storage-layouts.md section 5)."""

from __future__ import annotations

from artifacts.errors import LayoutError


class RawBytesEncoding:
    """No header, terminator or compression; alignment 1; at least one byte."""

    name, v3_name, alignment = "raw-bytes-v1", "raw_bytes_v1", 1

    @staticmethod
    def encoded_size(length: int) -> int:
        """Bytes of a resource of `length` bytes; raises LayoutError when it is empty."""
        if length < 1:
            raise LayoutError("a resource in raw-bytes-v1 needs at least one byte")
        return length


RAW_BYTES = RawBytesEncoding()
