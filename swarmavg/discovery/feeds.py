"""Watching: hand changes of a topic to readers, each at its own pace, in memory bounded by the number of live records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarmavg.discovery.interface import Change, Record, Version
from swarmavg.errors import ClosedError
from swarmavg.identifiers import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A record as a back end holds it: with the moment of its end on the loop's clock instead of the seconds left."""

    topic: str
    owner: PeerId
    value: bytes
    version: Version
    expires_at: float

    def as_record(self, now: float) -> Record:
        """What a reader who looks at `now` sees."""
        left = max(0.0, self.expires_at - now)
        return Record(topic=self.topic, owner=self.owner, value=self.value, version=self.version, expires_in=left)


class Feed:
    """One reader's iterator of `Change`. A reader that falls behind gets, per owner, only the latest state.

    Iterating raises `ClosedError` once the directory is closed and everything before that was read.
    """

    def __init__(self, topic: str, present: Iterable[Live], now: Callable[[], float]) -> None:
        self._topic = topic
        self._now = now
        self._pending: dict[PeerId, Live | None] = {live.owner: live for live in present}
        self._shown: set[PeerId] = set()
        self._closed = False
        self._wake = asyncio.Event()

    def tell(self, owner: PeerId, live: Live | None) -> None:
        """Note that the owner's record became `live`, or went away."""
        self._pending.pop(owner, None)
        if live is None and owner not in self._shown:
            return  # it came and went between two looks
        self._pending[owner] = live
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Change:
        while not self._pending:
            if self._closed:
                raise ClosedError(f"the directory was closed while watching {self._topic!r}")
            self._wake.clear()
            await self._wake.wait()
        owner = next(iter(self._pending))
        live = self._pending.pop(owner)
        if live is None:
            self._shown.discard(owner)
            return Change(topic=self._topic, owner=owner, record=None)
        self._shown.add(owner)
        return Change(topic=self._topic, owner=owner, record=live.as_record(self._now()))


class Feeds:
    """The open feeds of a directory, by topic. `now` is the clock of its records, by default that of the event loop."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._open: dict[str, dict[Feed, None]] = {}  # in order, so that simulations repeat

    def open(self, topic: str, present: Iterable[Live]) -> Feed:
        """Start a feed with what is there now; `close` it with the method of this class."""
        feed = Feed(topic, present, self._now)
        self._open.setdefault(topic, {})[feed] = None
        return feed

    def tell(self, topic: str, owner: PeerId, live: Live | None) -> None:
        for feed in self._open.get(topic, ()):
            feed.tell(owner, live)

    def close(self, feed: Feed) -> None:
        """Forget a feed; a reader that still waits on it gets `ClosedError`."""
        for topic, feeds in list(self._open.items()):
            feeds.pop(feed, None)
            if not feeds:
                del self._open[topic]
        feed.close()

    def close_all(self) -> None:
        for feeds in self._open.values():
            for feed in feeds:
                feed.close()
        self._open.clear()
