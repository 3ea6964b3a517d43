"""Where channels of rounds arrive: finds the exchange that a channel belongs to, or waits for it to stand up."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from swarmavg.errors import ChannelError, RemoteProtocolError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.matchmaking_messages import MAX_BEGIN_BYTES
from swarmavg.protocol.round_messages import RoundHello, decode_round_message
from swarmavg.protocol.round_states import RoundState
from swarmavg.runtime.exchange import Exchange
from swarmavg.runtime.lag import lenient_timeout
from swarmavg.runtime.round_link import NO_SUCH_ROUND, ROUND_CLOSED, fenced_code
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.interface import END, Channel

_log = get_logger("swarmavg.round")

REMEMBERED_ROUNDS = 256


class _End(NamedTuple):
    why: str
    out: frozenset[PeerId]
    """Members that the round went on without."""
    fenced_code: str
    code: str
    """For everybody else."""


_UNKNOWN = _End("this peer does not know the group", frozenset(), "", NO_SUCH_ROUND)


class RoundDesk:
    """Inbound channels of one averager's rounds.

    A contributor's first message may arrive before this member has heard that the group stands: it then waits, up to
    `patience` seconds, and the begin that it carries is offered to `adopt`, in case the own copy was lost.
    """

    def __init__(self, adopt: Callable[[bytes], object], patience: float) -> None:
        self._adopt = adopt
        self._patience = patience
        self._exchanges: dict[GroupId, Exchange] = {}
        self._over: OrderedDict[GroupId, _End] = OrderedDict()
        self._left_early: OrderedDict[GroupId, dict[PeerId, str]] = OrderedDict()
        self._news = asyncio.Event()

    def open(self, exchange: Exchange) -> None:
        """Channels of this exchange's group are now handed to it."""
        group_id = exchange.group.group_id
        self._exchanges[group_id] = exchange
        for peer, reason in self._left_early.pop(group_id, {}).items():
            exchange.member_left(peer, reason)
        self._news.set()
        self._news = asyncio.Event()

    def close(self, group_id: GroupId, why: str) -> None:
        """Channels of this group that still come are refused with `why`; those of fenced members learn that they are."""
        exchange = self._exchanges.pop(group_id, None)
        out = () if exchange is None else (exchange.group.members[position].peer_id for position in exchange.machine.out)
        fenced = "" if exchange is None else fenced_code(exchange.machine.fencing)
        closed = exchange is not None and exchange.machine.state is RoundState.CLOSED
        self._over[group_id] = _End(why, frozenset(out), fenced, ROUND_CLOSED if closed else NO_SUCH_ROUND)
        while len(self._over) > REMEMBERED_ROUNDS:
            self._over.popitem(last=False)
        self._news.set()
        self._news = asyncio.Event()

    def member_left(self, group_id: GroupId, peer: PeerId, reason: str) -> None:
        """A member of a group has said that it takes no part in the round, which may be about to be opened here."""
        exchange = self._exchanges.get(group_id)
        if exchange is not None:
            exchange.member_left(peer, reason)
        elif group_id not in self._over:
            self._left_early.setdefault(group_id, {})[peer] = reason
            while len(self._left_early) > REMEMBERED_ROUNDS:
                self._left_early.popitem(last=False)

    async def handle(self, channel: Channel) -> None:
        """Handler of the purpose under which contributors open channels."""
        try:
            hello, begin = await self._hello(channel)
            exchange = await self._find(hello.group_id, begin)
        except (RemoteProtocolError, ChannelError, TimeoutError) as error:
            reason = str(error) or f"no hello within {self._patience:g} s"
            _log.warning("bad first message on a round's channel", peer=channel.peer.short, error=reason)
            channel.abort(reason, code="protocol-violation")
            return
        if exchange is None:
            end = self._over.get(hello.group_id, _UNKNOWN)
            channel.abort(end.why, code=end.fenced_code if channel.peer in end.out else end.code)
            return
        await exchange.serve(channel, hello)

    async def _hello(self, channel: Channel) -> tuple[RoundHello, bytes]:
        async with lenient_timeout(self._patience):
            message = await channel.receive(_allocate_begin)
        if message is END:
            raise RemoteProtocolError("the channel ended before its hello")
        hello = decode_round_message(message.header)
        if not isinstance(hello, RoundHello):
            raise RemoteProtocolError(f"the first message is a {type(hello).__name__}, not a hello")
        return hello, bytes(message.payload)

    async def _find(self, group_id: GroupId, begin: bytes) -> Exchange | None:
        if group_id not in self._exchanges and group_id not in self._over:
            self._adopt(begin)
        with suppress(TimeoutError):
            async with lenient_timeout(self._patience):
                while group_id not in self._exchanges and group_id not in self._over:
                    await self._news.wait()
        return self._exchanges.get(group_id)


def _allocate_begin(_header: bytes, size: int) -> memoryview:
    if size > MAX_BEGIN_BYTES:
        raise RemoteProtocolError(f"a begin of {size} bytes, where {MAX_BEGIN_BYTES} is the most")
    return memoryview(bytearray(size))
