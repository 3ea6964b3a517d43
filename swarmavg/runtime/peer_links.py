"""Small messages to and from many peers over channels of one purpose: dialled on demand, used both ways, closed when idle.

Delivery is in order per channel and not guaranteed: what cannot be delivered is reported, and repeating is the protocol's
business. One slow or broken peer costs the others nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from swarmavg.errors import ChannelError, DialError, RemoteProtocolError, TransportError
from swarmavg.identifiers import PeerId
from swarmavg.runtime.channels import ChannelHub
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.interface import END, Channel

_log = get_logger("swarmavg.matchmaking")

MAX_WAITING: Final = 256
"""Messages to one peer that may wait; a peer that takes none while so many pile up has failed."""
_GOODBYE: Final = 1.0
"""Seconds in which, on close, waiting messages may still go out."""


@dataclass(slots=True)
class _Link:
    """One peer: what waits for it, and the open channels with it, the newest last."""

    waiting: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    channels: list[Channel] = field(default_factory=list)
    sender: asyncio.Task[None] | None = None


class PeerLinks:
    """The links of one purpose. All callbacks are made inside the event loop.

    `on_message(peer, header, payload)` may raise `RemoteProtocolError`: the channel is then broken off and the peer reported.
    `on_failed(peer, reason)`: what waited for the peer is dropped. `on_lost(peer)`: a channel died; the peer may be alive.
    `limit(header)` says how many bytes of payload a message may have.
    """

    def __init__(
        self,
        hub: ChannelHub,
        purpose: str,
        *,
        timeout: float,
        limit: Callable[[bytes], int],
        on_message: Callable[[PeerId, bytes, bytes], None],
        on_failed: Callable[[PeerId, str], None],
        on_lost: Callable[[PeerId], None],
    ) -> None:
        self._hub = hub
        self._purpose = purpose
        self._timeout = timeout
        self._idle = max(10.0, 3 * timeout)
        self._limit = limit
        self._on_message = on_message
        self._on_failed = on_failed
        self._on_lost = on_lost
        self._links: dict[PeerId, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[Channel, None] = {}  # in order, so that simulations repeat
        self._unserve: Callable[[], None] | None = None
        self._closed = False

    def start(self) -> None:
        """Accept channels from now on. Raises `ValueError` when somebody else serves this purpose."""
        self._unserve = self._hub.serve(self._purpose, self._handle)

    def send(self, peer: PeerId, header: bytes, payload: bytes) -> None:
        """Put a message on its way. Returns at once and reports failures later."""
        if self._closed:
            return
        link = self._links.setdefault(peer, _Link())
        if len(link.waiting) >= MAX_WAITING:
            link.waiting.clear()
            asyncio.get_running_loop().call_soon(self._on_failed, peer, f"does not take messages: {MAX_WAITING} were waiting")
        link.waiting.append((header, payload))
        link.news.set()
        self._ensure_sender(peer, link)

    async def aclose(self) -> None:
        """Send what waits, within a second, and close every channel. Bounded; never raises for the others' doing."""
        if self._unserve is not None:
            self._unserve()
            self._unserve = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE):
                while any(link.waiting for link in self._links.values()):  # noqa: ASYNC110  (bounded, and many to wait for)
                    await asyncio.sleep(0.01)
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(channel.aclose() for channel in self._open))
        self._open.clear()
        self._links.clear()

    # ---- sending

    async def _send_all(self, peer: PeerId, link: _Link) -> None:
        while True:
            if not link.waiting:
                link.news.clear()
                if not await self._is_wanted(peer, link):
                    return
                continue
            header, payload = link.waiting[0]
            try:
                await self._deliver(peer, link, header, payload)
            except TransportError as error:
                link.waiting.clear()
                self._on_failed(peer, _reason(error))
                continue
            if link.waiting and link.waiting[0] == (header, payload):
                link.waiting.popleft()

    async def _is_wanted(self, peer: PeerId, link: _Link) -> bool:
        """Wait for the next message. False when the link was idle for so long that it is closed."""
        try:
            async with asyncio.timeout(self._idle):
                await link.news.wait()
        except TimeoutError:
            pass
        else:
            return True
        now = asyncio.get_running_loop().time()
        if any(now - channel.last_received < self._idle for channel in link.channels):
            return True
        channels, link.channels, link.sender = link.channels, [], None
        if self._links.get(peer) is link:
            del self._links[peer]
        for channel in channels:
            with suppress(ChannelError, TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await channel.end()  # the reader takes what is under way, and closes at the other side's end
        return False

    async def _deliver(self, peer: PeerId, link: _Link, header: bytes, payload: bytes) -> None:
        """Over a channel that is open; a stale one is replaced once."""
        if link.channels:
            channel = link.channels[-1]
            try:
                await self._send_on(channel, header, payload)
            except ChannelError:
                self._forget(peer, channel)
            else:
                return
        await self._send_on(await self._channel(peer, link), header, payload)

    async def _send_on(self, channel: Channel, header: bytes, payload: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await channel.send(header, *([payload] if payload else []))
        except TimeoutError:
            channel.abort("does not take messages")
            raise DialError(f"does not take messages: one waited for {self._timeout} s") from None

    async def _channel(self, peer: PeerId, link: _Link) -> Channel:
        """Dial, unless the peer opens a channel to us in the meantime. Raises `DialError` kinds."""
        if link.channels:
            return link.channels[-1]
        loop = asyncio.get_running_loop()
        link.news.clear()
        dial = loop.create_task(
            self._hub.open_channel(peer, self._purpose, timeout=self._timeout), name=f"match-dial-{peer.short}"
        )
        try:
            while not dial.done() and not link.channels:
                news = loop.create_task(link.news.wait(), name=f"match-news-{peer.short}")
                try:
                    await asyncio.wait({dial, news}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                link.news.clear()
        finally:
            if not dial.done():
                dial.cancel()
        if dial.cancelled() or not dial.done():
            await asyncio.gather(dial, return_exceptions=True)
            return link.channels[-1]
        channel = dial.result()
        self._adopt(link, channel)
        self._spawn(self._read(peer, channel), f"match-read-{peer.short}")
        return channel

    def _ensure_sender(self, peer: PeerId, link: _Link) -> None:
        if link.sender is None:
            link.sender = self._spawn(self._send_all(peer, link), f"match-send-{peer.short}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a matchmaking link broke", task=task.get_name(), exc_info=error)

    # ---- receiving

    async def _handle(self, channel: Channel) -> None:
        """An inbound channel, for as long as it lasts."""
        link = self._links.setdefault(channel.peer, _Link())
        self._adopt(link, channel)
        self._ensure_sender(channel.peer, link)  # it also closes the link when it is idle
        await self._read(channel.peer, channel)

    async def _read(self, peer: PeerId, channel: Channel) -> None:
        def allocate(header: bytes, size: int) -> memoryview:
            if size > self._limit(header):
                raise RemoteProtocolError(f"a payload of {size} bytes is too large for this message")
            return memoryview(bytearray(size))

        try:
            while (message := await channel.receive(allocate)) is not END:
                self._on_message(peer, message.header, bytes(message.payload))
        except RemoteProtocolError as error:
            _log.warning("malformed matchmaking message", peer=peer.short, reason=str(error))
            channel.abort(str(error), code="malformed")
            self._forget(peer, channel)
            self._open.pop(channel, None)
            self._on_failed(peer, f"broke the protocol: {error}")
        except ChannelError:
            self._forget(peer, channel)
            self._open.pop(channel, None)
            if not self._closed:
                self._on_lost(peer)
        else:
            self._forget(peer, channel)
            await channel.aclose()
            self._open.pop(channel, None)

    def _adopt(self, link: _Link, channel: Channel) -> None:
        self._open[channel] = None
        link.channels.append(channel)
        link.news.set()

    def _forget(self, peer: PeerId, channel: Channel) -> None:
        link = self._links.get(peer)
        if link is not None and channel in link.channels:
            link.channels.remove(channel)


def _reason(error: TransportError) -> str:
    return f"could not be reached: {str(error) or type(error).__name__}"
