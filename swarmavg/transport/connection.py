"""One connection: greets, then carries one channel after another, as frames over any asyncio-like byte transport.

The byte transport ("wire") may be a socket's, a TLS layer's or the in-process network's; this file knows none of them. It
must not decide whom to dial, how many channels are allowed, or when an idle connection is reused: its owner does.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Final, Protocol, cast

from swarmavg.errors import (
    ChannelCancelledError,
    ChannelError,
    ChannelLostError,
    ChannelRefusedError,
    ChannelViolationError,
    ClosedError,
    PeerUnreachableError,
    RemoteProtocolError,
    SwarmError,
)
from swarmavg.identifiers import PeerId
from swarmavg.transport import framing
from swarmavg.transport.channel import FramedChannel
from swarmavg.transport.framing import Frame, Hello, Kind
from swarmavg.transport.greeting import GreetingError, check_hello, check_peer, not_a_peer, refused
from swarmavg.transport.intake import Intake
from swarmavg.transport.interface import TransportContext
from swarmavg.transport.outbox import Outbox, retrieve

LINGER_SECONDS: Final = 1.0
"""A connection that is being left is closed after this long, read by the other side or not."""
DRAIN_SECONDS: Final = 5.0
DRAIN_BYTES: Final = 1024 * 1024
"""After a close, so much is thrown away before the other side is told to stop sending."""


class State(enum.Enum):
    """Where a connection stands."""

    GREETING = "greeting"
    IDLE = "idle"
    OPENING = "opening"
    ACTIVE = "active"
    LEAVING = "leaving"
    CLOSED = "closed"


class ConnectionOwner(Protocol):
    """Who decides. None of these calls may block."""

    @property
    def context(self) -> TransportContext: ...

    def refusal(self, connection: Connection) -> tuple[str, str] | None:
        """Why no further channel of this peer is accepted, as code and reason, or `None`."""

    def opened(self, connection: Connection, channel: FramedChannel) -> None:
        """The other side opened a channel."""

    def greeted(self, connection: Connection, error: SwarmError | None) -> None:
        """The other side has said, and proven, who it is; or it has failed to."""

    def idle(self, connection: Connection) -> None:
        """The channel is over, and the connection can carry another."""

    def lost(self, connection: Connection) -> None:
        """The connection is gone."""


class Connection(asyncio.BufferedProtocol):
    """See the module. `where` names the other side's address in messages."""

    def __init__(self, owner: ConnectionOwner, *, dials: bool, where: str, expect: PeerId | None = None) -> None:
        self.where = where
        self.peer: PeerId | None = None
        self.version = 0
        self.message_limit = 0
        self.last_received = 0.0
        self.bytes_received = 0
        self.state = State.GREETING
        self.channel: FramedChannel | None = None
        self.finished = asyncio.Event()
        self.expect = expect
        self._owner = owner
        self._dials = dials
        self._proven: PeerId | None = None
        self._loop = asyncio.get_running_loop()
        self._wire: asyncio.Transport | None = None
        self._below: asyncio.Transport | None = None
        self._intake = Intake(max_payload=owner.context.limits.message_bytes, handle=self._handle)
        self._outbox = Outbox()
        self._purpose = ""
        self._opening: asyncio.Future[FramedChannel] | None = None
        self._failure: SwarmError | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- what the owner calls

    @property
    def wired(self) -> bool:
        """Whether there is, or was, something to close; then `finished` follows."""
        return self._wire is not None or self._below is not None

    async def open(self, purpose: str) -> FramedChannel:
        """Open a channel, on a connection that is new or idle. Raises what `Transport.dial` raises, and
        `PeerUnreachableError` when the connection turns out to be dead.
        """
        if self._failure is not None:
            raise self._failure
        if self.state in (State.LEAVING, State.CLOSED):
            raise PeerUnreachableError(f"the connection with {self._who()} is closed")
        self._purpose = purpose
        opening: asyncio.Future[FramedChannel] = self._loop.create_future()
        self._opening = opening
        if self.state is State.IDLE or self._proven is not None:
            self._send_open()
        try:
            return await opening
        except asyncio.CancelledError:
            self.leave(framing.encode_cancel("the dial was given up"))
            raise
        finally:
            self._opening = None
            retrieve(opening)

    def set_timer(self, seconds: float, reason: str) -> None:
        """Close the connection after `seconds`, unless the timer is stopped or set anew."""
        self.stop_timer()
        self._timer = self._loop.call_later(seconds, self._expired, reason)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self, parting: bytes = b"") -> None:
        """Send a last frame, if the stream allows, and close; what still arrives is thrown away."""
        if self.state in (State.LEAVING, State.CLOSED):
            return
        self.state = State.LEAVING
        self._intake.stop()
        self.channel = None
        self.stop_timer()
        self._outbox.fail(ChannelLostError("the connection is being closed"))
        if self._wire is None:
            if self._below is not None:
                self._below.close()
            return
        if self._outbox.inside_message:
            self._wire.abort()
            return
        self.set_timer(LINGER_SECONDS, "")
        if not parting:
            self._wire.close()
            return
        self._wire.write(parting)
        say_eof(self._wire)

    def attach(self, transport: asyncio.Transport) -> None:
        """Name the wire before it is ready for use, so that the connection can be given up meanwhile."""
        self._below = transport
        if self.state is not State.GREETING:
            transport.close()

    def kill(self, reason: str) -> bool:
        """Give up whatever goes on and close. Returns whether there is anything to wait for, by `finished`."""
        self._fail_open(ClosedError(reason))
        if self.channel is not None:
            self.channel.abort(reason)
        self.leave()
        return self.wired

    def cut(self) -> None:
        """Close without waiting for anybody."""
        wire = self._wire or self._below
        if wire is not None:
            wire.abort()

    # --- what the wire calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = wire = cast(asyncio.Transport, transport)
        self.last_received = self._loop.time()
        if self.state is not State.GREETING:  # given up meanwhile
            wire.abort()
            return
        self._outbox.attach(wire)
        self._intake.attach(wire)
        self._proven = wire.get_extra_info("swarmavg_peer")
        security, limits = self._owner.context.security, self._owner.context.limits
        if self._dials and self._proven is not None:
            try:
                check_peer(self._proven, self.expect, self.where)
            except GreetingError as error:
                self.fail_greeting(error)
                return
        wire.write(Hello(security.peer_id, security.swarm_id, limits.message_bytes).encode())
        if self._dials and self._proven is not None and self._opening is not None:
            self._send_open()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (asyncio passes it by position)
        return self._intake.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_received = self._loop.time()
        self.bytes_received += nbytes
        self._intake.received(nbytes)
        self.read_on()
        if self._intake.exhausted and self.channel is not None:
            self.channel.nobody_reads()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        before, self.state = self.state, State.CLOSED
        self.stop_timer()
        why = f"{type(exc).__name__}: {exc}" if exc is not None else "closed by the other side"
        lost = ChannelLostError(f"connection with {self._who()} lost ({why})")
        if self.channel is not None:
            channel, self.channel = self.channel, None
            channel.failed(lost)
        self._outbox.fail(lost)
        gone = exc if isinstance(exc, SwarmError) else PeerUnreachableError(f"{self.where} closed the connection ({why})")
        if before is State.GREETING:
            self._failure = self._failure or gone
            self._owner.greeted(self, self._failure)
        self._fail_open(self._failure or gone)
        self._owner.lost(self)
        self.finished.set()

    def pause_writing(self) -> None:
        """Asked of the wire where it matters: see `Outbox`."""

    def resume_writing(self) -> None:
        self._outbox.drained()

    # --- what the channel calls (see `channel.Link`)

    async def send_message(self, header: bytes, views: list[memoryview], payload_bytes: int) -> None:
        await self._outbox.send_message(header, views, payload_bytes)

    def send_end(self) -> None:
        self._outbox.write(framing.encode(Kind.END))

    def read_on(self) -> None:
        try:
            self._intake.take_frames()
        except (ChannelViolationError, RemoteProtocolError) as error:
            self._violated(ChannelViolationError(str(error)))

    def drain(self) -> None:
        self.set_timer(DRAIN_SECONDS, "the receiver closed the channel")
        self._intake.discard(DRAIN_BYTES)

    def release(self) -> None:
        self.channel = None
        self.stop_timer()
        self.state = State.IDLE
        self._owner.idle(self)

    # --- frames

    def _handle(self, frame: Frame, payload: memoryview) -> None:
        if self.peer is None:
            self._greet(frame)
            return
        match frame.kind:
            case Kind.MESSAGE if self.channel is not None:
                self.channel.inbox.put(frame.header, payload)
            case Kind.OPEN:
                self._on_open(framing.decode_open(frame.header))
            case Kind.END if self.channel is not None and not self.channel.ended_there:
                self._intake.end()
                self.channel.ended()
            case Kind.ERROR if self.state is State.IDLE and not self._dials:  # our hello was not to its liking
                self.fail_greeting(refused(*framing.decode_error(frame.header), self.where))
            case Kind.ERROR:
                self._ended_by_them(ChannelRefusedError(*framing.decode_error(frame.header)))
            case Kind.CANCEL:
                self._ended_by_them(ChannelCancelledError(framing.decode_cancel(frame.header)))
            case _:
                raise ChannelViolationError(f"a {frame.kind.name} frame out of place")

    def _on_open(self, purpose: str) -> None:
        if self._dials:
            if self.state is not State.OPENING:
                raise ChannelViolationError("an OPEN frame out of place")
            channel = self._begin(purpose)
            if self._opening is not None and not self._opening.done():
                self._opening.set_result(channel)
            return
        if self.state is not State.IDLE:
            raise ChannelViolationError("a channel was opened before the last one had ended")
        refusal = self._owner.refusal(self)
        if refusal is not None:
            self.leave(framing.encode_error(*refusal))
        elif self._wire is not None:
            self._wire.write(framing.encode_open(purpose))
            self._owner.opened(self, self._begin(purpose))

    def _begin(self, purpose: str) -> FramedChannel:
        if self.peer is None:
            raise RuntimeError("a channel needs a peer")
        self.stop_timer()
        self.state = State.ACTIVE
        inbox_bytes, before = self._owner.context.limits.buffered_bytes, self.bytes_received - self._intake.unread
        self.channel = FramedChannel(self, self.peer, purpose, inbox_bytes=inbox_bytes, bytes_before=before)
        self._intake.begin(self.channel.inbox)
        return self.channel

    # --- greeting

    def _greet(self, frame: Frame) -> None:
        if frame.kind is Kind.ERROR:
            self.fail_greeting(refused(*framing.decode_error(frame.header), self.where))
            return
        if frame.kind is not Kind.HELLO:
            raise ChannelViolationError(f"a {frame.kind.name} frame before the hello")
        hello = Hello.decode(frame.header)
        security = self._owner.context.security
        try:
            self.version = check_hello(hello, where=self.where, security=security, expect=self.expect, proven=self._proven)
        except GreetingError as error:
            self.fail_greeting(error)
            return
        self.peer, self.message_limit = hello.peer, min(hello.message_bytes, framing.MAX_PAYLOAD_BYTES)
        self.stop_timer()
        if self.state is State.GREETING:
            self.state = State.IDLE
        self._owner.greeted(self, None)
        if self._opening is not None and self.state is State.IDLE:
            self._send_open()

    def _send_open(self) -> None:
        if self._wire is not None and self.state in (State.GREETING, State.IDLE):
            self.state = State.OPENING
            self._wire.write(framing.encode_open(self._purpose))

    def fail_greeting(self, error: SwarmError) -> None:
        """The other side is not, or cannot prove to be, who it should be. After the greeting: the channel is lost."""
        if self.state is State.ACTIVE and self.channel is not None:
            self.channel.failed(ChannelLostError(f"connection with {self._who()} lost ({error})"))
        self._failure = error
        self._fail_open(error)
        self._owner.greeted(self, error)
        self.leave(error.farewell if isinstance(error, GreetingError) else b"")

    # --- endings

    def _ended_by_them(self, error: ChannelError) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.failed(error)
        self._fail_open(error)
        self.leave()

    def _violated(self, error: ChannelViolationError) -> None:
        if self.peer is None:
            self.fail_greeting(not_a_peer(error, self.where))
            return
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.failed(error)
        self._fail_open(error)
        self.leave(framing.encode_cancel(f"protocol violation: {error}"))

    def _fail_open(self, error: Exception) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.set_exception(error)

    def _expired(self, reason: str) -> None:
        self._timer = None
        if self.state is State.LEAVING:
            if self._wire is not None:
                self._wire.abort()
        elif self.channel is not None:
            self.channel.nobody_reads()
        elif self.state is State.GREETING:
            self.fail_greeting(PeerUnreachableError(reason))
        else:
            self.leave()

    def _who(self) -> str:
        return f"{self.peer.short} at {self.where}" if self.peer is not None else self.where


def say_eof(wire: asyncio.Transport) -> None:
    """Tell the other side that nothing follows, where the wire can and still lives."""
    if wire.can_write_eof():
        try:
            wire.write_eof()
        except OSError:  # the socket is dead, and the wire has not noticed yet
            wire.abort()
