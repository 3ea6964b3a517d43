"""Frames: the bytes of a connection, whatever carries them. Sans-IO: no sockets, tasks or clock.

    frame    kind: u8, flags: u8, header length: u16, payload length: u32 (big-endian), header, payload
    hello    both sides, first: protocol versions, peer id, swarm id, largest payload accepted
    open     the dialling side names the purpose; the listening side answers with an open frame of its own
    message  an opaque header and a payload
    end      this direction of the channel has ended cleanly
    error    the channel is refused: a code for programs, a reason for people
    cancel   the channel is given up, with a reason

Only messages carry a payload. A frame of an unknown kind is skipped when it is flagged optional, and a violation otherwise.
The first byte of a frame is never that of a TLS record (0x14 to 0x18), so that each kind of port recognises the other kind
of client.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, Final, Self

from swarmavg.errors import ChannelViolationError, RemoteProtocolError
from swarmavg.identifiers import PEER_ID_BYTES, PeerId
from swarmavg.transport.interface import MAX_HEADER_BYTES, MAX_PURPOSE_CHARS
from swarmavg.transport.packing import pack, unpack

VERSIONS: Final = (1, 1)
"""Lowest and highest protocol version spoken here."""

MAX_CONTROL_BYTES: Final = 4096
MAX_CODE_CHARS: Final = 256
MAX_REASON_CHARS: Final = 500
MAX_PAYLOAD_BYTES: Final = 2**32 - 1
SWARM_ID_BYTES: Final = 32
OPTIONAL: Final = 0x80
TLS_FIRST_BYTES: Final = range(0x14, 0x19)
"""What a TLS record begins with; never a kind of frame, so that either side knows the other at its first byte."""
HEAD: Final = struct.Struct(">BBHI")

_SCRATCH_BYTES: Final = 16 * 1024
"""At most so much of a payload takes the way through the scratch buffer instead of going straight to its place."""


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    OPEN = 2
    MESSAGE = 3
    END = 4
    ERROR = 5
    CANCEL = 6


_KINDS: Final = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose header is complete; its payload, if any, has yet to be read."""

    kind: Kind
    header: bytes
    payload_bytes: int = 0


def encode(kind: int, header: bytes = b"", payload_bytes: int = 0, *, flags: int = 0) -> bytes:
    """The start of a frame: all of it but the payload. Raises `ValueError` for lengths that do not fit."""
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"header must be at most {MAX_HEADER_BYTES} bytes, got {len(header)}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"payload must be at most {MAX_PAYLOAD_BYTES} bytes, got {payload_bytes}")
    return HEAD.pack(kind, flags, len(header), payload_bytes) + header


@dataclass(frozen=True, slots=True)
class Hello:
    """What each side says first."""

    peer: PeerId
    swarm: bytes
    message_bytes: int
    """Largest payload that the sender of this hello accepts."""
    versions: tuple[int, int] = VERSIONS

    def encode(self) -> bytes:
        low, high = self.versions
        fields = {"versions": [low, high], "peer": self.peer.digest, "swarm": self.swarm, "limit": self.message_bytes}
        return encode(Kind.HELLO, pack(fields))

    @classmethod
    def decode(cls, header: bytes) -> Self:
        """Raises `RemoteProtocolError`."""
        fields = _fields(header, "hello")
        versions = fields.get("versions")
        if not (isinstance(versions, list) and len(versions) == 2 and all(type(v) is int for v in versions)):
            raise RemoteProtocolError(f"malformed hello: versions {versions!r}")
        limit = fields.get("limit")
        if type(limit) is not int or limit < 0:
            raise RemoteProtocolError(f"malformed hello: limit {limit!r}")
        peer = _sized(fields, "peer", PEER_ID_BYTES)
        return cls(PeerId(peer), _sized(fields, "swarm", SWARM_ID_BYTES), limit, (versions[0], versions[1]))


def negotiate(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """The highest protocol version within both ranges, or `None`."""
    version = min(ours[1], theirs[1])
    return version if version >= max(ours[0], theirs[0]) else None


def encode_open(purpose: str) -> bytes:
    """Raises `ValueError` for a purpose that is empty or too long."""
    if not 0 < len(purpose) <= MAX_PURPOSE_CHARS:
        raise ValueError(f"purpose must have between 1 and {MAX_PURPOSE_CHARS} characters, got {purpose!r}")
    return encode(Kind.OPEN, pack({"purpose": purpose}))


def decode_open(header: bytes) -> str:
    """The purpose. Raises `RemoteProtocolError`."""
    purpose = _fields(header, "open").get("purpose")
    if not isinstance(purpose, str) or not 0 < len(purpose) <= MAX_PURPOSE_CHARS:
        raise RemoteProtocolError(f"malformed open: purpose {purpose!r:.80}")
    return purpose


def encode_error(code: str, reason: str) -> bytes:
    """Longer texts are cut."""
    return encode(Kind.ERROR, pack({"code": code[:MAX_CODE_CHARS], "reason": reason[:MAX_REASON_CHARS]}))


def decode_error(header: bytes) -> tuple[str, str]:
    """Code and reason. Raises `RemoteProtocolError`."""
    fields = _fields(header, "error")
    return _text(fields, "code", MAX_CODE_CHARS), _text(fields, "reason", MAX_REASON_CHARS)


def encode_cancel(reason: str) -> bytes:
    """A longer text is cut."""
    return encode(Kind.CANCEL, pack({"reason": reason[:MAX_REASON_CHARS]}))


def decode_cancel(header: bytes) -> str:
    """The reason. Raises `RemoteProtocolError`."""
    return _text(_fields(header, "cancel"), "reason", MAX_REASON_CHARS)


def _fields(header: bytes, what: str) -> dict[Any, Any]:
    fields = unpack(header, what=what, max_bytes=MAX_CONTROL_BYTES, max_depth=2, max_items=64)
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"malformed {what}: a map was expected, got {type(fields).__name__}")
    return fields


