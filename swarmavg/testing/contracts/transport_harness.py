"""What the transport checks need of an implementation, and the set-ups that they share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from swarmavg.identifiers import Address
from swarmavg.transport.interface import Channel, End, Listener, Message, Transport, TransportLimits

PATIENCE: Final = 20.0
"""Seconds in which anything that must happen has happened."""


class TransportHarness(Protocol):
    """A place in which peers of one swarm can reach each other by the transport under test."""

    def join(self, limits: TransportLimits | None = None) -> Transport:
        """The transport of a new peer. The harness closes it at the end."""

    def join_other_swarm(self) -> Transport:
        """The transport of a peer that belongs to another swarm."""

    def address(self) -> Address:
        """Where a listener can be bound, port 0."""

    def nobody(self) -> Address:
        """Where nobody listens."""

    def silence(self) -> AbstractAsyncContextManager[Address]:
        """Inside the block, dialling the address meets neither an answer nor a refusal."""

    async def kill(self, transport: Transport) -> None:
        """The process of the peer to which `transport` belongs dies without a word."""


TransportCheck: TypeAlias = Callable[[TransportHarness], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Pair:
    """An open channel and all that belongs to it. `near` dialled."""

    near: Channel
    far: Channel
    near_transport: Transport
    far_transport: Transport
    listener: Listener
    arrivals: asyncio.Queue[Channel]

    async def another(self, purpose: str = "check") -> tuple[Channel, Channel]:
        """One more channel between the same two."""
        return await dial_and_meet(self.near_transport, self.listener, self.arrivals, purpose)


@asynccontextmanager
async def connected(
    harness: TransportHarness,
    *,
    near_limits: TransportLimits | None = None,
    far_limits: TransportLimits | None = None,
    purpose: str = "check",
) -> AsyncIterator[Pair]:
    """Two peers and a channel between them; the far handler ends with the block."""
    near_transport, far_transport = harness.join(near_limits), harness.join(far_limits)
    async with listening(harness, far_transport) as (listener, arrivals):
        near, far = await dial_and_meet(near_transport, listener, arrivals, purpose)
        yield Pair(near, far, near_transport, far_transport, listener, arrivals)
        await near.aclose()


@asynccontextmanager
async def listening(harness: TransportHarness, transport: Transport) -> AsyncIterator[tuple[Listener, asyncio.Queue[Channel]]]:
    """A listener, and the channels that arrive at it; they stay open until the block ends."""
    arrivals: asyncio.Queue[Channel] = asyncio.Queue()
    over = asyncio.Event()

    async def handler(channel: Channel) -> None:
        arrivals.put_nowait(channel)
        await over.wait()

    listener = await transport.listen(harness.address(), handler)
    try:
        async with asyncio.timeout(PATIENCE):
            yield listener, arrivals
    finally:
        over.set()
        await listener.aclose()


async def dial_and_meet(
    transport: Transport, listener: Listener, arrivals: asyncio.Queue[Channel], purpose: str
) -> tuple[Channel, Channel]:
    near = await transport.dial(listener.address, purpose=purpose, timeout=PATIENCE)
    return near, await arrivals.get()


async def raised(call: Awaitable[object], *kinds: type[BaseException]) -> BaseException:
    """The error that `call` raises, which must be of one of `kinds`."""
    try:
        result = await call
    except kinds as error:
        return error
    raise AssertionError(f"expected {' or '.join(kind.__name__ for kind in kinds)}, got the result {result!r}")


def message_of(received: Message | End) -> Message:
    assert isinstance(received, Message), f"expected a message, got {received}"
    return received


async def next_message(channel: Channel) -> Message:
    return message_of(await channel.receive())
