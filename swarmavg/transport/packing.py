"""msgpack with limits: the one way in which bytes of a peer become Python values, and back.

Values are None, booleans, integers, floats, strings, bytes, lists, and maps whose keys are strings or bytes. No extension
types, no trailing bytes, no deep nesting: whatever is wrong with received bytes is a `RemoteProtocolError`.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from swarmavg.errors import RemoteProtocolError

MAX_PACKED_BYTES: Final = 1024 * 1024
"""Largest encoding that `unpack` looks at, unless it is told otherwise."""
MAX_DEPTH: Final = 8
"""A list in a list has depth 2."""
MAX_ITEMS: Final = 4096
"""Longest list or map. It bounds what a short input that announces long lists can make the decoder allocate."""


def pack(value: Any) -> bytes:
    """Encode a value. Tuples become lists.

    Raises `TypeError` for what has no encoding and `ValueError` for what is too large (an integer beyond 64 bits).
    """
    try:
        packed = msgpack.packb(value, use_bin_type=True)
    except OverflowError as error:
        raise ValueError(f"cannot pack {value!r}: {error}") from None
    return bytes(packed)


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    what: str,
    max_bytes: int = MAX_PACKED_BYTES,
    max_depth: int = MAX_DEPTH,
    max_items: int = MAX_ITEMS,
) -> Any:
    """Decode exactly one value. `what` names the thing in the error, as in ``malformed hello: ...``.

    Raises `RemoteProtocolError` for anything that is not one value within the limits; strings must be UTF-8.
    """
    size = len(data)
    if size > max_bytes:
        raise RemoteProtocolError(f"malformed {what}: {size} bytes, at most {max_bytes} are allowed")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=min(size, max_items),
            max_map_len=min(size, max_items),
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"malformed {what}: {str(error) or type(error).__name__}") from None
    _check_depth(value, what, max_depth)
    return value


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def _check_depth(value: Any, what: str, max_depth: int) -> None:
    level = [value] if isinstance(value, list | dict) else []
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise RemoteProtocolError(f"malformed {what}: nested deeper than {max_depth}")
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, list | dict)]
