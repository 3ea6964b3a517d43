"""Keeps the gossip links: dials as the topology says, accepts, resolves duplicates, avoids who misbehaves, says goodbye."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from swarmavg.discovery.address_book import AddressBook
from swarmavg.discovery.digests import Fingerprint
from swarmavg.discovery.gossip_messages import GossipMessage
from swarmavg.discovery.link import Link, LinkTiming
from swarmavg.discovery.store import RecordStore
from swarmavg.discovery.topology import Situation, Target, Topology
from swarmavg.errors import (
    AddressError,
    AuthenticationError,
    ChannelError,
    ChannelRefusedError,
    ChannelViolationError,
    ClosedError,
    RemoteProtocolError,
    SecurityError,
    SwarmError,
)
from swarmavg.identifiers import Address, PeerId
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.interface import Channel, OnChannel

GOSSIP_PURPOSE: Final = "gossip"
DIAL_TIMEOUT: Final = 5.0
PLAN_INTERVAL: Final = 0.5
AVOID_SECONDS: Final = 60.0
MAX_AVOIDED: Final = 1024
MAX_COMPLAINTS: Final = 256
CROSSING_SECONDS: Final = 5.0
"""Two links to one peer opened within this time are taken for dials that crossed; otherwise the older one is dead."""
GOOD_SECONDS: Final = 5.0
"""A link that lasted as long was a success."""
MAX_ACCEPTED: Final = 48
"""In a large swarm, beyond as many accepted links the oldest is sent away: it has others to choose from."""
MAX_LINKS: Final = 512

CODE_DUPLICATE: Final = "duplicate-link"
CODE_AVOIDED: Final = "avoided"
CODE_BUSY: Final = "too-many-links"

log = get_logger(__name__)


class GossipNetwork(Protocol):
    """What gossip needs of the peer that it is part of."""

    @property
    def id(self) -> PeerId: ...

    def own_addresses(self) -> list[Address]:
        """Where others can reach this peer; empty in client mode."""

    async def dial_address(self, address: Address, purpose: str, timeout: float) -> Channel:
        """Open a channel to whoever listens there; with a peer id in the address, only to that peer. Raises `SwarmError`s."""

    def serve(self, purpose: str, handler: OnChannel) -> Callable[[], None]:
        """Hand inbound channels of this purpose to `handler`; returns the call that ends it."""


class LinkKeeper:
    """All links of one peer. `links` has at most one per neighbour."""

    def __init__(
        self,
        network: GossipNetwork,
        store: RecordStore,
        book: AddressBook,
        topology: Topology,
        on_message: Callable[[Link, GossipMessage], None],
        *,
        timing: LinkTiming,
        rng: random.Random,
    ) -> None:
        self.links: dict[PeerId, Link] = {}
        self._network = network
        self._store = store
        self._book = book
        self._topology = topology
        self._on_message = on_message
        self._timing = timing
        self._rng = rng
        self._serving: dict[Link, None] = {}  # in order, so that simulations repeat
        self._dials: dict[Address | PeerId, asyncio.Task[None]] = {}
        self._dialled: set[asyncio.Task[None]] = set()
        self._avoided: dict[PeerId, float] = {}
        self._complaints: set[Address] = set()
        self.bootstrap_failures: dict[Address, str] = {}
        """Bootstrap addresses whose latest dial failed, and why."""
        self._changed = asyncio.Event()
        self._closing = False

    async def keep(self) -> None:
        """Dial, for ever. To be run as a task."""
        while True:
            self._changed.clear()
            self._shed()
            for target in self._plan():
                self._start_dial(target)
            try:
                async with asyncio.timeout(PLAN_INTERVAL):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def reconsider(self) -> None:
        """Something changed that may call for a dial."""
        self._changed.set()

    def push(self, names: Iterable[Fingerprint], *, but: Link | None = None) -> None:
        """Send the current records of these names to every neighbour but one, at once."""
        names = tuple(names)
        for link in self.links.values():
            if link is not but:
                link.push(names)

    async def accept(self, channel: Channel) -> None:
        """Serve a channel that a neighbour opened, until it ends."""
        refusal = self._refusal(channel.peer)
        if refusal is not None:
            channel.abort(f"{channel.peer.short} may not gossip here now", code=refusal)
            return
        await self._serve(channel, dialled=False)

    async def aclose(self, timeout: float) -> None:
        """Send what waits on the links, for at most `timeout` seconds, and end them. No task is left."""
        self._closing = True
        await _cancel(self._dials.values())
        for link in self._serving:
            link.close()
        try:
            if not await self._all_ended(timeout):
                log.debug("gossip neighbours did not take the goodbye in time", links=len(self._serving))
        finally:
            for link in self._serving:
                link.abort("the directory was closed")
            await self._all_ended(timeout)
            await _cancel(self._dialled)

    async def _all_ended(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                for link in list(self._serving):
                    await link.ended.wait()
        except TimeoutError:
            return False
        return True

    def _refusal(self, peer: PeerId) -> str | None:
        if self._closing or peer == self._network.id:
            return CODE_BUSY
        if peer in self._now_avoided():
            return CODE_AVOIDED
        if len(self._serving) >= MAX_LINKS and peer not in self.links:
            return CODE_BUSY
        return None

    def _plan(self) -> list[Target]:
        situation = Situation(
            linked=self.links,
            dialled_links=sum(link.dialled for link in self.links.values()),
            dialling=self._dials,
            avoided=self._now_avoided(),
        )
        now = asyncio.get_running_loop().time()
        return self._topology.plan(situation, listens=bool(self._network.own_addresses()), now=now)

    def _start_dial(self, target: Target) -> None:
        task = asyncio.create_task(self._dial(target), name=f"swarmavg-gossip-dial-{target.addresses[0]}")
        self._dials[target.key] = task
        self._dialled.add(task)
        task.add_done_callback(lambda task: self._dial_over(target, task))

    def _dial_over(self, target: Target, task: asyncio.Task[None]) -> None:
        """The dial failed, or the link that came of it has ended."""
        self._dialled.discard(task)
        if self._dials.get(target.key) is task:
            del self._dials[target.key]
        if report_failure(task):
            self._topology.failed(target.key, task.get_loop().time())
        self._changed.set()

    async def _dial(self, target: Target) -> None:
        """Dial and, if somebody answers, serve the link until it ends."""
        now = asyncio.get_running_loop().time
        channel = await self._first_answer(target)
        if channel is None:
            self._topology.failed(target.key, now())
            return
        self._topology.answered(target, channel.peer)
        if channel.peer == self._network.id or channel.peer in self._now_avoided():
            channel.abort("not a neighbour")
            return
        self._dials.pop(target.key, None)  # it is a link now
        opened = now()
        await self._serve(channel, dialled=True)
        if isinstance(target.key, Address) and now() - opened < GOOD_SECONDS:
            self._topology.failed(target.key, now())

    async def _first_answer(self, target: Target) -> Channel | None:
        for address in target.addresses:
            try:
                channel = await self._network.dial_address(address, GOSSIP_PURPOSE, DIAL_TIMEOUT)
            except ClosedError:
                return None
            except SwarmError as error:
                self._report_dial(address, error, bootstrap=target.key == address)
            else:
                self.bootstrap_failures.pop(address, None)
                return channel
        return None

    def _report_dial(self, address: Address, error: SwarmError, *, bootstrap: bool) -> None:
        """Tell, once per address, what would otherwise look like an empty swarm: nobody at a bootstrap address, a wrong token,
        or an address that can't be.
        """
        if bootstrap:
            self.bootstrap_failures[address] = str(error)
        telling = bootstrap or isinstance(error, SecurityError | AuthenticationError | AddressError)
        if not telling or address in self._complaints:
            log.debug("gossip dial failed", address=str(address), error=str(error))
            return
        if len(self._complaints) >= MAX_COMPLAINTS:
            self._complaints.clear()
        self._complaints.add(address)
        log.warning("cannot reach the swarm through this address; trying on", address=str(address), reason=str(error))

    async def _serve(self, channel: Channel, *, dialled: bool) -> None:
        link = Link(channel, self._store, self._on_message, dialled=dialled, timing=self._timing, rng=self._rng)
        if not self._adopt(link):
            return
        self._serving[link] = None
        try:
            why = await link.run()
        finally:
            self._serving.pop(link, None)
            replaced = self.links.get(link.peer) is not link
            if not replaced:
                del self.links[link.peer]
            self._changed.set()
        if not self._closing:
            self._link_ended(link, why, replaced=replaced)

    def _adopt(self, link: Link) -> bool:
        """Make it the link to its peer, unless the one that is there already is to be kept."""
        present = self.links.get(link.peer)
        if present is not None and not self._supersedes(link, present):
            link.abort("this peer is linked already", code=CODE_DUPLICATE)
            present.compare()
            return False
        if present is not None:
            present.abort("replaced by another link", code=CODE_DUPLICATE)
        self.links[link.peer] = link
        self._changed.set()
        return True

    def _supersedes(self, new: Link, old: Link) -> bool:
        """Both sides must come to the same answer: of dials that crossed, that of the smaller id stays."""
        if new.dialled == old.dialled or new.opened_at - old.opened_at > CROSSING_SECONDS:
            return True
        return new.dialled == (self._network.id < new.peer)

    def _shed(self) -> None:
        accepted = [link for link in self.links.values() if not link.dialled]
        excess = len(accepted) - MAX_ACCEPTED
        if excess <= 0 or self._topology.is_small:
            return
        flexible = [link for link in accepted[:-1] if self._book.addresses_of(link.peer)]
        for link in flexible[:excess]:
            link.abort("too many links, choose others", code=CODE_BUSY)

    def _link_ended(self, link: Link, why: ChannelError | RemoteProtocolError | None, *, replaced: bool) -> None:
        now = asyncio.get_running_loop().time()
        log.debug("gossip link ended", peer=link.peer.short, reason=str(why or "closed by the other side"))
        if isinstance(why, RemoteProtocolError | ChannelViolationError):
            self._avoid(link.peer, why)
        elif isinstance(why, ChannelRefusedError) and why.code in {CODE_BUSY, CODE_AVOIDED}:
            self._topology.sent_away(link.peer, now)
        elif not replaced:
            if now - link.opened_at >= GOOD_SECONDS:
                self._topology.lasted(link.peer)
            self._topology.failed(link.peer, now)

    def _avoid(self, peer: PeerId, why: SwarmError) -> None:
        log.warning("gossip avoids a peer that broke the protocol", peer=str(peer), seconds=AVOID_SECONDS, reason=str(why))
        self._avoided[peer] = asyncio.get_running_loop().time() + AVOID_SECONDS
        while len(self._avoided) > MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]

    def _now_avoided(self) -> dict[PeerId, float]:
        now = asyncio.get_running_loop().time()
        self._avoided = {peer: until for peer, until in self._avoided.items() if until > now}
        return self._avoided


def report_failure(task: asyncio.Task[None]) -> bool:
    """Whether a background task died of an error nobody expected; it is logged. (The boundary for bugs, also of transports.)"""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return False
    log.error("gossip task failed", task=task.get_name(), error=repr(error), exc_info=error)
    return True


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