def _sized(fields: dict[Any, Any], name: str, size: int) -> bytes:
    value = fields.get(name)
    if not isinstance(value, bytes) or len(value) != size:
        raise RemoteProtocolError(f"malformed hello: {name} must be {size} bytes, got {value!r:.80}")
    return value


def _text(fields: dict[Any, Any], name: str, longest: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise RemoteProtocolError(f"malformed {name}: {value!r:.80}")
    return value


class FrameReader:
    """Cuts a stream of bytes into frames, and leads large payloads straight to the memory chosen for them.

    The owner of the connection puts received bytes where `get_buffer` says and reports them to `received`, with nothing in
    between. Then it asks `next_frame` until that is `None`; a frame with a payload must be given memory by `fill`, or be
    dropped by `skip`, and when `filled` says so, be taken by `take`, before the next.
    """

    def __init__(self, *, max_payload: int) -> None:
        self._max_payload = max_payload
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = 0
        self._end = 0
        self._target: memoryview | None = None
        self._done = 0
        self._direct = False
        self._skip = 0
        self._unplaced = 0

    @property
    def filling(self) -> bool:
        """Whether the current frame's payload has been given memory."""
        return self._target is not None

    @property
    def filled(self) -> bool:
        """Whether that memory is full."""
        return self._target is not None and self._done == self._target.nbytes

    @property
    def between_frames(self) -> bool:
        """Whether the stream may end here: no frame has begun and not ended."""
        return self._start == self._end and self._target is None and not self._skip and not self._unplaced

    @property
    def unread(self) -> int:
        """Bytes that came and belong to no frame handed out so far, nor to its payload if that has a place."""
        return self._end - self._start

    def get_buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        if self._target is not None and self._start == self._end and self._done < self._target.nbytes:
            self._direct = True
            return self._target[self._done :]
        self._direct = False
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == self._scratch.nbytes:
            self._move_scratch(self._scratch.nbytes)
        return self._scratch[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes were put where `get_buffer` said."""
        if self._direct:
            self._done += count
        else:
            self._end += count

    def next_frame(self) -> Frame | None:
        """The next frame whose header is complete, or `None` for want of bytes.

        Raises `ChannelViolationError` for what no correct peer sends.
        """
        while True:
            if self._skip and not self._skipped():
                return None
            if self._end - self._start < HEAD.size:
                return None
            number, flags, header_bytes, payload_bytes = HEAD.unpack_from(self._scratch, self._start)
            kind = self._checked_kind(number, flags, header_bytes, payload_bytes)
            if kind is None:
                self._skip = HEAD.size + header_bytes + payload_bytes
                continue
            whole = HEAD.size + header_bytes
            if self._end - self._start < whole:
                self._make_room(whole)
                return None
            header = bytes(self._scratch[self._start + HEAD.size : self._start + whole])
            self._start += whole
            self._unplaced = payload_bytes
            return Frame(kind, header, payload_bytes)

    def fill(self, target: memoryview) -> None:
        """Read the current payload into `target`: bytes, exactly as many as announced."""
        count = min(target.nbytes, self._end - self._start)
        target[:count] = self._scratch[self._start : self._start + count]
        self._start += count
        self._target, self._done, self._unplaced = target, count, 0

    def take(self) -> memoryview:
        """The memory given to `fill`, now full."""
        target = self._target
        if target is None or not self.filled:
            raise RuntimeError("no payload is complete")
        self._target, self._done = None, 0
        return target

    def skip(self) -> None:
        """Drop the rest of the current payload, whether it has been given memory or not."""
        if self._target is not None:
            self._skip = self._target.nbytes - self._done
            self._target = None
        else:
            self._skip = self._unplaced
        self._unplaced = 0

    def _skipped(self) -> bool:
        count = min(self._skip, self._end - self._start)
        self._start += count
        self._skip -= count
        return self._skip == 0

    def _checked_kind(self, number: int, flags: int, header_bytes: int, payload_bytes: int) -> Kind | None:
        kind = _KINDS.get(number)
        if number in TLS_FIRST_BYTES:
            raise ChannelViolationError("it speaks TLS, and this side has no token: give the same token to both sides")
        if kind is None and not flags & OPTIONAL:
            raise ChannelViolationError(f"unknown kind of frame {number:#04x}: no peer of this protocol")
        if payload_bytes > self._max_payload:
            raise ChannelViolationError(f"a payload of {payload_bytes} bytes: at most {self._max_payload} are accepted")
        if kind is None:
            return None
        if kind is not Kind.MESSAGE and (payload_bytes or header_bytes > MAX_CONTROL_BYTES):
            raise ChannelViolationError(f"{kind.name} frame of {header_bytes} + {payload_bytes} bytes is too large")
        return kind

    def _make_room(self, whole: int) -> None:
        if self._start + whole > self._scratch.nbytes:
            self._move_scratch(max(whole, self._scratch.nbytes))

    def _move_scratch(self, size: int) -> None:
        """Move the unread bytes to the front, of a new buffer if they need a larger one."""
        unread = bytes(self._scratch[self._start : self._end])
        if size > self._scratch.nbytes:
            self._scratch = memoryview(bytearray(size))
        self._scratch[: len(unread)] = unread
        self._start, self._end = 0, len(unread)
