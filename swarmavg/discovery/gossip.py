"""The default directory: records spread over the swarm's own channels; no server, and nobody who must be there first.

Urgent records are pushed over all links as soon as they are known; periodic comparison of digests repairs what pushes missed
and carries the rest. Every peer announces its own addresses as a record, so the directory is the address book as well.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from swarmavg.discovery.address_book import PEERS_TOPIC, AddressBook, Announcement
from swarmavg.discovery.digests import fingerprint
from swarmavg.discovery.gossip_messages import Digest, GossipMessage, Passed, Records, Summary
from swarmavg.discovery.interface import Change, Record
from swarmavg.discovery.limits import MAX_TTL_SECONDS, check_topic, check_ttl, check_value
from swarmavg.discovery.link import Link, LinkTiming
from swarmavg.discovery.link_keeper import GOSSIP_PURPOSE, GossipNetwork, LinkKeeper, report_failure
from swarmavg.discovery.records import SignedRecord, Signer
from swarmavg.discovery.replica import Reception, Replica
from swarmavg.discovery.store import Held, StoreLimits
from swarmavg.discovery.topology import Topology
from swarmavg.errors import ClosedError, DirectoryError, RemoteProtocolError
from swarmavg.identifiers import Address, PeerId
from swarmavg.telemetry.logs import get_logger

MAX_BAD_RECORDS: Final = 8
"""Correct peers check records before they pass them on: a neighbour that keeps delivering forgeries makes them."""
GOODBYE_SECONDS: Final = 1.0
ANNOUNCERS: Final = 200
CLOCK_TOLERANCE_MS: Final = 100 * 365 * 86_400 * 1000

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipSettings:
    """How much gossip may use, and how often it does what. Times in seconds."""

    limits: StoreLimits = field(default_factory=StoreLimits)
    timing: LinkTiming = field(default_factory=LinkTiming)
    announce_interval: float = 20.0
    announce_ttl: float = 60.0
    """A peer that dies without a goodbye is forgotten after this time. In swarms of more than `ANNOUNCERS` peers this and the
    interval grow in proportion, so that the traffic of signs of life per link does not."""

    def __post_init__(self) -> None:
        if not 0 < self.announce_interval < check_ttl(self.announce_ttl):
            raise ValueError(
                f"announce_interval must be positive and below announce_ttl={self.announce_ttl!r}, "
                f"got {self.announce_interval!r}"
            )


class GossipDirectory:
    """Implements `swarmavg.discovery.interface.Directory` over the channels of one peer.

    Make it inside a running event loop. Records may be published and read before `start`, which never waits for anybody.

    Arguments:
        signer: the peer's identity.
        swarm_id: signed with every own record; records signed for another swarm are forgeries.
        network: how this peer reaches others.
        accepted_swarm_ids: records signed for these are taken too, while a swarm changes its token.
        bootstrap: addresses of any members, with or without their ids.
        rng: makes simulations repeatable.
        incarnation: tells this run of the process from earlier ones with the same key, and must grow. By default it is read
            off the wall clock; if that was set back, the swarm's answers correct it.
    """

    def __init__(
        self,
        signer: Signer,
        swarm_id: bytes,
        network: GossipNetwork,
        *,
        accepted_swarm_ids: Sequence[bytes] = (),
        bootstrap: Sequence[Address] = (),
        settings: GossipSettings | None = None,
        rng: random.Random | None = None,
        incarnation: int | None = None,
    ) -> None:
        self._settings = settings or GossipSettings()
        self._network = network
        rng = rng or random.Random()  # noqa: S311  (spreads load, guards nothing)
        self._rng = rng
        self._book = AddressBook(signer.peer_id)
        self._replica = Replica(
            signer,
            swarm_id,
            accepted_swarm_ids=accepted_swarm_ids,
            incarnation=_wall_clock_ms() if incarnation is None else incarnation,
            limits=self._settings.limits,
        )
        self._replica.on_change = self._note_change
        topology = Topology(self._book, bootstrap, signer.peer_id, rng)
        self._keeper = LinkKeeper(
            network,
            self._replica.store,
            self._book,
            topology,
            self._on_message,
            timing=self._settings.timing,
            rng=rng,
        )
        self._announced: Announcement | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._unserve: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Announce this peer, accept links and keep dialling. Returns at once; a missing bootstrap peer is not an error."""
        self._check_open()
        if self._tasks:
            return
        self._unserve = self._network.serve(GOSSIP_PURPOSE, self._keeper.accept)
        self.update_addresses()
        self._tasks = [
            asyncio.create_task(self._keeper.keep(), name="swarmavg-gossip-links"),
            asyncio.create_task(self._announce(), name="swarmavg-gossip-announce"),
        ]
        for task in self._tasks:
            task.add_done_callback(report_failure)

    async def publish(self, topic: str, value: bytes, *, ttl: float, urgent: bool = False) -> None:
        """See the interface. Raises `DirectoryError` when this peer has too many records."""
        self._check_open()
        if topic == PEERS_TOPIC:
            raise ValueError(f"topic {topic!r} is kept for the addresses of peers, which `update_addresses` publishes")
        held = self._replica.publish(topic, check_value(value), ttl=ttl, urgent=urgent, now=_now())
        if urgent:
            self._keeper.push([held.fingerprint])

    async def withdraw(self, topic: str) -> None:
        self._check_open()
        held = self._replica.withdraw(check_topic(topic), now=_now())
        if held is not None:
            self._keeper.push([held.fingerprint])

    async def fetch(self, topic: str) -> list[Record]:
        self._check_open()
        now = _now()
        return [live.as_record(now) for live in self._replica.live(check_topic(topic), now)]

    @asynccontextmanager
    async def watch(self, topic: str) -> AsyncIterator[AsyncIterator[Change]]:
        """See the interface. Once the directory is closed, iterating raises `ClosedError`."""
        self._check_open()
        feed = self._replica.feeds.open(check_topic(topic), self._replica.live(topic, _now()))
        try:
            yield feed
        finally:
            self._replica.feeds.close(feed)

    def update_addresses(self) -> None:
        """Tell everybody the own addresses, if they changed since they were last told."""
        announcement = Announcement(tuple(self._network.own_addresses()))
        if announcement != self._announced:
            self._publish_announcement(announcement)

    def addresses_of(self, peer: PeerId) -> list[Address]:
        """Where the peer said that it listens, each with its id; empty for clients and strangers."""
        return self._book.addresses_of(peer)

    def known_peers(self) -> list[PeerId]:
        """The other peers that are there, as far as is known, clients included, in order."""
        return self._book.peers()

    def linked_peers(self) -> list[PeerId]:
        """The neighbours with which this peer has a link now, in order."""
        return sorted(self._keeper.links)

    def bootstrap_failures(self) -> dict[Address, str]:
        """Bootstrap addresses whose latest dial failed, and why."""
        return dict(self._keeper.bootstrap_failures)

    def status(self) -> dict[str, Any]:
        """Plain numbers for a person or a monitor."""
        store = self._replica.store
        received = {reception.value: self._replica.counts[reception.value] for reception in Reception}
        links = len(self._keeper.links)
        return {"peers": len(self._book), "links": links, "records": len(store), "bytes": store.bytes, **received}

    async def aclose(self) -> None:
        """Withdraw the own records, tell the neighbours within a second, end the links. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        now = _now()
        goodbyes = [self._replica.withdraw(held.record.topic, now=now) for held in self._replica.own_live()]
        self._keeper.push(held.fingerprint for held in goodbyes if held is not None)
        try:
            await self._keeper.aclose(GOODBYE_SECONDS)
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            if self._unserve is not None:
                self._unserve()
            if self._timer is not None:
                self._timer.cancel()
            self._replica.feeds.close_all()

    async def _announce(self) -> None:
        while True:
            await asyncio.sleep(self._settings.announce_interval * self._crowding() * self._rng.uniform(0.8, 1.0))
            try:
                self._publish_announcement(Announcement(tuple(self._network.own_addresses())))
            except DirectoryError as error:
                log.warning("this peer could not announce itself", error=str(error))

    def _crowding(self) -> float:
        return max(1.0, len(self._book) / ANNOUNCERS)

    def _publish_announcement(self, announcement: Announcement) -> None:
        """Changed addresses are urgent; a mere sign of life travels with the next comparison."""
        urgent = announcement != self._announced
        self._announced = announcement
        ttl = min(self._settings.announce_ttl * self._crowding(), MAX_TTL_SECONDS)
        held = self._replica.publish(PEERS_TOPIC, announcement.encode(), ttl=ttl, urgent=urgent, now=_now())
        if urgent:
            self._keeper.push([held.fingerprint])

    def _on_message(self, link: Link, message: GossipMessage) -> None:
        match message:
            case Digest():
                link.answer_digest(message)
            case Summary():
                link.answer_summary(message)
            case Records():
                self._on_records(link, message)
            case Passed():
                ceiling = _wall_clock_ms() + CLOCK_TOLERANCE_MS
                if self._replica.passed(message.topic, message.version, ceiling=ceiling, now=_now()):
                    self._push_own()

    def _on_records(self, link: Link, message: Records) -> None:
        urgent = []
        for record, age in message.entries:
            reception = self._replica.receive(record, age=age, source=link.peer, now=_now())
            if reception is Reception.NEW:
                urgent += [fingerprint(record.topic, record.owner)] if record.urgent else []
            elif reception is Reception.FORGED:
                self._count_forgery(link, record)
            elif reception is Reception.OWN_OUTBID:
                log.warning("another process wrote records with this peer's key; they were replaced", topic=record.topic)
                self._push_own()
            self._compare_with(link, record)
        self._keeper.push(urgent, but=link)

    def _compare_with(self, link: Link, record: SignedRecord) -> None:
        """Note what the neighbour has, now that it showed this record; give it what it lacks."""
        held = self._replica.store.get(record.topic, record.owner)
        highest = self._replica.store.highest(record.topic, record.owner)
        if highest is None or highest < record.version:
            return
        name = fingerprint(record.topic, record.owner)
        if highest == record.version:
            link.has(name)
        elif held is not None:
            link.push([name])
        elif record.owner == link.peer:
            link.hint(record.topic, highest)

    def _count_forgery(self, link: Link, record: SignedRecord) -> None:
        link.bad_records += 1
        log.debug("dropped a record with a bad signature", topic=record.topic, owner=record.owner.short, link=link.peer.short)
        if link.bad_records >= MAX_BAD_RECORDS:
            raise RemoteProtocolError(f"{link.bad_records} records with bad signatures")

    def _push_own(self) -> None:
        self._keeper.push(held.fingerprint for held in self._replica.store.owned_by(self._replica.id))

    def _note_change(self, held: Held, present: bool) -> None:
        self._arm_expiry()
        record = held.record
        if record.topic != PEERS_TOPIC:
            return
        if present:
            changed = self._book.learn(record.owner, record.value, _now())
        elif record.withdrawn:
            changed = self._book.leave(record.owner)
        else:
            changed = self._book.lose(record.owner)
        if changed:
            self._keeper.reconsider()

    def _arm_expiry(self) -> None:
        """Set the timer to the next expiry, if it is not due earlier already."""
        end = self._replica.store.next_expiry()
        if end is None or self._closed or (self._timer is not None and self._timer.when() <= end):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(end, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._replica.expire(_now())
        self._arm_expiry()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this directory is closed")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _wall_clock_ms() -> int:
    """The only clock that goes on between two runs of a process. Nothing but the first guess of an incarnation uses it."""
    return time.time_ns() // 1_000_000
