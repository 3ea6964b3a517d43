"""Sees every message that travels over a `MemoryNetwork`, at its boundaries, and says which it is. It changes nothing itself.

watch = MessageWatch(network)
watch.on_sent.append(lambda message: print(message))

A message is a frame of a connection: greetings and ends as well as what channels carry. Callbacks run inside the sender's
`write` or the receiver's read, as nobody's process, and may kill, freeze or cut whatever they like.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.transport.framing import HEAD, Kind, decode_open
from swarmavg.transport.memory import MemoryNetwork
from swarmavg.transport.memory_link import outside
from swarmavg.transport.packing import unpack

_NAMES: Final = {int(kind): kind.name.lower() for kind in Kind}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSeen:
    """One frame between two peers."""

    number: int
    """Of those that `source` has begun to send, over all its streams; the first is 1."""
    time: float
    """When its first byte was written, in virtual seconds."""
    source: PeerId
    target: PeerId
    stream: int
    """Which of the network's streams and directions; the first is 1. Those of one connection are neighbours."""
    kind: str
    """Of the frame: ``hello``, ``open``, ``message``, ``end``, ``error``, ``cancel``."""
    purpose: str
    """Of the channel that it belongs to, such as ``round:run``; empty before the first is opened."""
    content: str
    """What a message of this package's protocols is, such as ``part``; empty for any other."""
    header: bytes = field(repr=False)
    payload_bytes: int

    @property
    def is_part(self) -> bool:
        """Whether it brings inputs to a reducer."""
        return self.content == "part" and self.purpose.startswith("round:")

    @property
    def is_result(self) -> bool:
        """Whether it brings an average from a reducer."""
        return self.content == "result" and self.purpose.startswith("round:")


OnMessage: TypeAlias = Callable[[MessageSeen], object]


class MessageWatch:
    """Attach to a network before its streams are opened: only later ones are seen. One watch per network.

    Lists to append callbacks to, each called with a `MessageSeen`:

    on_sending: not a byte of the message has left; if its sender is killed now, none will.
    on_sent: all of it is under way; it arrives even if its sender is killed now, unless what is under way is lost as well.
    on_received: the target has read all of it.
    """

    def __init__(self, network: MemoryNetwork, *, record: bool = False) -> None:
        self.on_sending: list[OnMessage] = []
        self.on_sent: list[OnMessage] = []
        self.on_received: list[OnMessage] = []
        self.trace: list[MessageSeen] = []
        """With `record`: every message, in the order in which they were begun."""
        self.sent: Counter[PeerId] = Counter()
        """How many messages each peer has begun to send."""
        self.received: Counter[PeerId] = Counter()
        """How many messages each peer has read to the end."""
        self.rewrite: Callable[[MessageSeen, memoryview, bool], memoryview] | None = None
        """Called with a message, a run of its bytes that is about to leave, and whether that is the first; returns what is to
        leave in their place."""
        self._streams = 0
        if record:
            self.on_sending.append(self.trace.append)
        network.set_tap(self._open)

    def _open(self, source: PeerId, target: PeerId) -> _Stream:
        self._streams += 1
        return _Stream(self, source, target, self._streams)

    # --- called by the streams

    def begun(self, source: PeerId, **what: Any) -> MessageSeen:
        self.sent[source] += 1
        message = MessageSeen(number=self.sent[source], time=asyncio.get_running_loop().time(), source=source, **what)
        _tell(self.on_sending, message)
        return message

    def left(self, message: MessageSeen) -> None:
        _tell(self.on_sent, message)

    def arrived(self, message: MessageSeen) -> None:
        self.received[message.target] += 1
        _tell(self.on_received, message)


def _tell(listeners: list[OnMessage], message: MessageSeen) -> None:
    for listener in list(listeners):
        listener(message)


class _Stream:
    """Cuts one direction of one stream into frames. Implements `memory_link.StreamTap`."""

    def __init__(self, watch: MessageWatch, source: PeerId, target: PeerId, number: int) -> None:
        self._watch = watch
        self._source = source
        self._target = target
        self._number = number
        self._purpose = ""
        self._current: MessageSeen | None = None
        self._start = bytearray()  # of a frame whose header is not complete
        self._owed = 0  # payload bytes still to be written
        self._written = 0
        self._accepted = 0
        self._delivered = 0
        self._leaving: deque[tuple[int, MessageSeen]] = deque()  # position of the end in the stream, message
        self._arriving: deque[tuple[int, MessageSeen]] = deque()

    def writing(self, data: memoryview) -> memoryview:
        before = self._current
        outside(self._cut, data)
        message = self._current
        if self._watch.rewrite is None or message is None:
            return data
        return self._watch.rewrite(message, data, message is not before)

    def accepted(self, count: int) -> None:
        self._accepted += count
        while self._leaving and self._leaving[0][0] <= self._accepted:
            outside(self._watch.left, self._leaving.popleft()[1])

    def delivered(self, count: int) -> None:
        self._delivered += count
        while self._arriving and self._arriving[0][0] <= self._delivered:
            outside(self._watch.arrived, self._arriving.popleft()[1])

    def _cut(self, data: memoryview) -> None:
        rest = data.cast("B")
        while rest.nbytes:
            if self._owed:
                count = min(self._owed, rest.nbytes)
                self._owed -= count
            else:
                count = self._take_start(rest)
            self._written += count
            rest = rest[count:]

    def _take_start(self, rest: memoryview) -> int:
        """Take what belongs to the start of a frame, as far as it is there; returns how many bytes."""
        wanted = HEAD.size
        before = len(self._start)
        if before < wanted:
            self._start += rest[: wanted - before]
        if len(self._start) < wanted:
            return len(self._start) - before
        kind, _flags, header_bytes, payload_bytes = HEAD.unpack_from(self._start)
        wanted += header_bytes
        taken = len(self._start) - before
        self._start += rest[taken : taken + wanted - len(self._start)]
        count = len(self._start) - before
        if len(self._start) == wanted:
            header = bytes(self._start[HEAD.size :])
            self._start.clear()
            self._owed = payload_bytes
            self._begin(kind, header, payload_bytes, end=self._written + count + payload_bytes)
        return count

    def _begin(self, kind: int, header: bytes, payload_bytes: int, *, end: int) -> None:
        name = _NAMES.get(kind, f"{kind:#04x}")
        if kind == Kind.OPEN:
            self._purpose = _purpose(header)
        message = self._watch.begun(
            self._source,
            target=self._target,
            stream=self._number,
            kind=name,
            purpose=self._purpose,
            content=_content(header) if kind == Kind.MESSAGE else "",
            header=header,
            payload_bytes=payload_bytes,
        )
        self._current = message
        self._leaving.append((end, message))
        self._arriving.append((end, message))


def _purpose(header: bytes) -> str:
    try:
        return decode_open(header)
    except RemoteProtocolError:  # a test sends what no peer would
        return ""


def _content(header: bytes) -> str:
    """The protocols of rounds and matchmaking send lists whose first item names the message, or a map with a name in it."""
    try:
        fields = unpack(header, what="message")
    except RemoteProtocolError:
        return ""
    first = fields[0] if isinstance(fields, list) and fields else None
    return first if isinstance(first, str) else ""
