"""Which records hold: pure merge logic of the gossip directory. No clock, no I/O, no signature checks.

- Per (topic, owner) the highest version wins, whatever the order of arrival; a tombstone is a version like any other.
- A record is dropped when its age reaches its ttl. What is left is a **mark**, the version alone, so that a copy that some
  relay still holds, or an attacker replays, does not come back to life. Marks are bounded: who mints them loses its own.
- Quotas, per owner, per source (the link that delivered the record: ids are free to mint) and in total, in records and bytes.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from swarmavg.discovery.digests import FINE, BucketDigests, Fingerprint, fingerprint
from swarmavg.discovery.interface import Version
from swarmavg.discovery.marks import Marks
from swarmavg.discovery.records import SignedRecord
from swarmavg.identifiers import PeerId

RECORD_OVERHEAD_BYTES: Final = 512
"""Charged per record on top of its bytes: Python objects and indexes."""


class Verdict(enum.Enum):
    """What became, or would become, of an offered record."""

    NEW = "new"
    KNOWN = "known"  # this very version is held
    OUTDATED = "outdated"  # a higher version is held, or this one or a higher one was seen before
    EXPIRED = "expired"
    OVER_QUOTA = "over quota"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """How much is kept for others. The owner itself is exempt from all but the quota of an owner."""

    records: int = 65_536
    bytes: int = 64 * 1024 * 1024
    records_per_source: int = 16_384
    bytes_per_source: int = 16 * 1024 * 1024
    records_per_owner: int = 64
    bytes_per_owner: int = 512 * 1024
    marks: int = 65_536

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A record in the store. `born` is the moment, on the local clock, at which its age was 0."""

    record: SignedRecord
    born: float
    source: PeerId | None
    """The peer whose link delivered it; `None` for an own record."""
    fingerprint: Fingerprint

    @property
    def expires_at(self) -> float:
        return self.born + self.record.ttl

    @property
    def cost(self) -> int:
        return self.record.size + RECORD_OVERHEAD_BYTES


