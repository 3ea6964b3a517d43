"""A channel as the user sees it, over a connection that carries frames: the contract of `interface.Channel`."""

from __future__ import annotations

from typing import Protocol

from swarmavg.errors import ChannelCancelledError, ChannelClosedError, ChannelError, LocalProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.transport.framing import encode_cancel, encode_error
from swarmavg.transport.inbox import Inbox, again
from swarmavg.transport.interface import END, MAX_HEADER_BYTES, Allocate, Buffer, End, Message


class Link(Protocol):
    """What a channel needs of the connection under it."""

    @property
    def last_received(self) -> float: ...

    @property
    def bytes_received(self) -> int:
        """On all channels so far, and for the greeting."""

    @property
    def message_limit(self) -> int:
        """The largest payload that the other side accepts."""

    @property
    def version(self) -> int:
        """The protocol version negotiated."""

    async def send_message(self, header: bytes, views: list[memoryview], payload_bytes: int) -> None: ...

    def send_end(self) -> None: ...

    def read_on(self) -> None:
        """There is a new use for bytes."""

    def drain(self) -> None:
        """Nobody reads this channel any more: throw away what comes until the other side ends too."""

    def release(self) -> None:
        """Both directions have ended: the connection is free for another channel."""

    def leave(self, parting: bytes) -> None:
        """Send a last frame, if the stream allows, and close the connection."""


class FramedChannel:
    """See `interface.Channel` for the meaning of every method. The first `bytes_before` bytes that the link received were
    not for this channel.
    """

    def __init__(self, link: Link, peer: PeerId, purpose: str, *, inbox_bytes: int, bytes_before: int) -> None:
        self._link: Link | None = link
        self._peer = peer
        self._purpose = purpose
        self._version = link.version
        self._last_received = link.last_received
        self._bytes_before = bytes_before
        self._bytes_received = 0  # final, once the link is gone
        self._inbox = Inbox(limit=inbox_bytes, wanted=self._read_on, broken=self.abort)
        self._failure: ChannelError | None = None
        self._sending = False
        self._ended_here = False
        self._ended_there = False
        self._let_go = False

    def __repr__(self) -> str:
        return f"<channel {self._purpose!r} with {self._peer.short}>"

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def purpose(self) -> str:
        return self._purpose

    @property
    def version(self) -> int:
        """The protocol version that both sides speak."""
        return self._version

    @property
    def last_received(self) -> float:
        return self._last_received if self._link is None else self._link.last_received

    @property
    def bytes_received(self) -> int:
        return self._bytes_received if self._link is None else self._bytes_on(self._link)

    @property
    def inbox(self) -> Inbox:
        """Where the connection puts what arrives."""
        return self._inbox

    @property
    def let_go(self) -> bool:
        """Whether this side has closed the channel, so that nobody reads it any more."""
        return self._let_go

    async def send(self, header: bytes, *payload: Buffer) -> None:
        link = self._sendable()
        views = [view for view in map(_bytes_of, payload) if view.nbytes]
        payload_bytes = sum(view.nbytes for view in views)
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"header must be at most {MAX_HEADER_BYTES} bytes, got {len(header)}")
        if payload_bytes > link.message_limit:
            raise ValueError(f"payload must be at most {link.message_limit} bytes, got {payload_bytes}")
        self._sending = True
        try:
            await link.send_message(header, views, payload_bytes)
        except ChannelError:
            raise self._why_not() from None
        finally:
            self._sending = False

    async def receive(self, allocate: Allocate | None = None) -> Message | End:
        return await self._inbox.receive(allocate)

    async def end(self) -> None:
        if self._ended_here:
            return
        self._sendable().send_end()
        self._ended_here = True
        self._release_if_over()

    async def aclose(self) -> None:
        if self._let_go:
            return
        if self._sending:
            self.abort("closed while sending")
            return
        self._let_go = True
        self._inbox.close(ChannelClosedError("this side closed the channel"))
        if self._link is None:
            self._failure = self._failure or ChannelClosedError("this side closed the channel")
            return
        if not self._ended_here:
            self._ended_here = True
            self._link.send_end()
        if not self._release_if_over():
            self._link.drain()

    def abort(self, reason: str = "", *, code: str = "") -> None:
        if self._let_go:
            return
        self._let_go = True
        error = ChannelClosedError(f"this side aborted the channel{': ' if reason else ''}{reason}")
        self._failure = self._failure or error
        self._inbox.close(error)
        link = self._detach()
        if link is not None:
            link.leave(encode_error(code, reason) if code else encode_cancel(reason))

    def ended(self) -> None:
        """The other side's end frame arrived."""
        self._ended_there = True
        self._inbox.finish(END)
        self._release_if_over()

    def failed(self, error: ChannelError) -> None:
        """The connection is of no use any more; what has arrived before is still delivered."""
        self._detach()
        if self._failure is None:
            self._failure = error
        self._inbox.finish(error)

    def nobody_reads(self) -> None:
        """The other side keeps sending after this side closed: tell it to stop."""
        link = self._detach()
        if link is not None:
            link.leave(encode_cancel("the receiver closed the channel"))

    @property
    def ended_there(self) -> bool:
        """Whether the other side has ended its direction."""
        return self._ended_there

    def _sendable(self) -> Link:
        if self._failure is not None:
            raise again(self._failure)
        if self._ended_here or self._let_go or self._link is None:
            raise ChannelClosedError("this side has ended the channel")
        if self._sending:
            raise LocalProtocolError("two tasks send on one channel at once")
        return self._link

    def _why_not(self) -> Exception:
        return again(self._failure or ChannelCancelledError())

    def _read_on(self) -> None:
        if self._link is not None:
            self._link.read_on()

    def _release_if_over(self) -> bool:
        if not (self._ended_here and self._ended_there):
            return False
        link = self._detach()
        if link is not None:
            link.release()
        return True

    def _detach(self) -> Link | None:
        link, self._link = self._link, None
        if link is not None:
            self._last_received = link.last_received
            self._bytes_received = self._bytes_on(link)
        return link

    def _bytes_on(self, link: Link) -> int:
        return link.bytes_received - self._bytes_before


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B")
