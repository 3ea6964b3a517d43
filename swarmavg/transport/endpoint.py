"""What all transports over byte streams share: dialling, a pool of idle connections, and an orderly end.

A backend brings two things: `_connect` (a connection to an address) and `_bind` (a bound place that accepts them).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from swarmavg.errors import ChannelCancelledError, ClosedError, PeerUnreachableError, SecurityError, SwarmError
from swarmavg.identifiers import Address, PeerId
from swarmavg.transport.channel import FramedChannel
from swarmavg.transport.connection import Connection, State
from swarmavg.transport.framing import encode_open
from swarmavg.transport.interface import OnChannel, TransportContext
from swarmavg.transport.listener import InboundLedger, StreamListener, Unbind, close_connections


class StreamTransport(ABC):
    """Base of transports whose channels are framed streams. See `interface.Transport`."""

    scheme: str

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._closed = False
        self._dialled: dict[Connection, Address] = {}
        self._pool: dict[Address, list[Connection]] = {}
        self._listeners: dict[StreamListener, None] = {}
        self._ledger = InboundLedger(context.limits)

    @property
    def context(self) -> TransportContext:
        return self._context

    @property
    def plaintext(self) -> bool:
        """Whether connections are neither private nor proven."""
        return self._context.security.client_context() is None

    # --- Transport

    async def listen(self, address: Address, on_channel: OnChannel) -> StreamListener:
        self._check_usable(address, "listen on")
        listener = StreamListener(self._context, self._ledger, on_channel)
        unbind = await self._bind(address, listener)
        listener.on_close(unbind, self._forget)
        self._listeners[listener] = None
        return listener

    async def dial(self, address: Address, *, purpose: str, expect: PeerId | None = None, timeout: float) -> FramedChannel:
        self._check_usable(address, "dial")
        encode_open(purpose)  # raises for a purpose that cannot be sent
        if address.port == 0:
            raise PeerUnreachableError(f"cannot dial {address}: port 0 is for listening")
        expect = expect or address.peer_id
        try:
            async with asyncio.timeout(timeout):
                return await self._dial(address.with_peer(None), purpose, expect, timeout)
        except TimeoutError:
            raise PeerUnreachableError(f"no answer from {address} within {timeout:g} s") from None
        except ChannelCancelledError as error:
            raise PeerUnreachableError(f"{address} gave up: {error}") from None

    async def aclose(self) -> None:
        self._closed = True
        listeners = list(self._listeners)
        for listener in listeners:
            await listener.stop_accepting()
        accepted = [connection for listener in listeners for connection in listener.connections]
        await close_connections([*self._dialled, *accepted], "the transport was closed")
        for listener in listeners:
            await listener.aclose()

    def cut(self) -> None:
        """Close every socket at once and say nothing, as when the process dies. For tests of those at the other end."""
        self._closed = True
        for connection in [*self._dialled, *(c for listener in self._listeners for c in listener.connections)]:
            connection.cut()

    # --- for the backend

    @abstractmethod
    async def _connect(self, address: Address, connection: Connection) -> None:
        """Open a stream to `address` with `connection` as its protocol. Raises `PeerUnreachableError`."""

    @abstractmethod
    async def _bind(self, address: Address, listener: StreamListener) -> Unbind:
        """Give `listener` its bound address and the streams that come there. Returns how to stop that.

        Raises `ListenError`.
        """

    # --- ConnectionOwner, for dialled connections

    def refusal(self, connection: Connection) -> tuple[str, str] | None:
        raise NotImplementedError("a dialled connection accepts no channels")

    def opened(self, connection: Connection, channel: FramedChannel) -> None:
        raise NotImplementedError("a dialled connection accepts no channels")

    def greeted(self, connection: Connection, error: SwarmError | None) -> None:  # noqa: B027  (nothing to do is correct)
        """The dial in progress is told by the connection itself."""

    def idle(self, connection: Connection) -> None:
        if self._closed:
            connection.leave()
            return
        self._pool.setdefault(self._dialled[connection], []).append(connection)
        connection.set_timer(self._context.limits.idle_connection_timeout, "idle")

    def lost(self, connection: Connection) -> None:
        key = self._dialled.pop(connection, None)
        if key is not None and connection in self._pool.get(key, ()):
            self._pool[key].remove(connection)
            if not self._pool[key]:
                del self._pool[key]

    # --- dialling

    async def _dial(self, address: Address, purpose: str, expect: PeerId | None, timeout: float) -> FramedChannel:
        while (pooled := self._take_pooled(address, expect)) is not None:
            try:
                async with asyncio.timeout(timeout / 3):  # leave time for a fresh connection
                    return await pooled.open(purpose)
            except (PeerUnreachableError, ChannelCancelledError, TimeoutError):
                continue
        connection = Connection(self, dials=True, where=str(address), expect=expect)
        self._dialled[connection] = address
        try:
            await self._connect(address, connection)
            return await connection.open(purpose)
        except BaseException:  # whatever ends the dial, the connection must not outlive it
            connection.leave()
            if not connection.wired:
                self.lost(connection)
            raise

    def _take_pooled(self, address: Address, expect: PeerId | None) -> Connection | None:
        """The most recently used idle connection to the address."""
        pooled = self._pool.get(address, [])
        for connection in reversed(pooled):
            if connection.state is State.IDLE and expect in (None, connection.peer):
                pooled.remove(connection)
                connection.stop_timer()
                return connection
        return None

    def _forget(self, listener: StreamListener) -> None:
        self._listeners.pop(listener, None)

    def _check_usable(self, address: Address, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {what} {address}: the transport is closed")
        if address.scheme != self.scheme:
            raise ValueError(f"address must have scheme {self.scheme!r}, got {str(address)!r}")
        if self.plaintext and not address.is_loopback and not self._context.security.insecure:
            raise SecurityError(
                f"will not {what} {address} in plaintext: only loopback addresses are allowed without a token, "
                "unless insecure=True"
            )