class RecordStore:
    """The records a peer holds, its own included."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.digests = BucketDigests()
        self._topics: dict[str, dict[PeerId, Held]] = {}
        self._buckets: list[dict[Fingerprint, Held]] = [{} for _ in range(FINE)]
        self._marks = Marks(self.limits.marks)
        self._ends: list[tuple[float, Fingerprint, Version]] = []
        self._usage = _Usage()

    def __len__(self) -> int:
        """Records held, tombstones included."""
        return self._usage.total_records

    @property
    def bytes(self) -> int:
        """What the records held are charged with in total."""
        return self._usage.total_bytes

    def judge(self, record: SignedRecord, *, age: float, source: PeerId | None) -> Verdict:
        """What `put` would do. Cheap: call it before the signature is verified."""
        if not 0 <= age < record.ttl:
            return Verdict.EXPIRED
        held = self.get(record.topic, record.owner)
        if held is not None and record.version <= held.record.version:
            return Verdict.KNOWN if record.version == held.record.version else Verdict.OUTDATED
        mark = self._marks.get(fingerprint(record.topic, record.owner)) if held is None else None
        if mark is not None and record.version <= mark:
            return Verdict.OUTDATED
        return Verdict.NEW if self._has_room(record, held, source) else Verdict.OVER_QUOTA

    def put(self, record: SignedRecord, *, age: float, now: float, source: PeerId | None) -> Verdict:
        """Merge an authentic record that was `age` seconds old when it arrived at `now`."""
        verdict = self.judge(record, age=age, source=source)
        if verdict is not Verdict.NEW:
            return verdict
        old = self.get(record.topic, record.owner)
        if old is not None:
            self._remove(old)
        self._insert(Held(record=record, born=now - age, source=source, fingerprint=fingerprint(record.topic, record.owner)))
        return verdict

    def expire(self, now: float) -> list[Held]:
        """Drop and return what is over at `now`, tombstones included."""
        over = []
        while self._ends and self._ends[0][0] <= now:
            _, name, version = heapq.heappop(self._ends)
            held = self.find(name)
            if held is not None and held.record.version == version:
                self._remove(held)
                self._marks.put(name, held.record.version, held.source)
                over.append(held)
        return over

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        while self._ends:
            end, name, version = self._ends[0]
            held = self.find(name)
            if held is not None and held.record.version == version:
                return end
            heapq.heappop(self._ends)
        return None

    def get(self, topic: str, owner: PeerId) -> Held | None:
        """The record of the highest version, or the tombstone."""
        return self._topics.get(topic, {}).get(owner)

    def find(self, name: Fingerprint) -> Held | None:
        return self._buckets[name[0]].get(name)

    def highest(self, topic: str, owner: PeerId) -> Version | None:
        """The highest version ever seen, as far as it is remembered."""
        held = self.get(topic, owner)
        return held.record.version if held is not None else self._marks.get(fingerprint(topic, owner))

    def live(self, topic: str, now: float) -> list[Held]:
        """Present and not withdrawn, sorted by owner."""
        owners = self._topics.get(topic, {})
        found = (owners[owner] for owner in sorted(owners, key=lambda owner: owner.digest))  # faster than comparing ids
        return [held for held in found if not held.record.withdrawn and held.expires_at > now]

    def all(self) -> Iterator[Held]:
        """Every record, tombstones included; the store must not change meanwhile."""
        return (held for bucket in self._buckets for held in bucket.values())

    def bucket(self, bucket: int, buckets: int) -> Iterator[Held]:
        """The records in one of 16 or 256 buckets (see `digests`); the store must not change meanwhile."""
        size = FINE // buckets
        return (held for fine in self._buckets[bucket * size : (bucket + 1) * size] for held in fine.values())

    def owned_by(self, owner: PeerId) -> list[Held]:
        return [held for held in self.all() if held.record.owner == owner]

    def _insert(self, held: Held) -> None:
        self._topics.setdefault(held.record.topic, {})[held.record.owner] = held
        self._buckets[held.fingerprint[0]][held.fingerprint] = held
        self._marks.forget(held.fingerprint)
        self.digests.toggle(held.fingerprint, held.record.version)
        self._usage.add(held, 1)
        heapq.heappush(self._ends, (held.expires_at, held.fingerprint, held.record.version))
        if len(self._ends) > 64 + 2 * len(self):  # replaced records leave their ends behind
            self._ends = [(h.expires_at, h.fingerprint, h.record.version) for h in self.all()]
            heapq.heapify(self._ends)

    def _remove(self, held: Held) -> None:
        owners = self._topics[held.record.topic]
        del owners[held.record.owner]
        if not owners:
            del self._topics[held.record.topic]
        del self._buckets[held.fingerprint[0]][held.fingerprint]
        self.digests.toggle(held.fingerprint, held.record.version)
        self._usage.add(held, -1)

    def _has_room(self, record: SignedRecord, old: Held | None, source: PeerId | None) -> bool:
        limits, usage = self.limits, self._usage
        cost = record.size + RECORD_OVERHEAD_BYTES
        more, more_bytes = (1, cost) if old is None else (0, cost - old.cost)
        fits_owner = (
            usage.owner_records[record.owner] + more <= limits.records_per_owner
            and usage.owner_bytes[record.owner] + more_bytes <= limits.bytes_per_owner
        )
        if source is None or not fits_owner:
            return fits_owner
        if usage.total_records + more > limits.records or usage.total_bytes + more_bytes > limits.bytes:
            return False
        if old is not None and old.source == source:
            return usage.source_bytes[source] + more_bytes <= limits.bytes_per_source
        return (
            usage.source_records[source] < limits.records_per_source
            and usage.source_bytes[source] + cost <= limits.bytes_per_source
        )


class _Usage:
    """Records and bytes held, counted by whom they are charged to. Empty counters are not kept."""

    def __init__(self) -> None:
        self.owner_records: Counter[PeerId] = Counter()
        self.owner_bytes: Counter[PeerId] = Counter()
        self.source_records: Counter[PeerId] = Counter()
        self.source_bytes: Counter[PeerId] = Counter()
        self.total_records = 0
        self.total_bytes = 0

    def add(self, held: Held, sign: int) -> None:
        self.total_records += sign
        self.total_bytes += sign * held.cost
        _count(self.owner_records, self.owner_bytes, held.record.owner, sign, held.cost)
        if held.source is not None:
            _count(self.source_records, self.source_bytes, held.source, sign, held.cost)


def _count(records: Counter[PeerId], sizes: Counter[PeerId], who: PeerId, sign: int, cost: int) -> None:
    records[who] += sign
    sizes[who] += sign * cost
    if not records[who]:
        del records[who], sizes[who]
