"""Drives the matchmaking machine of one averager: directory, channels, timers. No rule of the protocol lives here."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final

from swarmavg.errors import ClosedError, DirectoryError, LocalProtocolError, MatchmakingError, RemoteProtocolError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.group import Group, Role
from swarmavg.protocol.matchmaking import Matchmaking
from swarmavg.protocol.matchmaking_begin import Signer
from swarmavg.protocol.matchmaking_core import PlanHash
from swarmavg.protocol.matchmaking_events import (
    Assembled,
    BeginSeen,
    BitsChanged,
    Cancel,
    Close,
    Failed,
    LinkLost,
    Look,
    LookRequest,
    MatchEffect,
    MatchEvent,
    MatchSettings,
    MemberLost,
    MessageReceived,
    PeerFailed,
    PresenceGone,
    PresenceSeen,
    Publish,
    RoundFinished,
    Send,
    Tick,
    Withdraw,
)
from swarmavg.protocol.matchmaking_messages import decode_message, encode_message, payload_limit
from swarmavg.protocol.matchmaking_presence import MatchConfig, Presence, decode_presence
from swarmavg.protocol.matchmaking_states import State
from swarmavg.runtime.channels import ChannelHub
from swarmavg.runtime.peer_links import PeerLinks
from swarmavg.security.identity import verify_signature
from swarmavg.telemetry.logs import get_logger

_log = get_logger("swarmavg.matchmaking")

PRESENCE_TTL: Final = 30.0
"""Seconds for which a presence lives in the directory; the same for everybody, since readers tell its age from it."""
RENEW_EVERY: Final = PRESENCE_TTL / 3
_RETRY_DIRECTORY: Final = 1.0
_FAREWELL: Final = 1.0
_MAX_STRANGERS: Final = 1024

OnMemberLost = Callable[[GroupId, PeerId, str], None]


class Matchmaker:
    """Finds groups for one averager, one at a time.

    Arguments:
        bits: group bits before the first search, shown to others meanwhile.
        on_member_lost: called with (group, peer, reason) when a member of the standing group says that it takes no part.
        plan_hash: see `matchmaking_core.PlanHash`; called inside the event loop.
    """

    def __init__(
        self,
        hub: ChannelHub,
        *,
        prefix: str,
        role: Role,
        config: MatchConfig,
        target_group_size: int | None,
        min_group_size: int,
        request_timeout: float,
        window: float,
        plan_hash: PlanHash,
        rng: random.Random,
        bits: str = "",
        on_member_lost: OnMemberLost | None = None,
    ) -> None:
        settings = MatchSettings(
            prefix=prefix,
            role=role,
            config=config,
            target_group_size=target_group_size,
            min_group_size=min_group_size,
            request_timeout=request_timeout,
            window=window,
        )
        signer = Signer(
            public_key=hub.public_key,
            swarm_id=hub.swarm_id,
            accepted_swarm_ids=hub.accepted_swarm_ids,
            sign=hub.sign,
            verify=verify_signature,
        )
        self._hub = hub
        self._topic = f"{prefix}.match"
        self._machine = Matchmaking(hub.id, settings, signer=signer, plan_hash=plan_hash, rng=rng, bits=bits)
        self._on_member_lost = on_member_lost
        self._links = PeerLinks(
            hub,
            f"match:{prefix}",
            timeout=request_timeout,
            limit=payload_limit,
            on_message=self._take_message,
            on_failed=lambda peer, reason: self._feed(PeerFailed(peer, reason)),
            on_lost=lambda peer: self._feed(LinkLost(peer)),
        )
        self._events: deque[MatchEvent] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[Group] | None = None
        self._stale = asyncio.Event()
        """Set when the directory should be given a fresh presence."""
        self._tasks: list[asyncio.Task[None]] = []
        self._strangers: dict[PeerId, str] = {}
        self._started = False
        self._closed = False

    # ---- life

    async def start(self) -> None:
        """Show the own presence and begin to watch the others'. Raises `ValueError` when the prefix is in use on this peer."""
        if self._closed:
            raise ClosedError("this matchmaker is closed")
        if self._started:
            return
        self._links.start()
        self._started = True
        self._stale.set()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._persist(self._watch), name=f"{self._topic}-watch"),
            loop.create_task(self._persist(self._publish), name=f"{self._topic}-publish"),
        ]

    async def aclose(self) -> None:
        """Leave: tell those concerned, withdraw the presence. Bounded by about two seconds; never raises; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._feed(Close())
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClosedError("the averager was closed while it looked for a group"))
        self._arm(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._started:
            await asyncio.gather(self._withdraw(), self._links.aclose())

    async def _withdraw(self) -> None:
        with suppress(TimeoutError, DirectoryError, ClosedError):
            async with asyncio.timeout(_FAREWELL):
                await self._hub.directory.withdraw(self._topic)

    # ---- finding groups

    async def find_group(self, request: LookRequest) -> Group:
        """Find a group. After it stands, `round_finished` must be called before the next search.

        Cancelling leaves cleanly and tells others. Raises `MatchmakingError` with everyone seen, `ClosedError`, and
        `LocalProtocolError` when another search or round is under way.
        """
        if self._closed or not self._started:
            raise ClosedError("this matchmaker is not running")
        if self._waiter is not None:
            raise LocalProtocolError("a search for a group is under way already")
        waiter: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        try:
            self._feed(Look(request))
            return await waiter
        except asyncio.CancelledError:
            self._feed(Cancel())
            raise
        finally:
            self._waiter = None
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # it may come at the same moment as a cancellation, which goes first

    def round_state(self, *, bits: str) -> None:
        """Show others other group bits: those for the step after the present round, or, when idle, for the next one.

        A search in progress keeps the bits that it was asked for; the next one brings its own.
        """
        if not self._machine.state.looks:
            self._feed(BitsChanged(bits))

    def round_finished(self, *, bits: str, ok: bool, failed_members: Collection[PeerId] = ()) -> None:
        """The round of the group is over. After a failed one the survivors are waited for in the next search."""
        if self._machine.state is State.IN_ROUND:
            self._feed(RoundFinished(bits, ok=ok, failed=frozenset(failed_members)))

    def adopt(self, signed_begin: bytes) -> Group | None:
        """A channel of a round brought a begin: if it names our latest join it is obeyed, and the group is returned.

        Also returned when it is the group that stands already. Never raises for bad bytes.
        """
        self._feed(BeginSeen(bytes(signed_begin)))
        group = self._machine.group
        return group if group is not None and group.signed == signed_begin else None

    def known_peers(self) -> dict[PeerId, str]:
        """Everyone seen under the prefix, with a line about each."""
        return self._machine.seen(self._now())

    def story(self) -> list[str]:
        """The latest moves and messages of the machine, for finding out why something happened."""
        return self._machine.story()

    # ---- the machine

    def _feed(self, event: MatchEvent) -> None:
        """Give the machine an event and do what it says. Events that this brings about wait for their turn."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                self._machine.receive(self._events.popleft(), self._now())
                for effect in self._machine.drain_effects():
                    self._carry_out(effect)
        finally:
            self._feeding = False
        if not self._closed:
            self._arm(self._machine.next_deadline())

    def _carry_out(self, effect: MatchEffect) -> None:
        match effect:
            case Send():
                self._links.send(effect.peer, *encode_message(effect.presence, effect.message))
            case Publish():
                self._stale.set()
            case Withdraw():
                pass  # aclose does it, after its last publication
            case Assembled():
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_result(effect.group)
            case Failed():
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(MatchmakingError(effect.message, effect.seen))
            case MemberLost():
                _log.info("member left its group", peer=effect.peer.short, group=effect.group_id, reason=effect.reason)
                if self._on_member_lost is not None:
                    self._on_member_lost(effect.group_id, effect.peer, effect.reason)

    def _arm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._feed(Tick())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _take_message(self, peer: PeerId, header: bytes, payload: bytes) -> None:
        presence, message = decode_message(header, payload)
        self._feed(MessageReceived(peer, presence, message))

    # ---- the directory

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Keep one of the two below going as long as the directory is open, whatever its back end does."""
        while True:
            try:
                await work()
            except DirectoryError as error:
                _log.warning("discovery failed, trying again", topic=self._topic, error=str(error))
            except ClosedError:
                return
            await asyncio.sleep(_RETRY_DIRECTORY)
            self._stale.set()

    async def _watch(self) -> None:
        async with self._hub.directory.watch(self._topic) as changes:
            async for change in changes:
                if change.record is None:
                    self._feed(PresenceGone(change.owner))
                    continue
                age = max(0.0, PRESENCE_TTL - change.record.expires_in)
                try:
                    presence = decode_presence(change.record.value)
                except RemoteProtocolError as error:
                    self._feed(PeerFailed(change.owner, f"its presence cannot be read: {error}"))
                    continue
                self._warn_of_stranger(change.owner, presence)
                self._feed(PresenceSeen(change.owner, presence, age))

    def _warn_of_stranger(self, peer: PeerId, presence: Presence) -> None:
        """Say once, at first sight, that a peer of the same prefix can never be averaged with, and why."""
        reason = self._machine.incompatibility(presence) if peer != self._hub.id else None
        if reason is None or self._strangers.get(peer) == reason:
            return
        while len(self._strangers) >= _MAX_STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        self._strangers[peer] = reason
        _log.warning("a peer of this prefix cannot be averaged with", topic=self._topic, peer=peer.short, reason=reason)

    async def _publish(self) -> None:
        """Publish whenever the presence changed, and often enough to keep it alive."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_EVERY):
                    await self._stale.wait()
            self._stale.clear()
            value = self._machine.presence(self._now()).encode()
            await self._hub.directory.publish(self._topic, value, ttl=PRESENCE_TTL, urgent=True)
