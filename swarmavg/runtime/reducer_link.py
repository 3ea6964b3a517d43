"""A reducer's channel with one contributor: its inputs come in and are added, the averages go out to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_messages import RoundBeat, RoundPart, RoundResult, RoundStart, decode_round_message
from swarmavg.runtime.patience import Patience
from swarmavg.runtime.round_link import Link, LinkFailedError, send_payload
from swarmavg.transport.interface import END, Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange
    from swarmavg.runtime.served_range import ServedRange


class ReducerLink(Link):
    """`run` returns normally once the contributor has acknowledged every result, and raises `LinkFailedError` otherwise."""

    def __init__(self, exchange: Exchange, served: ServedRange, contributor: int) -> None:
        super().__init__(exchange, dialler=contributor, server=exchange.position, job=served.job)
        self._served = served
        self._started = False
        self._scratch: memoryview | None = None

    def owes(self) -> bool:
        return self._started and not self._served.reducer.delivered(self.other)

    def new_patience(self, now: float) -> Patience:
        return self.exchange.times.for_contributor(now)

    async def run(self, channel: Channel) -> None:
        await self.converse(channel, self._send(channel), self._receive(channel))

    async def _send(self, channel: Channel) -> None:
        reducer = self._served.reducer
        for index in range(len(reducer.parts)):
            while len(reducer.results) <= index:
                await self.beat_or_wait(channel, waiting_for=tuple(reducer.waiting_for()))
            result = reducer.results[index]
            self.exchange.bytes_sent += result.payload.nbytes
            header = RoundResult(index=index, contributors=result.contributors).encode()
            if result.payload.nbytes:
                await send_payload(channel, header, result.payload)
            else:
                await channel.send(header)
        await channel.end()

    async def _receive(self, channel: Channel) -> None:
        while (message := await channel.receive(self._allocate)) is not END:
            self.check_given_up()
            content = decode_round_message(message.header)
            if isinstance(content, RoundStart):
                self._served.reducer.begin(self.other, content.weight)
                self._started = True
            elif isinstance(content, RoundPart):
                self.exchange.bytes_received += message.payload.nbytes
                self._served.reducer.add(self.other, content.index, message.payload)
            elif isinstance(content, RoundBeat):
                self.take_beat(content, message.header)
                if not content.waiting_for and not self._served.reducer.delivered(self.other):
                    raise LinkFailedError(ExclusionCode.STALLED, "a heartbeat in place of the parts that are due")
            else:
                raise RemoteProtocolError(f"a contributor sent {type(content).__name__}")
            self._served.results_may_have_come()
        if not self._served.reducer.finished:
            raise RemoteProtocolError("the contributor ended before it had its results")

    def _allocate(self, _header: bytes, size: int) -> memoryview:
        if size > self.exchange.store.largest_payload:
            raise RemoteProtocolError(f"a part of {size} bytes, where {self.exchange.store.largest_payload} is the most")
        if self._scratch is None:
            self._scratch = self.exchange.store.new_scratch()
        return self._scratch[:size]
