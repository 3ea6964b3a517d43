"""What both ends of a round's channel have in common: one sending task, heartbeats, and how an end of it is named."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swarmavg.errors import (
    AuthenticationError,
    ChannelCancelledError,
    ChannelClosedError,
    ChannelLostError,
    ChannelRefusedError,
    ChannelViolationError,
    DialError,
    RemoteProtocolError,
)
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.transport.interface import Buffer, Channel

SHORTEST_BEAT = 0.001
LONGEST_BEAT = 0.5
"""Seconds. Members need not have the same timeouts: whoever waits at least 2 s hears the others four times meanwhile."""


NO_SUCH_ROUND = "no-such-round"
"""Code with which a peer refuses the channels of a round that it has left or never heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Patience of one peer in a round, in seconds."""

    sender: float
    """A contributor from which no byte came for this long is excluded."""
    reducer: float
    """A reducer from which no byte came for this long is given up."""
    dial: float
    """Bound of one attempt to open a channel."""

    @property
    def beat(self) -> float:
        """Heartbeats go out this often: four fit into the shorter patience, and into that of less patient members."""
        return min(max(min(self.sender, self.reducer) / 4, SHORTEST_BEAT), LONGEST_BEAT)


class LinkFailedError(Exception):
    """A channel of the round ended before its work was done. Internal to `runtime`."""

    def __init__(self, code: ExclusionCode, detail: str) -> None:
        super().__init__(f"{code.value}: {detail}")
        self.code = code
        self.detail = detail


class Pulse:
    """Wakes the one task that sends on a channel, for news or for a heartbeat that is due."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.beat_due = False

    def news(self) -> None:
        self._event.set()

    def tick(self) -> None:
        self.beat_due = True
        self._event.set()

    async def wait(self) -> bool:
        """Wait for either; tells whether a heartbeat is due, once."""
        await self._event.wait()
        self._event.clear()
        due, self.beat_due = self.beat_due, False
        return due


class Link:
    """One channel of a round: a task that sends, a task that receives, and the watchdog that may end both."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.pulse = Pulse()
        self._failure: LinkFailedError | None = None

    def give_up(self, code: ExclusionCode, detail: str) -> None:
        """End the link from outside, for this reason."""
        self._failure = self._failure or LinkFailedError(code, detail)
        if self.channel is not None:
            self.channel.abort(f"{code.value}: {detail}")

    def check_given_up(self, channel: Channel) -> None:
        """Raise if the link was given up before it had this channel."""
        if self._failure is not None:
            channel.abort("left the round")
            raise self._failure

    async def converse(self, channel: Channel, send: Coroutine[Any, Any, None], receive: Coroutine[Any, Any, None]) -> None:
        """Run both directions to their clean end, or raise `LinkFailedError`; the channel is gone afterwards."""
        self.channel = channel
        clean = False
        try:
            with naming_failures():
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(send, name=f"round-send-{channel.peer.short}")
                        tasks.create_task(receive, name=f"round-receive-{channel.peer.short}")
                except ExceptionGroup as group:
                    raise self._failure or group.exceptions[0] from None
            clean = True
        finally:
            if not clean:
                channel.abort("left the round")
        await channel.aclose()


async def send_payload(channel: Channel, header: bytes, payload: Buffer) -> None:
    """Send it; a payload larger than the other side's limit is a refusal of theirs."""
    try:
        await channel.send(header, payload)
    except ValueError as error:
        raise ChannelRefusedError("too-large", str(error)) from error


@contextmanager
def naming_failures() -> Iterator[None]:
    """Translate what a channel or a peer's message may raise into a `LinkFailedError` with its code."""
    try:
        yield
    except ChannelCancelledError as error:
        raise LinkFailedError(ExclusionCode.CANCELLED, error.reason) from error
    except ChannelRefusedError as error:
        if error.code == NO_SUCH_ROUND:
            raise LinkFailedError(ExclusionCode.CANCELLED, error.reason) from error
        raise LinkFailedError(ExclusionCode.REFUSED, str(error)) from error
    except (ChannelViolationError, RemoteProtocolError) as error:
        raise LinkFailedError(ExclusionCode.PROTOCOL_VIOLATION, str(error)) from error
    except (ChannelLostError, ChannelClosedError) as error:
        raise LinkFailedError(ExclusionCode.CONNECTION_LOST, str(error)) from error
    except AuthenticationError as error:
        raise LinkFailedError(ExclusionCode.REFUSED, str(error)) from error
    except DialError as error:
        raise LinkFailedError(ExclusionCode.UNREACHABLE, str(error)) from error
