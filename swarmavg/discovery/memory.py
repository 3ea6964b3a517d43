"""A directory for peers that share a process: tests, and demonstrations without a network.

Nothing is signed, since nothing leaves the process; every member sees a publication at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context

from swarmavg.discovery.feeds import Feeds, Live
from swarmavg.discovery.interface import Change, Record, Version
from swarmavg.discovery.limits import check_topic, check_ttl, check_value
from swarmavg.errors import ClosedError, DirectoryError
from swarmavg.identifiers import PeerId


class SharedDirectory:
    """What several `MemoryDirectory` have in common. All of them must live in one event loop.

    shared = SharedDirectory()
    mine = shared.directory(my_peer_id)
    """

    def __init__(self) -> None:
        self._records: dict[str, dict[PeerId, Live]] = {}
        self._feeds: dict[MemoryDirectory, Feeds] = {}
        self._starts: dict[PeerId, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def directory(self, owner: PeerId) -> MemoryDirectory:
        """A new member, whose publications belong to `owner`."""
        return MemoryDirectory(self, owner)

    def _join(self, member: MemoryDirectory) -> int:
        self._feeds[member] = Feeds(_now)
        self._starts[member.owner] = self._starts.get(member.owner, 0) + 1
        return self._starts[member.owner]

    def _leave(self, member: MemoryDirectory) -> None:
        self._feeds.pop(member).close_all()

    def _feeds_of(self, member: MemoryDirectory) -> Feeds:
        return self._feeds[member]

    def _put(self, live: Live) -> None:
        if live.version.incarnation < self._starts[live.owner]:
            raise DirectoryError(f"cannot publish {live.topic!r}: a later member uses the same id {live.owner}")
        self._records.setdefault(live.topic, {})[live.owner] = live
        self._tell(live.topic, live.owner, live)
        self._arm()

    def _drop(self, topic: str, owner: PeerId) -> None:
        owners = self._records.get(topic, {})
        if owners.pop(owner, None) is None:
            return
        if not owners:
            del self._records[topic]
        self._tell(topic, owner, None)
        self._arm()

    def _owned(self, owner: PeerId, incarnation: int) -> list[str]:
        return [
            topic
            for topic, owners in self._records.items()
            if owner in owners and owners[owner].version.incarnation == incarnation
        ]

    def _live(self, topic: str) -> list[Live]:
        now = _now()
        owners = self._records.get(topic, {})
        return [owners[owner] for owner in sorted(owners) if owners[owner].expires_at > now]

    def _tell(self, topic: str, owner: PeerId, live: Live | None) -> None:
        for feeds in self._feeds.values():
            feeds.tell(topic, owner, live)

    def _arm(self) -> None:
        """Set the one timer to the next expiry."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [live.expires_at for owners in self._records.values() for live in owners.values()]
        if ends:
            self._timer = asyncio.get_running_loop().call_at(min(ends), self._expire, context=Context())

    def _expire(self) -> None:
        self._timer = None
        now = _now()
        over = [live for owners in self._records.values() for live in owners.values() if live.expires_at <= now]
        for live in over:
            self._drop(live.topic, live.owner)
        self._arm()


class MemoryDirectory:
    """One peer's view of a `SharedDirectory`; implements `swarmavg.discovery.interface.Directory`."""

    def __init__(self, shared: SharedDirectory, owner: PeerId) -> None:
        self.owner = owner
        self._shared = shared
        self._incarnation = shared._join(self)  # noqa: SLF001  (the two classes are one mechanism)
        self._counter = 0
        self._closed = False

    async def publish(self, topic: str, value: bytes, *, ttl: float, urgent: bool = False) -> None:
        """Replace the own record; `urgent` makes no difference here, everybody sees everything at once."""
        del urgent
        self._check_open()
        check_topic(topic)
        check_value(value)
        self._counter += 1
        live = Live(
            topic=topic,
            owner=self.owner,
            value=value,
            version=Version(self._incarnation, self._counter),
            expires_at=_now() + check_ttl(ttl),
        )
        self._shared._put(live)  # noqa: SLF001

    async def withdraw(self, topic: str) -> None:
        self._check_open()
        if check_topic(topic) in self._shared._owned(self.owner, self._incarnation):  # noqa: SLF001
            self._shared._drop(topic, self.owner)  # noqa: SLF001

    async def fetch(self, topic: str) -> list[Record]:
        self._check_open()
        now = _now()
        return [live.as_record(now) for live in self._shared._live(check_topic(topic))]  # noqa: SLF001

    @asynccontextmanager
    async def watch(self, topic: str) -> AsyncIterator[AsyncIterator[Change]]:
        """See the interface. Once the directory is closed, iterating raises `ClosedError`."""
        self._check_open()
        feeds = self._shared._feeds_of(self)  # noqa: SLF001
        feed = feeds.open(check_topic(topic), self._shared._live(topic))  # noqa: SLF001
        try:
            yield feed
        finally:
            feeds.close(feed)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        for topic in self._shared._owned(self.owner, self._incarnation):  # noqa: SLF001
            self._shared._drop(topic, self.owner)  # noqa: SLF001
        self._shared._leave(self)  # noqa: SLF001

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this directory is closed")


def _now() -> float:
    """One clock for all members, whatever a simulation makes each of them believe: the event loop's, seen from outside."""
    return Context().run(asyncio.get_running_loop().time)
