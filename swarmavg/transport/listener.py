"""The listening side of a transport over byte streams: limits, a task per channel, and an orderly end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeAlias

from swarmavg.errors import AuthenticationError, ChannelError, PeerUnreachableError, SwarmError
from swarmavg.identifiers import Address, PeerId
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.channel import FramedChannel
from swarmavg.transport.connection import Connection
from swarmavg.transport.framing import encode_error
from swarmavg.transport.interface import OnChannel, TransportContext, TransportLimits

CLOSE_SECONDS: Final = 1.2
HANDLER_GRACE_SECONDS: Final = 0.2
"""How long a handler whose channel was aborted may take to notice before it is cancelled."""
CROWDED_SECONDS: Final = 1.0
"""How long a handshake may take while all that are allowed at once are under way and others may be waiting."""

Unbind: TypeAlias = Callable[[], Awaitable[None]]

log = get_logger("swarmavg.transport")


class InboundLedger:
    """Who uses how much of what one transport grants to those who dial it."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._channels: Counter[PeerId] = Counter()
        self._connections: Counter[PeerId] = Counter()
        self._handshakes = asyncio.Semaphore(limits.handshakes)
        self._greeting: dict[Connection, float] = {}  # since when; the oldest first

    async def slot(self) -> None:
        """Wait until one more handshake may begin. The slowest makes room: silent strangers must not keep members out."""
        while True:
            oldest = next(iter(self._greeting.values()), None)
            try:
                async with asyncio.timeout_at(None if oldest is None else oldest + CROWDED_SECONDS):
                    await self._handshakes.acquire()
            except TimeoutError:
                self._drop_slowest()
            else:
                return

    def unused_slot(self) -> None:
        self._handshakes.release()

    def begin_greeting(self, connection: Connection) -> None:
        """The use of a slot."""
        self._greeting[connection] = asyncio.get_running_loop().time()

    def end_greeting(self, connection: Connection) -> None:
        """Give the slot back, once."""
        if self._greeting.pop(connection, None) is not None:
            self._handshakes.release()

    def _drop_slowest(self) -> None:
        if self._greeting:
            slowest = next(iter(self._greeting))
            why = f"did not say who it is within {CROWDED_SECONDS:g} s, while {self._limits.handshakes} did so at once"
            slowest.fail_greeting(PeerUnreachableError(f"{slowest.where} {why}"))

    def refusal(self, peer: PeerId) -> tuple[str, str] | None:
        """Why `peer` may not open another channel, as code and reason."""
        limits = self._limits
        if self._channels.total() >= limits.channels:
            return "too-many-channels", f"all {limits.channels} channels are in use"
        if self._channels[peer] >= limits.channels_per_peer:
            return "too-many-channels", f"{peer.short} has {limits.channels_per_peer} channels open, the most allowed"
        return None

    def add(self, peer: PeerId) -> None:
        self._channels[peer] += 1

    def remove(self, peer: PeerId) -> None:
        _decrement(self._channels, peer)

    def connect(self, peer: PeerId) -> tuple[str, str] | None:
        """Count a connection; why it may not stay, as code and reason. Idle ones are allowed as many again as channels."""
        self._connections[peer] += 1
        most = 2 * self._limits.channels_per_peer
        if self._connections[peer] > most:
            return "too-many-connections", f"{peer.short} has {most} connections already, the most allowed"
        return None

    def disconnect(self, peer: PeerId) -> None:
        _decrement(self._connections, peer)


