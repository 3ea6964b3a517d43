"""A reducer's channel with one contributor: its parts come in and are added, the averages go out to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_messages import RoundBeat, RoundPart, RoundResult, RoundStart, decode_round_message
from swarmavg.runtime.round_link import Link, LinkFailedError, send_payload
from swarmavg.transport.interface import END, Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange


class ReducerLink(Link):
    """`run` returns normally once the contributor has been given every result, and raises `LinkFailedError` otherwise."""

    def __init__(self, exchange: Exchange, contributor: int) -> None:
        super().__init__()
        self._exchange = exchange
        self._contributor = contributor
        self._scratch: memoryview | None = None

    async def run(self, channel: Channel) -> None:
        await self.converse(channel, self._send(channel), self._receive(channel))

    async def _send(self, channel: Channel) -> None:
        reducer, term = self._exchange.reducer, self._exchange.term
        for index in range(len(reducer.parts)):
            while len(reducer.results) <= index:
                if await self.pulse.wait():
                    await channel.send(RoundBeat(term=term, waiting_for=tuple(reducer.waiting_for())).encode())
            result = reducer.results[index]
            self._exchange.bytes_sent += result.payload.nbytes
            header = RoundResult(term=term, index=index, contributors=result.contributors).encode()
            if result.payload.nbytes:
                await send_payload(channel, header, result.payload)
            else:
                await channel.send(header)
        await channel.end()

    async def _receive(self, channel: Channel) -> None:
        while (message := await channel.receive(self._allocate)) is not END:
            content = decode_round_message(message.header)
            if content.term != self._exchange.term:
                continue
            if isinstance(content, RoundStart):
                self._exchange.reducer.begin(self._contributor, content.weight)
            elif isinstance(content, RoundPart):
                self._exchange.bytes_received += message.payload.nbytes
                self._exchange.reducer.add(self._contributor, content.index, message.payload)
            elif isinstance(content, RoundBeat):
                if not content.waiting_for and not self._exchange.reducer.delivered(self._contributor):
                    raise LinkFailedError(ExclusionCode.STALLED, "a heartbeat in place of the parts that are due")
            else:
                raise RemoteProtocolError(f"a contributor sent {type(content).__name__}")
            self._exchange.results_may_have_come()
        if not self._exchange.reducer.finished:
            raise RemoteProtocolError("the contributor ended before it had its results")

    def _allocate(self, _header: bytes, size: int) -> memoryview:
        if size > self._exchange.largest_payload:
            raise RemoteProtocolError(f"a part of {size} bytes, where {self._exchange.largest_payload} is the most")
        if self._scratch is None:
            self._scratch = self._exchange.new_scratch()
        return self._scratch[:size]
