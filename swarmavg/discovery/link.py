"""One gossip link: a channel to a neighbour, what waits to be sent on it, and the two tasks that send and receive.

What waits is kept as fingerprints, not bytes: the record is looked up when its turn comes, so that a slow link skips the
versions it missed and its memory is bounded by the store's.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from swarmavg.discovery.digests import COARSE, FINE, Fingerprint
from swarmavg.discovery.gossip_messages import (
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    MAX_SUMMARY_ENTRIES,
    Digest,
    GossipMessage,
    Passed,
    Records,
    Summary,
    decode_message,
)
from swarmavg.discovery.interface import Version
from swarmavg.discovery.records import SignedRecord
from swarmavg.discovery.store import RecordStore
from swarmavg.errors import ChannelError, ChannelLostError, RemoteProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.transport.interface import END, Channel

SMALL_STORE = 64
"""Up to as many records, a new link gets all of them at once, and digests are coarse."""
MAX_REPAIR_RECORDS = 512
"""Records sent in answer to one summary: a receiver whose quotas refuse them must not be flooded with them for ever."""
MAX_HINTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """Seconds."""

    digest_interval: float = 2.0
    """Between digests, give or take a quarter."""
    silence: float = 10.0
    """A link on which nothing arrives for so long is lost: the other side sends digests."""
    send: float = 20.0
    """A message that the other side does not take for so long breaks the link."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")


