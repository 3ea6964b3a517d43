"""What a transport must do, and how it fails. Nothing here does I/O.

A **channel** is an ordered, bidirectional stream of messages between two authenticated peers, with back-pressure in
each direction. The dialling side opens it and names its **purpose**; the listening side is handed the open channel.
A **message** is a small header (opaque bytes, at most `MAX_HEADER_BYTES`) and an optional large payload.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from swarmavg.identifiers import Address, PeerId

MAX_HEADER_BYTES: Final = 64 * 1024 - 1
MAX_PURPOSE_CHARS: Final = 200

Buffer: TypeAlias = bytes | bytearray | memoryview


class End(enum.Enum):
    """Type of `END`, the value that `Channel.receive` returns once the other side ended its direction cleanly."""

    END = "end"


END: Final = End.END


@dataclass(frozen=True, slots=True)
class Message:
    """One received message. `payload` is the memory that `allocate` returned, filled; empty when there was none."""

    header: bytes
    payload: memoryview


Allocate: TypeAlias = Callable[[bytes, int], memoryview]
"""``allocate(header, payload_bytes)`` returns writable contiguous memory of exactly `payload_bytes` bytes.

It is called once per message that has a payload, inside the event loop, and must not block. An exception that it raises
breaks the channel and comes out of the `receive` in progress: that is how a receiver refuses a payload.
"""


class Channel(Protocol):
    """An open channel. One task may send while another receives; two tasks may not do the same thing at once.

    Cancelling a `send` or `receive` that has begun to move bytes leaves the channel fit only for `abort`.
    """

    @property
    def peer(self) -> PeerId:
        """Who is at the other end, proven by the transport."""

    @property
    def purpose(self) -> str:
        """What the dialling side opened it for."""

    @property
    def last_received(self) -> float:
        """`loop.time()` when any byte last arrived: a slow message that moves is not silence."""

    @property
    def bytes_received(self) -> int:
        """How many bytes have arrived since the channel was opened: frame headers count, and what there is of unfinished
        messages, read by `receive` or not. It never shrinks, and can be read after the end.
        """

    async def send(self, header: bytes, *payload: Buffer) -> None:
        """Send one message; the payload is the concatenation of the buffers.

        Returns when the memory of `payload` may be reused, which is how back-pressure reaches the caller. Buffers are
        C-contiguous and of any item format; they must not change before the call returns.

        Raises `ValueError` (header or payload over the limit: nothing was sent, the channel stays usable),
        `ChannelLostError`, `ChannelCancelledError`, `ChannelRefusedError` (the other side's word; it may arrive at any
        time), `ChannelViolationError`, `ChannelClosedError` (ours; also after `end`).
        """

    async def receive(self, allocate: Allocate | None = None) -> Message | End:
        """The next message, or `END`. Without `allocate`, fresh memory is used.

        Raises what `send` raises, and whatever `allocate` raised. After `END`, returns `END` again. Messages that
        arrived before the other side's error or loss are still delivered first.
        """

    async def end(self) -> None:
        """End this side's direction; the other side's `receive` returns `END`. Receiving goes on. Idempotent."""

    async def aclose(self) -> None:
        """End this side's direction and let go of the channel. Bounded; never raises for the other side's doing.

        When both directions have ended cleanly the transport may reuse the connection for another channel. Unread
        messages are discarded. Idempotent.
        """

    def abort(self, reason: str = "", *, code: str = "") -> None:
        """Drop the channel now, without waiting. The other side gets a cancel with `reason`, or, when `code` is given,
        `ChannelRefusedError(code, reason)`; both as far as the connection still allows. Pending calls of this side raise
        `ChannelClosedError`. Idempotent; a no-op after `aclose`.
        """


OnChannel: TypeAlias = Callable[[Channel], Awaitable[None]]
"""Called by a listener, in a task of its own, for each channel opened to it. The channel is aborted if it raises, and
closed, if it is still open, when it returns."""


class Listener(Protocol):
    """A bound address that accepts channels."""

    @property
    def address(self) -> Address:
        """The bound address: real port, host as given, with the own peer id."""

    async def aclose(self) -> None:
        """Stop listening and abort every channel accepted here. Idempotent, bounded."""


class Transport(Protocol):
    """One way to reach peers: a factory of listeners and channels. Found by its URL scheme (see `registry`)."""

    @property
    def scheme(self) -> str:
        """Its URL scheme, such as ``tcp``."""

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        """Bind and accept. Raises `ListenError` that names address and cause, `SecurityError` for what may not be bound
        (plaintext beyond loopback).
        """

    async def dial(self, address: Address, *, purpose: str, expect: PeerId | None = None, timeout: float) -> Channel:
        """Open a channel to whoever listens at `address`; with `expect`, only to that peer.

        `timeout`, in seconds, bounds the whole call, and expiry is `PeerUnreachableError`. Also raises
        `PeerUnreachableError` (nobody there), `AuthenticationError` (wrong swarm, wrong peer, expired or missing
        certificate, plaintext meets TLS: the message says which), `ChannelRefusedError` (they have no room).
        """

    async def aclose(self) -> None:
        """Close pooled connections, listeners and channels. Idempotent, bounded by 2 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """What one process grants its peers, for one transport. Times in seconds, sizes in bytes."""

    channels: int = 4096
    """Open inbound channels in total."""
    channels_per_peer: int = 64
    """Open inbound channels of one peer."""
    handshakes: int = 64
    """Inbound connections at once that have not proven who they are; more wait in the backlog, for which the slowest of
    them is dropped after a second."""
    handshake_timeout: float = 10.0
    """An inbound connection that has not finished its hello by then is dropped."""
    message_bytes: int = 64 * 1024 * 1024
    """Largest payload of one message that this side accepts. Both sides tell each other; the sender's check uses the
    receiver's limit."""
    buffered_bytes: int = 256 * 1024
    """Bytes read ahead per channel while nobody receives; then the sender is held back."""
    idle_connection_timeout: float = 60.0
    """A pooled connection unused for this long is closed."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")


class ChannelSecurity(Protocol):
    """How this peer proves who it is and checks others; implemented by `swarmavg.security`, used by transports.

    A swarm without a token has no certificates (`server_context()` returns `None`): ids are then claimed, not proven, and
    transports must refuse to bind or dial anything but loopback unless `insecure` is set.
    """

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def swarm_id(self) -> bytes:
        """32 bytes that every member of the swarm knows: sent in the hello, a mismatch is `AuthenticationError`."""

    @property
    def accepted_swarm_ids(self) -> tuple[bytes, ...]:
        """The swarm ids that others may name: `swarm_id`, and a second one while the swarm changes its token."""

    @property
    def insecure(self) -> bool:
        """Whether plaintext beyond loopback was explicitly allowed."""

    def server_context(self) -> object | None:
        """An `ssl.SSLContext` for accepting (fresh certificate whenever the last nears its end), or `None` = plaintext."""

    def client_context(self) -> object | None:
        """The same for dialling."""

    def peer_of(self, certificate: bytes) -> PeerId:
        """The id in a verified DER certificate. Raises `AuthenticationError` when it may not be here (deny list, expiry)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """What a transport's factory (the entry point) is given: ``factory(context) -> Transport``."""

    security: ChannelSecurity
    limits: TransportLimits
