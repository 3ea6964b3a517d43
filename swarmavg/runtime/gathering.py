"""The user's `gather` values: msgpack within limits, checked where they enter and where they come back."""

from __future__ import annotations

from typing import Any

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.protocol.group import Group
from swarmavg.protocol.matchmaking_messages import MAX_GATHER_BYTES
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.packing import pack, unpack

MAX_GATHER_DEPTH = 64

_log = get_logger("swarmavg.averager")


def check_gather(value: Any) -> bytes:
    """Pack a value. Raises `TypeError` for what msgpack cannot hold and `ValueError` for what is too large or too deep."""
    try:
        packed = pack(value)
    except TypeError as error:
        raise TypeError(f"gather={value!r:.200} cannot be packed: {error}") from None
    except ValueError as error:
        raise ValueError(f"gather={value!r:.200} cannot be packed: {error}") from None
    if len(packed) > MAX_GATHER_BYTES:
        raise ValueError(f"gather packs to {len(packed)} bytes, at most {MAX_GATHER_BYTES} are allowed: {value!r:.200}")
    try:
        _unpack(packed)
    except RemoteProtocolError as error:
        raise ValueError(f"gather={value!r:.200} would not be accepted by others: {error}") from None
    return packed


def read_gather(group: Group) -> dict[PeerId, Any]:
    """The values of all members. One that cannot be read is `None`, with a warning: it spoils nobody's round."""
    values: dict[PeerId, Any] = {}
    for member in group.members:
        try:
            values[member.peer_id] = _unpack(member.gather)
        except RemoteProtocolError as error:
            _log.warning("a member's gather value cannot be read", peer=member.peer_id.short, error=str(error))
            values[member.peer_id] = None
    return values


def _unpack(packed: bytes) -> Any:
    return unpack(
        packed, what="gather value", max_bytes=MAX_GATHER_BYTES, max_depth=MAX_GATHER_DEPTH, max_items=MAX_GATHER_BYTES
    )
