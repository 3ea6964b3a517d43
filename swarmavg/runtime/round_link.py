"""What all channels of a round have in common: one sending task, heartbeats, patience, and how an end of it is named."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from swarmavg.identifiers import PeerId
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import Fencing, LinkId, Term
from swarmavg.protocol.round_messages import ChannelKind, RoundBeat, RoundHello
from swarmavg.runtime.patience import CONTRIBUTOR_BASE, REDUCER_BASE, Patience
from swarmavg.transport.framing import HEAD, MAX_CODE_CHARS
from swarmavg.transport.interface import Buffer, Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange

SHORTEST_BEAT = 0.001
LONGEST_BEAT = 0.5
"""Seconds. Members need not have the same timeouts: whoever waits at least 2 s hears the others four times meanwhile."""

DIAL_ATTEMPTS = 2

NO_SUCH_ROUND = "no-such-round"
"""Code with which a peer refuses the channels of a round that it has left or never heard of."""
GAVE_UP = "gave-up"
"""Code for a channel on which the other side is silent, stalls, or breaks the protocol."""
ROUND_CLOSED = "round-closed"
"""The same, where the round was closed because everybody had everything."""
ANOTHER_TERM = "another-term"
"""Code for a channel of a term that is over, or a job that the term does not have: nobody is to blame."""


def fenced_code(fencing: Fencing) -> str:
    """Code with which the channels of a member that is out are refused."""
    code = f"fenced:{fencing}"
    return code if len(code) <= MAX_CODE_CHARS else f"fenced:{fencing.term}.0"


def read_fencing(code: str) -> Fencing | None:
    """What a code of `fenced_code` says, or `None` for any other code."""
    match = re.fullmatch(r"fenced:(\d{1,15})\.(\d{1,4})\.([0-9a-f]{1,256})", code, re.ASCII)
    if match is None:
        return None
    number, rank, live = match.groups()
    return Fencing(Term(int(number), int(rank)), int(live, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Patience of one peer in a round, in seconds."""

    sender: float | None
    """A contributor from which nothing came for this long is suspected; `None` = by measured progress."""
    reducer: float | None
    """The same for a reducer or the coordinator."""
    dial: float
    """Bound of one attempt to open a channel, and of one answer."""

    @property
    def beat(self) -> float:
        """Heartbeats go out this often: four fit into the shorter patience, and into that of less patient members."""
        shortest = min(self.sender or CONTRIBUTOR_BASE, self.reducer or REDUCER_BASE)
        return min(max(shortest / 4, SHORTEST_BEAT), LONGEST_BEAT)

    @property
    def longest(self) -> float:
        """By then, members have noticed a silence."""
        return self.reducer or REDUCER_BASE

    @property
    def arrival(self) -> float:
        """A member that has not come by then is suspected."""
        return self.sender or CONTRIBUTOR_BASE

    def for_contributor(self, now: float) -> Patience:
        return Patience(self.sender, now, base=CONTRIBUTOR_BASE)

    def for_reducer(self, now: float) -> Patience:
        return Patience(self.reducer, now, base=REDUCER_BASE)