class StreamListener:
    """See `interface.Listener`. The owner of the connections accepted at one address."""

    def __init__(self, context: TransportContext, ledger: InboundLedger, on_channel: OnChannel) -> None:
        self._context = context
        self._ledger = ledger
        self._on_channel = on_channel
        self._address: Address | None = None
        self._unbind: Unbind | None = None
        self._forget: Callable[[StreamListener], None] = lambda _: None
        self._connections: dict[Connection, None] = {}  # in order, so that simulations repeat
        self._greeted: dict[Connection, PeerId] = {}
        self._counted: set[Connection] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[None] | None = None

    @property
    def context(self) -> TransportContext:
        return self._context

    @property
    def address(self) -> Address:
        if self._address is None:
            raise RuntimeError("the listener is not bound yet")
        return self._address

    async def aclose(self) -> None:
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = asyncio.get_running_loop().create_future()
        try:
            await self.stop_accepting()
            self._forget(self)
            await close_connections(self.connections, "the listener was closed")
            await self._end_handlers()
        finally:
            self._closing.set_result(None)

    # --- for the transport

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Every connection accepted here that is not gone yet."""
        return tuple(self._connections)

    async def stop_accepting(self) -> None:
        unbind, self._unbind = self._unbind, None
        if unbind is not None:
            await unbind()

    def bound_to(self, address: Address) -> None:
        self._address = address.with_peer(self._context.security.peer_id)

    def on_close(self, unbind: Unbind, forget: Callable[[StreamListener], None]) -> None:
        self._unbind, self._forget = unbind, forget

    async def slot(self) -> None:
        """Wait until one more connection may be accepted; `accept` must follow, or `unused_slot`."""
        await self._ledger.slot()

    def unused_slot(self) -> None:
        self._ledger.unused_slot()

    def accept(self, where: str) -> Connection:
        """A protocol for one accepted stream."""
        connection = Connection(self, dials=False, where=where)
        self._connections[connection] = None
        self._ledger.begin_greeting(connection)
        seconds = self._context.limits.handshake_timeout
        connection.set_timer(seconds, f"{where} did not say who it is within {seconds:g} s")
        if self._closing is not None:
            connection.leave()
        return connection

    # --- ConnectionOwner

    def refusal(self, connection: Connection) -> tuple[str, str] | None:
        return self._ledger.refusal(_peer_of(connection))

    def greeted(self, connection: Connection, error: SwarmError | None) -> None:
        self._ledger.end_greeting(connection)
        if error is None:
            self._greeted[connection] = peer = _peer_of(connection)
            refusal = self._ledger.connect(peer)
            if refusal is None:
                self._expect_use(connection)
            else:
                connection.leave(encode_error(*refusal))
        elif self._closing is None:
            tell = log.warning if isinstance(error, AuthenticationError) else log.info
            tell("inbound connection failed", address=connection.where, cause=str(error))

    def opened(self, connection: Connection, channel: FramedChannel) -> None:
        self._ledger.add(channel.peer)
        self._counted.add(connection)
        task = asyncio.get_running_loop().create_task(self._serve(channel), name=f"serve {channel.purpose}")
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    def idle(self, connection: Connection) -> None:
        self._uncount(connection)
        self._expect_use(connection)

    def lost(self, connection: Connection) -> None:
        self._uncount(connection)
        self._ledger.end_greeting(connection)
        peer = self._greeted.pop(connection, None)
        if peer is not None:
            self._ledger.disconnect(peer)
        self._connections.pop(connection, None)

    # --- inside

    async def _serve(self, channel: FramedChannel) -> None:
        """A handler's task, and the boundary that keeps its failures from everything else."""
        try:
            await self._on_channel(channel)
        except ChannelError as error:
            log.debug("channel ended", purpose=channel.purpose, peer=channel.peer.short, cause=str(error))
            channel.abort(str(error))
        except Exception:
            log.exception("channel handler failed", purpose=channel.purpose, peer=channel.peer.short)
            channel.abort("the handler failed")
        except BaseException:
            channel.abort("the handler was cancelled")
            raise
        await channel.aclose()

    async def _end_handlers(self) -> None:
        handlers = self._handlers - {asyncio.current_task()}
        if not handlers:
            return
        _, late = await asyncio.wait(handlers, timeout=HANDLER_GRACE_SECONDS)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=HANDLER_GRACE_SECONDS)

    def _expect_use(self, connection: Connection) -> None:
        """An idle connection is closed in the end, but by preference by the side that would use it."""
        if self._closing is not None:
            connection.leave()
            return
        limits = self._context.limits
        connection.set_timer(limits.idle_connection_timeout + limits.handshake_timeout, "idle")

    def _uncount(self, connection: Connection) -> None:
        if connection in self._counted:
            self._counted.discard(connection)
            self._ledger.remove(_peer_of(connection))


async def close_connections(connections: Iterable[Connection], reason: str) -> None:
    """Close connections: politely for at most `CLOSE_SECONDS`, then at once."""
    wired = [connection for connection in connections if connection.kill(reason)]
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            for connection in wired:
                await connection.finished.wait()
    except TimeoutError:
        for connection in wired:
            connection.cut()
        for connection in wired:
            await connection.finished.wait()


def _decrement(counter: Counter[PeerId], peer: PeerId) -> None:
    counter[peer] -= 1
    if not counter[peer]:
        del counter[peer]


def _peer_of(connection: Connection) -> PeerId:
    if connection.peer is None:
        raise RuntimeError("a connection that was not greeted has no peer")
    return connection.peer
