"""One peer's copy of the directory: the record store with signatures checked, readers told, and own records kept on top.

No links and no tasks. `now` is passed in, on the event loop's clock.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence

from swarmavg.discovery.feeds import Feeds, Live
from swarmavg.discovery.interface import Version
from swarmavg.discovery.limits import MAX_TTL_SECONDS
from swarmavg.discovery.records import MAX_VERSION, SignedRecord, Signer, sign_record
from swarmavg.discovery.store import Held, RecordStore, StoreLimits, Verdict
from swarmavg.errors import DirectoryError
from swarmavg.identifiers import PeerId

TOMBSTONE_MARGIN = 10.0
TOMBSTONE_MIN_TTL = 30.0
OUTBID_INTERVAL = 5.0
"""Two processes that wrongly share one key outbid each other no more often than this."""


class Reception(enum.Enum):
    """What became of a record that a link delivered."""

    NEW = "new"
    IGNORED = "ignored"  # known, outdated or expired: the normal fate of most copies
    OVER_QUOTA = "over quota"
    FORGED = "forged"
    OWN_OUTBID = "own outbid"  # the remains of an earlier life of this peer: own records were written anew


class Replica:
    """The records this peer knows, and the pen with which it writes its own."""

    def __init__(
        self,
        signer: Signer,
        swarm_id: bytes,
        *,
        accepted_swarm_ids: Sequence[bytes] = (),
        incarnation: int,
        limits: StoreLimits | None = None,
    ) -> None:
        self.id: PeerId = signer.peer_id
        self.store = RecordStore(limits)
        self.feeds = Feeds()
        self.counts: Counter[str] = Counter()
        """How often each `Reception` happened, by its value."""
        self.on_change: Callable[[Held, bool], None] = lambda _held, _present: None
        """Called with every record that became present (True), or was withdrawn or expired (False)."""
        self._signer = signer
        self._swarm_id = swarm_id
        self._accepted = tuple(dict.fromkeys((swarm_id, *accepted_swarm_ids)))
        self._incarnation = incarnation
        self._counter = 0
        self._next_outbid = 0.0

    def publish(self, topic: str, value: bytes, *, ttl: float, urgent: bool, now: float) -> Held:
        """Write the own record. Raises `TypeError`, `ValueError`, and `DirectoryError` when it is one too many."""
        return self._write(topic, value, ttl=ttl, urgent=urgent, withdrawn=False, now=now)

    def withdraw(self, topic: str, *, now: float) -> Held | None:
        """Write a tombstone that outlives every copy of the own record; `None` if there is no such record."""
        held = self.store.get(topic, self.id)
        if held is None or held.record.withdrawn:
            return None
        return self._bury(topic, held.expires_at - now, now)

    def own_live(self) -> list[Held]:
        return [held for held in self.store.owned_by(self.id) if not held.record.withdrawn]

    def live(self, topic: str, now: float) -> list[Live]:
        return [as_live(held) for held in self.store.live(topic, now)]

    def receive(self, record: SignedRecord, *, age: float, source: PeerId, now: float) -> Reception:
        """Judge and merge a record that `source` delivered. Its signature is checked only if it would be news."""
        self.expire(now)
        reception = self._receive(record, age, source, now)
        self.counts[reception.value] += 1
        return reception

    def _receive(self, record: SignedRecord, age: float, source: PeerId, now: float) -> Reception:
        verdict = self.store.judge(record, age=age, source=source)
        if verdict is Verdict.OVER_QUOTA and record.owner != self.id:
            return Reception.OVER_QUOTA
        if verdict not in {Verdict.NEW, Verdict.OVER_QUOTA}:
            return Reception.IGNORED
        if not any(record.is_authentic(swarm_id) for swarm_id in self._accepted):
            return Reception.FORGED
        if record.owner == self.id:
            return self._meet_former_self(record, age, now)
        self.store.put(record, age=age, now=now, source=source)
        self._tell(self._held(record))
        return Reception.NEW

    def passed(self, topic: str, version: Version, *, ceiling: int, now: float) -> bool:
        """Somebody saw a newer own record than ours: continue above it, unless its incarnation is beyond `ceiling`.

        The word is unsigned; without the ceiling a liar could use up the version numbers.
        """
        mine = self.store.highest(topic, self.id)
        if mine is None or version <= mine or version.incarnation > ceiling:
            return False
        return self._outbid(version, now)

    def expire(self, now: float) -> None:
        """Drop what is over, and tell readers."""
        for held in self.store.expire(now):
            if not held.record.withdrawn:
                self.feeds.tell(held.record.topic, held.record.owner, None)
                self.on_change(held, False)

    def _meet_former_self(self, record: SignedRecord, age: float, now: float) -> Reception:
        """A process that ran before with this key left a record behind: overrule it."""
        if record.withdrawn and record.version < Version(self._incarnation, self._counter):
            return Reception.IGNORED
        if record.version >= Version(self._incarnation, 0) and not self._outbid(record.version, now):
            return Reception.IGNORED
        held = self.store.get(record.topic, self.id)
        if held is None and not record.withdrawn:
            self._bury(record.topic, record.ttl - age, now)
        return Reception.OWN_OUTBID

    def _outbid(self, version: Version, now: float) -> bool:
        """Continue with an incarnation above `version`: write all own records anew."""
        if now < self._next_outbid or version.incarnation >= MAX_VERSION - 1:
            return False
        self._next_outbid = now + OUTBID_INTERVAL
        if version.incarnation >= self._incarnation:
            self._incarnation = version.incarnation + 1
        for held in self.own_live():
            left = held.expires_at - now
            if left > 0:
                self.publish(held.record.topic, held.record.value, ttl=left, urgent=True, now=now)
        return True

    def _bury(self, topic: str, left: float, now: float) -> Held:
        ttl = min(max(left + TOMBSTONE_MARGIN, TOMBSTONE_MIN_TTL), MAX_TTL_SECONDS)
        return self._write(topic, b"", ttl=ttl, urgent=True, withdrawn=True, now=now)

    def _write(self, topic: str, value: bytes, *, ttl: float, urgent: bool, withdrawn: bool, now: float) -> Held:
        self._counter += 1
        record = sign_record(
            self._signer,
            self._swarm_id,
            topic=topic,
            version=Version(self._incarnation, self._counter),
            ttl=ttl,
            value=value,
            urgent=urgent,
            withdrawn=withdrawn,
        )
        verdict = self.store.put(record, age=0.0, now=now, source=None)
        if verdict is not Verdict.NEW:
            raise DirectoryError(f"cannot publish {topic!r}: {verdict.value}")
        held = self._held(record)
        self._tell(held)
        return held

    def _held(self, record: SignedRecord) -> Held:
        held = self.store.get(record.topic, record.owner)
        if held is None:
            raise LookupError(f"no record of {record.owner} under {record.topic!r}")
        return held

    def _tell(self, held: Held) -> None:
        record = held.record
        self.feeds.tell(record.topic, record.owner, None if record.withdrawn else as_live(held))
        self.on_change(held, not record.withdrawn)


def as_live(held: Held) -> Live:
    record = held.record
    return Live(topic=record.topic, owner=record.owner, value=record.value, version=record.version, expires_at=held.expires_at)