class LinkFailedError(Exception):
    """A channel of the round ended before its work was done. Internal to `runtime`."""

    def __init__(
        self,
        code: ExclusionCode,
        detail: str,
        *,
        fenced_by: Fencing | None = None,
        closed: bool = False,
        blameless: bool = False,
    ) -> None:
        super().__init__(f"{code.value}: {detail}")
        self.code = code
        self.detail = detail
        self.fenced_by = fenced_by
        """The other side goes on without this member."""
        self.closed = closed
        """Everybody who belongs to the round has everything."""
        self.blameless = blameless
        """The two sides are in different terms: control messages will bring them together."""


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
    """One data channel of a round, seen from one end: a task that sends, a task that receives, and what may end both.

    `dialler` opens it, `server` accepts it; `job` is the job of the present term that it belongs to, `None` for a range of the
    plan.
    """

    def __init__(self, exchange: Exchange, *, dialler: int, server: int, job: int | None) -> None:
        self.exchange = exchange
        self.id = LinkId(dialler, server)
        self.other = server if dialler == exchange.position else dialler
        self.job = job
        self.channel: Channel | None = None
        self.pulse = Pulse()
        self.task: asyncio.Task[None] | None = None
        self.patience: Patience | None = None
        self.waiting_for: tuple[int, ...] = ()
        """Whom the other side waits for, as its latest heartbeat said."""
        self._failure: LinkFailedError | None = None

    def owes(self) -> bool:
        """Whether the other side should be sending payload now."""
        return False

    def new_patience(self, now: float) -> Patience:
        """For the other side of this channel."""
        return self.exchange.times.for_reducer(now)

    def give_up(self, failure: LinkFailedError, code: str = "") -> None:
        """End the link from outside. The other side is told why."""
        self._failure = self._failure or failure
        if self.channel is not None:
            _abort(self.channel, failure, code)
        elif self.task is not None:
            self.task.cancel()

    def check_given_up(self) -> None:
        """Raise the failure of a link that was given up: what had arrived before is not taken any more."""
        if self._failure is not None:
            raise self._failure

    def judge(self, now: float) -> None:
        """Give the link up if the other side is silent, or sends too little of what it owes."""
        if self.channel is None or self._failure is not None:
            return
        if self.patience is None:
            self.patience = self.new_patience(now)
        self.patience.observe(self.channel.bytes_received, self.channel.last_received, now)
        stalled = self.patience.stalled(now, self.owes())
        silent = self.patience.silent(now)
        if silent is not None:
            self.give_up(LinkFailedError(ExclusionCode.SILENT, f"no byte for {silent:.1f} s"))
        elif stalled is not None and now - self.channel.last_received < self.patience.limit / 2:
            self.give_up(LinkFailedError(ExclusionCode.STALLED, f"next to nothing of what it owes for {stalled:.1f} s"))

    async def dial(self, kind: ChannelKind) -> Channel:
        """Open the channel and say hello. Raises `LinkFailedError`."""
        exchange = self.exchange
        peer = exchange.group.members[self.id.reducer].peer_id
        with naming_failures():
            channel = await self._open(peer, attempts=1 if kind is ChannelKind.CONTROL else DIAL_ATTEMPTS)
            if self._failure is not None:
                channel.abort("left the round")
                raise self._failure
            self.channel = channel
            hello = exchange.hello(kind, self.id.reducer, self.job)
            await send_payload(channel, hello.encode(), exchange.group.signed)
        return channel

    async def _open(self, peer: PeerId, attempts: int) -> Channel:
        """Nobody there: so many attempts. Somebody who does not answer may only be held up: as at the beginning of a round a
        member is waited for, so it is called. Raises `DialError`.
        """
        exchange = self.exchange
        began = exchange.now()
        patience = exchange.times.arrival if exchange.term.number == 0 else 0.0
        for attempt in itertools.count(1):
            tried = exchange.now()
            try:
                return await exchange.hub.open_channel(peer, exchange.purpose, timeout=exchange.times.dial)
            except DialError:
                unanswered = exchange.now() - tried > exchange.times.dial / 2
                if attempt >= attempts and not (unanswered and exchange.now() - began < patience):
                    raise
            await asyncio.sleep(min(0.2, exchange.times.dial))
        raise AssertionError("unreachable")

    async def beat_or_wait(self, channel: Channel, waiting_for: tuple[int, ...]) -> None:
        """Wait for news; send a heartbeat if one is due."""
        if await self.pulse.wait():
            await channel.send(RoundBeat(term=self.exchange.term, waiting_for=waiting_for).encode())

    def take_beat(self, beat: RoundBeat, header: bytes) -> None:
        if self.patience is not None:
            self.patience.discount(HEAD.size + len(header))
        self.waiting_for = beat.waiting_for
        self.exchange.term_seen(self.other, beat.term)

    async def converse(self, channel: Channel, send: Coroutine[Any, Any, None], receive: Coroutine[Any, Any, None]) -> None:
        """Run both directions to their clean end, or raise `LinkFailedError`; the channel is gone afterwards."""
        self.channel = channel
        try:
            with naming_failures():
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(send, name=f"round-send-{channel.peer.short}")
                        tasks.create_task(receive, name=f"round-receive-{channel.peer.short}")
                except ExceptionGroup as group:
                    raise self._failure or _first_cause(group) from None
        except LinkFailedError as failure:
            _abort(channel, failure)
            raise
        except BaseException:
            channel.abort("left the round")
            raise
        await channel.aclose()


def _abort(channel: Channel, failure: LinkFailedError, code: str = "") -> None:
    """Drop the channel. A cancel tells the other side that this member has left; anything else is a refusal with the reason."""
    if not code and failure.code is not ExclusionCode.CANCELLED:
        code = GAVE_UP
    channel.abort(str(failure), code=code)


def _first_cause(group: ExceptionGroup[Exception]) -> Exception:
    """What ended a channel; that the other direction then found it closed says nothing."""
    return min(group.exceptions, key=lambda error: isinstance(error, ChannelClosedError))


def hello_of(exchange: Exchange, kind: ChannelKind, server: int, job: int | None) -> RoundHello:
    """The first message of a channel that this member opens."""
    members = exchange.group.members
    return RoundHello(
        kind=kind,
        group_id=exchange.group.group_id,
        term=Term(0, 0) if kind is ChannelKind.INPUTS and job is None else exchange.term,
        job=job,
        sender=members[exchange.position].nonce,
        receiver=members[server].nonce,
        plan_hash=exchange.plan.hash,
    )


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
        raise _refusal(error) from error
    except (ChannelViolationError, RemoteProtocolError) as error:
        raise LinkFailedError(ExclusionCode.PROTOCOL_VIOLATION, str(error)) from error
    except (ChannelLostError, ChannelClosedError) as error:
        raise LinkFailedError(ExclusionCode.CONNECTION_LOST, str(error)) from error
    except AuthenticationError as error:
        raise LinkFailedError(ExclusionCode.REFUSED, str(error)) from error
    except DialError as error:
        raise LinkFailedError(ExclusionCode.UNREACHABLE, str(error)) from error


def _refusal(error: ChannelRefusedError) -> LinkFailedError:
    if error.code in (NO_SUCH_ROUND, "no-such-purpose"):  # the latter: its averager is closed
        return LinkFailedError(ExclusionCode.CANCELLED, error.reason)
    if error.code == ROUND_CLOSED:
        return LinkFailedError(ExclusionCode.CANCELLED, error.reason, closed=True)
    if error.code == GAVE_UP:
        return LinkFailedError(ExclusionCode.CONNECTION_LOST, f"the other side gave the channel up: {error.reason}")
    if error.code == ANOTHER_TERM:
        return LinkFailedError(ExclusionCode.REFUSED, error.reason, blameless=True)
    fencing = read_fencing(error.code)
    if fencing is not None:
        return LinkFailedError(ExclusionCode.FENCED, error.reason, fenced_by=fencing)
    return LinkFailedError(ExclusionCode.REFUSED, str(error))