class Link:
    """A link over an open channel. `on_message` is called for each message and may raise `RemoteProtocolError`."""

    def __init__(
        self,
        channel: Channel,
        store: RecordStore,
        on_message: Callable[[Link, GossipMessage], None],
        *,
        dialled: bool,
        timing: LinkTiming,
        rng: random.Random,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.channel = channel
        self.peer: PeerId = channel.peer
        self.dialled = dialled
        self.opened_at = loop.time()
        self.ended = asyncio.Event()
        self.bad_records = 0
        self._store = store
        self._on_message = on_message
        self._timing = timing
        self._rng = rng
        self._now = loop.time
        self._wake = asyncio.Event()
        self._records: dict[Fingerprint, None] = {}
        self._repairs: dict[Fingerprint, None] = {}
        self._truncated = False
        self._lacked = math.inf  # how many of our records the other side's answers to our last digest showed it to lack
        self._lacked_before = math.inf
        self._summary: tuple[int, set[int]] = (FINE, set())
        self._hints: dict[str, Version] = {}
        self._digest_at = self.opened_at
        self._watchdog: asyncio.TimerHandle | None = None
        self._lost: ChannelLostError | None = None
        self._closing = False

    def push(self, names: Iterable[Fingerprint]) -> None:
        """Send the current records of these names as soon as the link allows."""
        self._records.update(dict.fromkeys(names))
        self._wake.set()

    def has(self, name: Fingerprint) -> None:
        """The other side just sent our current record of this name: no need to send it there."""
        self._records.pop(name, None)
        self._repairs.pop(name, None)

    def hint(self, topic: str, version: Version) -> None:
        """Tell the neighbour that its own record of `topic` is older than one of its own seen before."""
        if len(self._hints) < MAX_HINTS:
            self._hints[topic] = version
            self._wake.set()

    def compare(self) -> None:
        """Send a digest now."""
        self._digest_at = self._now()
        self._wake.set()

    def answer_digest(self, digest: Digest) -> None:
        """Send a summary of the buckets that differ. Raises `RemoteProtocolError`."""
        buckets, differing = self._store.digests.differing(digest.digests)
        if differing:
            self._summary = (buckets, set(differing))
            self._wake.set()

    def answer_summary(self, summary: Summary) -> None:
        """Send what the summary shows to be missing or older on the other side, in random order."""
        missing = [
            held.fingerprint
            for bucket in sorted(summary.listed)
            for held in self._store.bucket(bucket, summary.buckets)
            if _is_newer(held.record.version, summary.entries.get(held.fingerprint))
        ]
        self._rng.shuffle(missing)
        self._lacked += len(missing)
        room = MAX_REPAIR_RECORDS - len(self._repairs)
        self._truncated = self._truncated or len(missing) > room
        self._repairs.update(dict.fromkeys(missing[:room]))
        self._wake.set()

    def close(self) -> None:
        """Send what waits, then end the link. Whoever cannot wait for that calls `abort`."""
        self._closing = True
        self._wake.set()

    def abort(self, reason: str, *, code: str = "") -> None:
        self.channel.abort(reason, code=code)

    async def run(self) -> ChannelError | RemoteProtocolError | None:
        """Serve the link until it ends, and say why: `None` if the other side ended it cleanly."""
        if len(self._store) <= SMALL_STORE:
            self.push([held.fingerprint for held in self._store.all()])
        sender = asyncio.create_task(self._send_all(), name=f"swarmavg-gossip-send-{self.peer.short}")
        sender.add_done_callback(self._sender_done)
        self._watch_silence(self._now())
        try:
            why = await self._receive_all()
        finally:
            if self._watchdog is not None:
                self._watchdog.cancel()
            sender.cancel()
            await asyncio.wait([sender])
            self.ended.set()
            self.channel.abort("gossip link ended")
        failure = None if sender.cancelled() else sender.exception()
        if failure is None or isinstance(failure, ChannelError):
            return self._lost or failure or why
        raise failure

    def _sender_done(self, sender: asyncio.Task[None]) -> None:
        if not sender.cancelled() and sender.exception() is not None:
            self.channel.abort(f"gossip link failed: {sender.exception()}")  # wakes the receiver, which ends the link

    async def _receive_all(self) -> ChannelError | RemoteProtocolError | None:
        try:
            while (message := await self.channel.receive(_no_payload)) is not END:
                self._on_message(self, decode_message(message.header))
                await asyncio.sleep(0)  # messages that are there already must not starve the rest of the process
        except RemoteProtocolError as error:
            self.channel.abort(str(error), code="malformed")
            return error
        except ChannelError as error:
            return error
        return None

    async def _send_all(self) -> None:
        while True:
            while (header := self._next_header()) is not None:
                await self._send(header)
            if self._closing:
                await self.channel.aclose()
                return
            await self._rest()

    async def _send(self, header: bytes) -> None:
        try:
            async with asyncio.timeout(self._timing.send):
                await self.channel.send(header)
        except TimeoutError:
            raise ChannelLostError(f"{self.peer.short} took no message for {self._timing.send:g} s") from None

    async def _rest(self) -> None:
        """Wait for work or the next digest."""
        try:
            async with asyncio.timeout_at(self._digest_at):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _watch_silence(self, due: float) -> None:
        """A timer's callback: end the link if the other side has fallen silent; called again until the link ends."""
        now = self._now()
        silent = now - max(self.channel.last_received, self.opened_at)
        we_lagged = now > due + 1.0  # what has arrived meanwhile is not read yet
        if silent > self._timing.silence and not we_lagged:
            self._lost = ChannelLostError(f"{self.peer.short} has been silent for {silent:.0f} s")
            self.channel.abort(str(self._lost))
            return
        due = now + self._timing.silence / 4
        self._watchdog = asyncio.get_running_loop().call_at(due, self._watch_silence, due)

    def _next_header(self) -> bytes | None:
        """The most urgent message that is due, or `None`."""
        self._wake.clear()
        if self._records and (batch := self._take(self._records)):
            return Records(batch).encode()
        if self._hints:
            topic = next(iter(self._hints))
            return Passed(topic, self._hints.pop(topic)).encode()
        if self._summary[1]:
            return self._next_summary().encode()
        if self._repairs and (batch := self._take(self._repairs)):
            return Records(batch).encode()
        if self._truncated:
            self._truncated = False
            if self._lacked < self._lacked_before:  # the other side takes what we send: go on at once
                self._digest_at = self._now()
        return self._next_digest()

    def _next_digest(self) -> bytes | None:
        if self._now() < self._digest_at:
            return None
        self._lacked_before, self._lacked = self._lacked, 0.0
        self._digest_at = self._now() + self._timing.digest_interval * self._rng.uniform(0.75, 1.25)
        return Digest(self._store.digests.encode(COARSE if len(self._store) <= SMALL_STORE else FINE)).encode()

    def _take(self, names: dict[Fingerprint, None]) -> tuple[tuple[SignedRecord, float], ...]:
        """Remove names up to a full message, and return their records with their ages."""
        batch: list[tuple[SignedRecord, float]] = []
        size = 0
        while names and size < MAX_BATCH_BYTES and len(batch) < MAX_BATCH_RECORDS:
            name = next(iter(names))
            del names[name]
            held = self._store.find(name)
            age = self._now() - held.born if held is not None else 0.0
            if held is not None and age < held.record.ttl:
                batch.append((held.record, age))
                size += held.record.size
        return tuple(batch)

    def _next_summary(self) -> Summary:
        """Of as many of the differing buckets as fit one message; a bucket that alone is too large is cut short."""
        buckets, waiting = self._summary
        entries: dict[Fingerprint, Version] = {}
        listed: set[int] = set()
        for bucket in sorted(waiting):
            content = {held.fingerprint: held.record.version for held in self._store.bucket(bucket, buckets)}
            if listed and len(entries) + len(content) > MAX_SUMMARY_ENTRIES:
                break
            entries.update(islice(content.items(), MAX_SUMMARY_ENTRIES))
            listed.add(bucket)
        waiting -= listed
        return Summary(buckets, frozenset(listed), entries)


def _is_newer(mine: Version, theirs: Version | None) -> bool:
    return theirs is None or mine > theirs


def _no_payload(_header: bytes, size: int) -> memoryview:
    raise RemoteProtocolError(f"a gossip message has no payload, got one of {size} bytes")
