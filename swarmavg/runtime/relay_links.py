"""Channels on which finished results are passed on: from a holder to the server of a job, and from there to who lacks them.

Bare values travel, not encodings: they are the same bits for everybody, whatever the codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.round_jobs import Job
from swarmavg.protocol.round_messages import ChannelKind, RoundBeat, RoundResult, decode_round_message
from swarmavg.runtime.round_link import ANOTHER_TERM, Link, LinkFailedError, send_payload
from swarmavg.transport.interface import END, Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange


class RelayLink(Link):
    """One channel of a job that passes results on. `run` or `serve` returns when the receiving side has everything."""

    def __init__(self, exchange: Exchange, job: Job, *, dialler: int) -> None:
        super().__init__(exchange, dialler=dialler, server=job.server, job=job.number)
        self._numbers = job.parts
        self._received = 0

    async def push(self) -> None:
        """As the holder: give the results to the server."""
        await self.supply(await self.dial(ChannelKind.PUSH))

    async def fetch(self) -> None:
        """As a consumer: have the results from the server."""
        await self.collect(await self.dial(ChannelKind.FETCH))

    async def supply(self, channel: Channel) -> None:
        """Send every result as soon as it is there, and wait until the other side has them all."""
        await self.converse(channel, self._send_results(channel), self._receive_nothing(channel))

    async def collect(self, channel: Channel) -> None:
        """Take every result."""
        await self.converse(channel, self._send_beats(channel), self._receive_results(channel))

    async def _send_results(self, channel: Channel) -> None:
        exchange = self.exchange
        for index, number in enumerate(self._numbers):
            while (result := exchange.store.result_of(number)) is None:
                await self.beat_or_wait(channel, waiting_for=(exchange.plan.owners[number],))
            contributors, values = result
            header = RoundResult(index=index, contributors=contributors).encode()
            exchange.bytes_sent += values.nbytes
            if contributors:
                await send_payload(channel, header, values)
            else:
                await channel.send(header)
        await channel.end()

    async def _receive_nothing(self, channel: Channel) -> None:
        while (message := await channel.receive(_no_payload)) is not END:
            self.check_given_up()
            content = decode_round_message(message.header)
            if not isinstance(content, RoundBeat):
                raise RemoteProtocolError(f"whoever fetches results sent {type(content).__name__}")
            self.take_beat(content, message.header)

    async def _send_beats(self, channel: Channel) -> None:
        while self._received < len(self._numbers):
            await self.beat_or_wait(channel, waiting_for=())
        await channel.end()

    async def _receive_results(self, channel: Channel) -> None:
        exchange = self.exchange
        while (message := await channel.receive(self._allocate)) is not END:
            self.check_given_up()
            content = decode_round_message(message.header)
            if isinstance(content, RoundBeat):
                self.take_beat(content, message.header)
            elif not isinstance(content, RoundResult):
                raise RemoteProtocolError(f"whoever passes results on sent {type(content).__name__}")
            elif content.index != self._received or content.index >= len(self._numbers):
                raise RemoteProtocolError(f"result {content.index} where {self._received} of {len(self._numbers)} is due")
            else:
                exchange.store.check_contributors(content.contributors)
                exchange.bytes_received += message.payload.nbytes
                exchange.store.accept_values(self._numbers[content.index], content.contributors, message.payload)
                self._received += 1
        if self._received < len(self._numbers):
            raise RemoteProtocolError(f"ended after {self._received} of {len(self._numbers)} results")
        self.pulse.news()

    def _allocate(self, _header: bytes, size: int) -> memoryview:
        if size > self.exchange.store.largest_values:
            raise RemoteProtocolError(f"a result of {size} bytes, where {self.exchange.store.largest_values} is the most")
        return memoryview(bytearray(size))


class Relay:
    """The server of a job that passes results on."""

    def __init__(self, exchange: Exchange, job: Job) -> None:
        self._exchange = exchange
        self._job = job
        self._expected: dict[int, ChannelKind] = {
            member: ChannelKind.FETCH
            for member in range(len(exchange.group.members))
            if job.consumers >> member & 1 and member != job.server
        }
        if job.holder is not None and job.holder != job.server:
            self._expected[job.holder] = ChannelKind.PUSH
        self._since = exchange.now()
        self._over = False
        self.links: dict[int, RelayLink] = {}

    async def serve(self, channel: Channel, member: int, kind: ChannelKind) -> None:
        """Handle the channel of a consumer or of the holder until its end; refused if nothing is expected from it."""
        if self._over:
            channel.abort("this term is over", code=ANOTHER_TERM)
            return
        if self._expected.get(member) is not kind:
            channel.abort(f"no {kind.value} channel is expected from this member", code="not-expected")
            return
        del self._expected[member]
        link = self.links[member] = RelayLink(self._exchange, self._job, dialler=member)
        try:
            if kind is ChannelKind.FETCH:
                await link.supply(channel)
                self._exchange.acknowledged(self._job.number, member)
            else:
                await link.collect(channel)
        except LinkFailedError as failure:
            if not self._over:
                self._exchange.link_failed(link.id, member, failure)
        finally:
            self.links.pop(member, None)

    def drop(self, member: int, failure: LinkFailedError, code: str = "") -> None:
        self._expected.pop(member, None)
        link = self.links.get(member)
        if link is not None:
            link.give_up(failure, code)

    def end(self, failure: LinkFailedError) -> None:
        """A newer term replaces this job."""
        self._over = True
        for link in self.links.values():
            link.give_up(failure, ANOTHER_TERM)

    def forgive(self, lag: float) -> None:
        """The own process stood still for so long."""
        self._since += lag

    def missing_channels(self, now: float, patience: float) -> list[int]:
        """Members that should have opened their channel by now, each named once."""
        if self._over or now - self._since <= patience:
            return []
        late = sorted(self._expected)
        self._expected.clear()
        return late


def _no_payload(_header: bytes, size: int) -> memoryview:
    raise RemoteProtocolError(f"{size} bytes of payload where there is none")
