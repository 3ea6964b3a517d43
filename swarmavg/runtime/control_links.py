"""Control channels of one round: at most one in use per pair of members, opened on demand, kept alive by heartbeats.

They carry the messages of the round's machine. What cannot be delivered is reported to the machine, which decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import MAX_CONTROL_BYTES, ControlMessage, Term, decode_control, encode_control
from swarmavg.protocol.round_events import ControlLost, ControlUp, MessageCame, RoundEvent
from swarmavg.protocol.round_messages import ChannelKind
from swarmavg.runtime.patience import Patience
from swarmavg.runtime.round_link import Link, LinkFailedError, send_payload
from swarmavg.transport.interface import END, Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange

MAX_QUEUED = 256
"""Messages kept for a member that has yet to open its channel."""


class ControlLinks:
    """The control channels of one member, by the other's position."""

    def __init__(self, exchange: Exchange, feed: Callable[[RoundEvent], None]) -> None:
        self._exchange = exchange
        self._feed = feed
        self._links: dict[int, list[_ControlLink]] = {}
        self._waiting: dict[int, deque[tuple[bytes, bytes]]] = {}
        self._dialling: set[int] = set()
        self._closed = False

    def send(self, to: int, term: Term, message: ControlMessage) -> None:
        """Queue a message; opens a channel if there is none and the member accepts channels."""
        encoded = encode_control(term, message)
        links = self._links.get(to)
        if links:
            links[-1].send(encoded)
            return
        queue = self._waiting.setdefault(to, deque(maxlen=MAX_QUEUED))
        queue.append(encoded)
        self.open(to)

    def open(self, member: int) -> None:
        """Have a channel with this member, if it accepts any."""
        exchange = self._exchange
        if self._closed or self._links.get(member) or member in self._dialling:
            return
        if exchange.group.members[member].role.leads:
            self._dialling.add(member)
            link = _ControlLink(exchange, self, dialler=exchange.position, server=member)
            link.task = exchange.spawn(self._dial(link), f"round-control-{member}")

    async def serve(self, channel: Channel, member: int) -> None:
        """Handle a channel that another member opened, until its end."""
        link = _ControlLink(self._exchange, self, dialler=member, server=self._exchange.position)
        await self._run(link, channel)

    def tick(self, now: float) -> None:
        """Give up channels on which nothing comes."""
        for link in [link for links in self._links.values() for link in links]:
            link.judge(now)

    def forgive(self, seconds: float) -> None:
        for link in [link for links in self._links.values() for link in links]:
            link.forgive(seconds)

    def heard(self, member: int, since: float) -> bool:
        return any(link.channel and link.channel.last_received > since for link in self._links.get(member, ()))

    @property
    def busy(self) -> bool:
        """Whether any channel is still open."""
        return any(self._links.values())

    def close(self) -> None:
        """Send what is queued, end all channels, open none any more."""
        self._closed = True
        for links in self._links.values():
            for link in links:
                link.finish()

    def abort(self, reason: str) -> None:
        self._closed = True
        for links in self._links.values():
            for link in links:
                if link.channel is not None:
                    link.channel.abort(reason)

    # For the links

    def take(self, sender: int, header: bytes, payload: memoryview) -> None:
        term, message = decode_control(header, payload, parts=len(self._exchange.plan.owners))
        self._feed(MessageCame(sender, term, message))

    async def _dial(self, link: _ControlLink) -> None:
        try:
            channel = await link.dial(ChannelKind.CONTROL)
        except LinkFailedError as failure:
            self._dialling.discard(link.other)
            self._lost(link.other, failure)
            return
        finally:
            self._dialling.discard(link.other)
        await self._run(link, channel)

    async def _run(self, link: _ControlLink, channel: Channel) -> None:
        link.channel = channel
        links = self._links.setdefault(link.other, [])
        links.append(link)
        for encoded in self._waiting.pop(link.other, ()):
            link.send(encoded)
        self._feed(ControlUp(link.other))
        failure = LinkFailedError(ExclusionCode.CANCELLED, "it ended its control channel")
        try:
            await link.run(channel)
        except LinkFailedError as error:
            failure = error
        finally:
            links.remove(link)
            self._exchange.changed()
        if links and not self._closed:  # two that dialled each other: what was lost with this channel is said again
            link.hand_queue_to(links[-1])
            self._feed(ControlUp(link.other))
        self._lost(link.other, failure)

    def _lost(self, member: int, failure: LinkFailedError) -> None:
        if self._links.get(member) or self._closed:
            return
        self._waiting.pop(member, None)
        self._feed(ControlLost(member, failure.code, failure.detail, failure.fenced_by, failure.closed))


class _ControlLink(Link):
    def __init__(self, exchange: Exchange, owner: ControlLinks, *, dialler: int, server: int) -> None:
        super().__init__(exchange, dialler=dialler, server=server, job=None)
        self._owner = owner
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._finishing = False

    def send(self, encoded: tuple[bytes, bytes]) -> None:
        self._queue.append(encoded)
        self.pulse.news()

    def hand_queue_to(self, other: _ControlLink) -> None:
        for encoded in self._queue:
            other.send(encoded)

    def finish(self) -> None:
        self._finishing = True
        self.pulse.news()

    def new_patience(self, now: float) -> Patience:
        return self.exchange.times.for_reducer(now)

    def forgive(self, seconds: float) -> None:
        if self.patience is not None:
            self.patience.forgive(seconds)

    async def run(self, channel: Channel) -> None:
        await self.converse(channel, self._send(channel), self._receive(channel))

    async def _send(self, channel: Channel) -> None:
        while True:
            while self._queue:
                header, payload = self._queue.popleft()
                if payload:
                    await send_payload(channel, header, payload)
                else:
                    await channel.send(header)
            if self._finishing:
                break
            await self.pulse.wait()
        await channel.end()

    async def _receive(self, channel: Channel) -> None:
        while (message := await channel.receive(_allocate)) is not END:
            self._owner.take(self.other, message.header, message.payload)
        self.finish()


def _allocate(_header: bytes, size: int) -> memoryview:
    if size > MAX_CONTROL_BYTES:
        raise RemoteProtocolError(f"a control message of {size} bytes, where {MAX_CONTROL_BYTES} is the most")
    return memoryview(bytearray(size))
