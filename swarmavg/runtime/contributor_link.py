"""A contributor's channel to one reducer: the inputs of its range or job go out, the averages come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.round_messages import (
    ChannelKind,
    RoundBeat,
    RoundPart,
    RoundResult,
    RoundStart,
    decode_round_message,
)
from swarmavg.runtime.round_link import Link, send_payload
from swarmavg.transport.interface import END, Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange


class ContributorLink(Link):
    """`run` returns normally when every result of the parts `numbers` is held, and raises `LinkFailedError` otherwise."""

    def __init__(self, exchange: Exchange, *, reducer: int, job: int | None, numbers: Sequence[int]) -> None:
        super().__init__(exchange, dialler=exchange.position, server=reducer, job=job)
        self._numbers = numbers
        self._begun = 0  # parts whose sending has begun: results of later ones are a lie
        self._received = 0
        self._scratch: memoryview | None = None

    @property
    def complete(self) -> bool:
        return self._received == len(self._numbers)

    def owes(self) -> bool:
        return self._begun == len(self._numbers) and not self.complete and not self.waiting_for

    async def run(self) -> None:
        channel = await self.dial(ChannelKind.INPUTS)
        await self.converse(channel, self._send(channel), self._receive(channel))

    async def _send(self, channel: Channel) -> None:
        exchange = self.exchange
        while exchange.weight is None:
            await self.beat_or_wait(channel, waiting_for=(exchange.position,))
        await channel.send(RoundStart(weight=exchange.weight).encode())
        if exchange.weight > 0:
            for index, number in enumerate(self._numbers):
                self.pulse.beat_due = False  # a part says as much
                self._begun = index + 1
                payload = exchange.store.encoded(number)
                exchange.bytes_sent += payload.nbytes
                await send_payload(channel, RoundPart(index=index).encode(), payload)
        self._begun = len(self._numbers)
        while not self.complete:
            await self.beat_or_wait(channel, waiting_for=())
        await channel.end()

    async def _receive(self, channel: Channel) -> None:
        while (message := await channel.receive(self._allocate)) is not END:
            self.check_given_up()
            content = decode_round_message(message.header)
            if isinstance(content, RoundResult):
                self._take_result(content, message.payload)
            elif isinstance(content, RoundBeat):
                self.take_beat(content, message.header)
            else:
                raise RemoteProtocolError(f"a reducer sent {type(content).__name__}")
        if not self.complete:
            raise RemoteProtocolError(f"ended after {self._received} of {len(self._numbers)} results")

    def _take_result(self, result: RoundResult, payload: memoryview) -> None:
        exchange = self.exchange
        if result.index != self._received or result.index >= self._begun:
            raise RemoteProtocolError(f"result {result.index} where {self._received} is due")
        exchange.store.check_contributors(result.contributors)
        if bool(payload.nbytes) != bool(result.contributors):
            raise RemoteProtocolError(f"result {result.index} of {result.contributors:b} with {payload.nbytes} bytes")
        if bool(result.contributors >> exchange.position & 1) != (exchange.weight != 0):
            raise RemoteProtocolError(
                f"result {result.index} without the input that this member gave, or with one it did not give"
            )
        exchange.bytes_received += payload.nbytes
        exchange.store.accept_result(self._numbers[result.index], result.contributors, payload)
        self._received += 1
        self.waiting_for = ()
        if self.complete:
            self.pulse.news()

    def _allocate(self, _header: bytes, size: int) -> memoryview:
        if size > self.exchange.store.largest_payload:
            raise RemoteProtocolError(f"a result of {size} bytes, where {self.exchange.store.largest_payload} is the most")
        if self._scratch is None:
            self._scratch = self.exchange.store.new_scratch()
        return self._scratch[:size]
