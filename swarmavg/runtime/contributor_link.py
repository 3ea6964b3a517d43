"""A contributor's channel to one reducer: the input parts of its range go out, the averages come back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from swarmavg.errors import DialError, RemoteProtocolError
from swarmavg.protocol.round_messages import (
    RoundBeat,
    RoundHello,
    RoundPart,
    RoundResult,
    RoundStart,
    decode_round_message,
)
from swarmavg.runtime.round_link import Link, naming_failures, send_payload
from swarmavg.transport.interface import END, Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange

DIAL_ATTEMPTS = 2


class ContributorLink(Link):
    """Lives from the moment the group stands until the reducer's last result is in.

    `run` returns normally when every result of the range is held, and raises `LinkFailedError` otherwise.
    """

    def __init__(self, exchange: Exchange, reducer: int) -> None:
        super().__init__()
        self._exchange = exchange
        self._reducer = reducer
        self._parts = exchange.plan.parts[reducer]
        self._begun = 0  # parts whose sending has begun: results of later ones are a lie
        self._scratch: memoryview | None = None

    async def run(self) -> None:
        with naming_failures():
            channel = await self._dial()
        self.check_given_up(channel)
        await self.converse(channel, self._send(channel), self._receive(channel))

    async def _dial(self) -> Channel:
        exchange = self._exchange
        peer = exchange.group.members[self._reducer].peer_id
        for attempt in range(DIAL_ATTEMPTS):
            try:
                return await exchange.hub.open_channel(peer, exchange.purpose, timeout=exchange.times.dial)
            except DialError:
                if attempt + 1 == DIAL_ATTEMPTS:
                    raise
                await asyncio.sleep(min(0.2, exchange.times.dial))
        raise AssertionError("unreachable")

    async def _send(self, channel: Channel) -> None:
        exchange, ledger = self._exchange, self._exchange.ledger
        await send_payload(channel, self._hello().encode(), exchange.group.signed)
        while exchange.weight is None:
            await self._beat_or_wait(channel, waiting_for=(exchange.position,))
        await channel.send(RoundStart(term=exchange.term, weight=exchange.weight).encode())
        if exchange.weight > 0:
            for part in self._parts:
                self.pulse.beat_due = False  # a part says as much
                self._begun = part.index + 1
                payload = exchange.encoded(part)
                exchange.bytes_sent += payload.nbytes
                await send_payload(channel, RoundPart(term=exchange.term, index=part.index).encode(), payload)
        self._begun = len(self._parts)
        while not ledger.complete(self._reducer):
            await self._beat_or_wait(channel, waiting_for=())
        await channel.end()

    def _hello(self) -> RoundHello:
        group, exchange = self._exchange.group, self._exchange
        return RoundHello(
            group_id=group.group_id,
            term=exchange.term,
            sender=group.members[exchange.position].nonce,
            receiver=group.members[self._reducer].nonce,
            plan_hash=exchange.plan.hash,
        )

    async def _beat_or_wait(self, channel: Channel, waiting_for: tuple[int, ...]) -> None:
        if await self.pulse.wait():
            await channel.send(RoundBeat(term=self._exchange.term, waiting_for=waiting_for).encode())

    async def _receive(self, channel: Channel) -> None:
        while (message := await channel.receive(self._allocate)) is not END:
            content = decode_round_message(message.header)
            if content.term != self._exchange.term:
                continue
            if isinstance(content, RoundResult):
                self._take_result(content, message.payload)
            elif not isinstance(content, RoundBeat):
                raise RemoteProtocolError(f"a reducer sent {type(content).__name__}")
        if not self._exchange.ledger.complete(self._reducer):
            raise RemoteProtocolError(
                f"ended after {self._exchange.ledger.next_index(self._reducer)} of {len(self._parts)} results"
            )

    def _take_result(self, result: RoundResult, payload: memoryview) -> None:
        exchange, ledger = self._exchange, self._exchange.ledger
        if result.index != ledger.next_index(self._reducer) or result.index >= self._begun:
            raise RemoteProtocolError(f"result {result.index} where {ledger.next_index(self._reducer)} is due")
        if result.contributors & ~exchange.contributor_bits:
            raise RemoteProtocolError(f"result {result.index} names contributors that the group does not have")
        exchange.bytes_received += payload.nbytes
        exchange.accept_result(self._reducer, result.contributors, payload)
        if ledger.complete(self._reducer):
            self.pulse.news()

    def _allocate(self, _header: bytes, size: int) -> memoryview:
        if size > self._exchange.largest_payload:
            raise RemoteProtocolError(f"a result of {size} bytes, where {self._exchange.largest_payload} is the most")
        if self._scratch is None:
            self._scratch = self._exchange.new_scratch()
        return self._scratch[:size]
