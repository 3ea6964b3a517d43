"""The merge logic: order does not matter, what is gone stays gone, nobody takes more than is granted."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.discovery.digests import BucketDigests, fingerprint
from swarmavg.discovery.interface import Version
from swarmavg.discovery.marks import Marks
from swarmavg.discovery.records import SignedRecord
from swarmavg.discovery.store import RECORD_OVERHEAD_BYTES, RecordStore, StoreLimits, Verdict
from swarmavg.identifiers import PeerId

PEERS = [PeerId(bytes([n]) * 32) for n in range(6)]
LINK, OTHER_LINK = PEERS[4], PEERS[5]


def make(
    owner: int = 0,
    topic: str = "t",
    counter: int = 1,
    *,
    incarnation: int = 1,
    ttl: float = 10.0,
    value: bytes = b"v",
    withdrawn: bool = False,
) -> SignedRecord:
    """Unsigned: the store never looks at signatures."""
    body = b"b" * (100 + len(value))
    return SignedRecord(
        topic=topic,
        owner=PEERS[owner],
        public_key=b"",
        version=Version(incarnation, counter),
        ttl=ttl,
        value=b"" if withdrawn else value,
        urgent=False,
        withdrawn=withdrawn,
        body=body,
        signature=b"s" * 64,
    )


def content(store: RecordStore) -> set[tuple[str, PeerId, Version, float]]:
    return {(held.record.topic, held.record.owner, held.record.version, held.expires_at) for held in store.all()}


# One version has one content, as the owner's signature guarantees: so all fields follow from owner, topic and version.
records = st.builds(
    lambda owner, topic, counter: make(
        owner, topic, counter, ttl=5.0 + counter, value=bytes(counter), withdrawn=counter % 3 == 0
    ),
    st.integers(0, 3),
    st.sampled_from("xyz"),
    st.integers(1, 6),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(records, max_size=20), st.randoms(use_true_random=False))
def test_merging_is_commutative_and_idempotent(arriving: list[SignedRecord], rng: random.Random) -> None:
    one, two = RecordStore(), RecordStore()
    for record in arriving:
        one.put(record, age=1.0, now=100.0, source=LINK)
    again = [*arriving, *arriving]
    rng.shuffle(again)
    for record in again:
        two.put(record, age=1.0, now=100.0, source=LINK)
    assert content(one) == content(two)
    assert one.digests.encode(256) == two.digests.encode(256)
    assert one.bytes == two.bytes


@settings(max_examples=100, deadline=None)
@given(st.lists(records, max_size=10), st.lists(records, max_size=10), st.lists(records, max_size=10))
def test_merging_whole_stores_is_associative(a: list[SignedRecord], b: list[SignedRecord], c: list[SignedRecord]) -> None:
    def merged(*stores: RecordStore) -> RecordStore:
        result = RecordStore()
        for store in stores:
            for held in store.all():
                result.put(held.record, age=0.0, now=0.0, source=LINK)
        return result

    def filled(arriving: list[SignedRecord]) -> RecordStore:
        result = RecordStore()
        for record in arriving:
            result.put(record, age=0.0, now=0.0, source=LINK)
        return result

    one, two, three = filled(a), filled(b), filled(c)
    assert content(merged(merged(one, two), three)) == content(merged(one, merged(two, three)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(records, max_size=8), min_size=3, max_size=3))
def test_replicas_that_exchange_what_their_digests_show_converge(shares: list[list[SignedRecord]]) -> None:
    stores = [RecordStore() for _ in shares]
    for store, share in zip(stores, shares, strict=True):
        for record in share:
            store.put(record, age=0.0, now=0.0, source=LINK)
    for one, two in [*itertools.permutations(stores, 2)] * 2:
        _, differing = one.digests.differing(two.digests.encode(256))
        for held in list(two.all()):
            if held.fingerprint[0] in differing:
                one.put(held.record, age=0.0, now=0.0, source=LINK)
    assert len({frozenset(content(store)) for store in stores}) == 1
    assert all(not stores[0].digests.differing(store.digests.encode(16))[1] for store in stores)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(records, st.floats(0.0, 12.0), st.floats(0.0, 4.0)), max_size=30))
def test_versions_only_grow_and_nothing_outlives_its_ttl(arriving: Any) -> None:
    store, now = RecordStore(), 0.0
    born: dict[tuple[str, PeerId], float] = {}
    seen: dict[tuple[str, PeerId], Version] = {}
    for record, age, pause in arriving:
        now += pause
        store.expire(now)
        key = (record.topic, record.owner)
        earlier = seen.get(key)
        verdict = store.put(record, age=age, now=now, source=LINK)
        if verdict is Verdict.NEW:
            assert earlier is None or record.version > earlier
            seen[key] = record.version
            born[key] = now - age
        for held in store.all():
            at = (held.record.topic, held.record.owner)
            assert held.record.version == seen[at]
            assert held.born == born[at]
            assert now < held.expires_at
        for topic in "xyz":
            assert all(not held.record.withdrawn for held in store.live(topic, now))


def test_a_withdrawn_record_does_not_come_back_even_after_its_tombstone_expired() -> None:
    store = RecordStore()
    store.put(make(counter=1, ttl=100.0), age=0.0, now=0.0, source=LINK)
    store.put(make(counter=2, ttl=5.0, withdrawn=True), age=0.0, now=1.0, source=LINK)
    assert store.live("t", 1.0) == []
    assert [held.record.withdrawn for held in store.expire(6.0)] == [True]
    assert len(store) == 0
    assert store.put(make(counter=1, ttl=100.0), age=6.0, now=6.0, source=OTHER_LINK) is Verdict.OUTDATED
    assert store.put(make(counter=2, ttl=5.0, withdrawn=True), age=0.0, now=6.0, source=OTHER_LINK) is Verdict.OUTDATED
    assert store.put(make(counter=3), age=0.0, now=6.0, source=OTHER_LINK) is Verdict.NEW


def test_an_expired_record_is_not_revived_by_a_relay_that_lies_about_its_age() -> None:
    store = RecordStore()
    store.put(make(ttl=10.0), age=4.0, now=0.0, source=LINK)
    assert store.next_expiry() == 6.0
    assert store.expire(5.9) == []
    assert len(store.expire(6.0)) == 1
    assert store.put(make(ttl=10.0), age=0.0, now=6.0, source=LINK) is Verdict.OUTDATED
    assert store.highest("t", PEERS[0]) == Version(1, 1)


@pytest.mark.parametrize("age", [10.0, 11.0, -0.1, float("nan")])
def test_a_record_at_or_beyond_its_ttl_is_not_taken(age: float) -> None:
    assert RecordStore().put(make(ttl=10.0), age=age, now=0.0, source=LINK) is Verdict.EXPIRED


def test_a_later_start_of_the_owner_wins_over_any_counter() -> None:
    store = RecordStore()
    store.put(make(incarnation=1, counter=99), age=0.0, now=0.0, source=LINK)
    assert store.put(make(incarnation=2, counter=1), age=0.0, now=0.0, source=LINK) is Verdict.NEW
    assert store.put(make(incarnation=1, counter=100), age=0.0, now=0.0, source=LINK) is Verdict.OUTDATED


def test_the_next_expiry_ignores_replaced_records() -> None:
    store = RecordStore()
    store.put(make(counter=1, ttl=3.0), age=0.0, now=0.0, source=LINK)
    store.put(make(counter=2, ttl=9.0), age=0.0, now=0.0, source=LINK)
    assert store.next_expiry() == 9.0
    assert store.expire(5.0) == []


def test_replacing_a_record_again_and_again_takes_no_memory() -> None:
    store = RecordStore()
    for counter in range(1, 2000):
        store.put(make(counter=counter, ttl=50_000.0), age=0.0, now=0.0, source=LINK)
    assert len(store) == 1
    assert len(store._ends) < 200
    assert store.bytes == make().size + RECORD_OVERHEAD_BYTES


SMALL = StoreLimits(
    records=20,
    bytes=20_000,
    records_per_source=10,
    bytes_per_source=10_000,
    records_per_owner=4,
    bytes_per_owner=4_000,
    marks=8,
)


def test_quota_of_an_owner() -> None:
    store = RecordStore(SMALL)
    verdicts = [store.put(make(topic=str(n)), age=0.0, now=0.0, source=LINK) for n in range(6)]
    assert verdicts == [Verdict.NEW] * 4 + [Verdict.OVER_QUOTA] * 2
    assert store.put(make(topic="0", counter=2), age=0.0, now=0.0, source=LINK) is Verdict.NEW, "replacing is allowed"
    assert store.put(make(topic="0", counter=3, value=b"x" * 3000), age=0.0, now=0.0, source=LINK) is Verdict.OVER_QUOTA


def test_quota_of_a_source_whatever_ids_it_mints() -> None:
    store = RecordStore(SMALL)

    def flood(source: PeerId) -> list[Verdict]:
        return [
            store.put(
                dataclasses.replace(make(), owner=PeerId(bytes([n]) + source.digest[1:])), age=0.0, now=0.0, source=source
            )
            for n in range(12)
        ]

    assert flood(LINK).count(Verdict.NEW) == 10
    assert store.put(make(owner=1), age=0.0, now=0.0, source=OTHER_LINK) is Verdict.NEW, "other links are not affected"
    assert flood(OTHER_LINK).count(Verdict.NEW) == 9, "and the total holds"
    assert store.put(make(owner=2), age=0.0, now=0.0, source=PEERS[3]) is Verdict.OVER_QUOTA
    assert store.put(make(owner=3), age=0.0, now=0.0, source=None) is Verdict.NEW, "own records always find room"


def test_a_record_replaced_by_way_of_another_link_is_charged_to_that_link() -> None:
    store = RecordStore(SMALL)
    for n in range(10):
        store.put(make(owner=n // 4, topic=str(n)), age=0.0, now=0.0, source=LINK)
    assert store.judge(make(owner=3), age=0.0, source=LINK) is Verdict.OVER_QUOTA
    store.put(make(owner=0, topic="0", counter=2), age=0.0, now=0.0, source=OTHER_LINK)
    assert store.judge(make(owner=3), age=0.0, source=LINK) is Verdict.NEW


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 8), st.integers(1, 5), st.integers(0, 2000), st.sampled_from([LINK, OTHER_LINK])
        ),
        max_size=80,
    )
)
def test_quotas_hold_after_any_history(arriving: Any) -> None:
    store = RecordStore(SMALL)
    for step, (owner, topic, counter, size, source) in enumerate(arriving):
        now = float(step)
        store.expire(now)
        record = make(owner, str(topic), counter, ttl=20.0 + counter, value=b"x" * size)
        store.put(record, age=0.0, now=now, source=source)
        held = list(store.all())
        assert len(held) <= SMALL.records
        assert store.bytes == sum(h.cost for h in held) <= SMALL.bytes
        for who in PEERS:
            delivered, owned = [h for h in held if h.source == who], [h for h in held if h.record.owner == who]
            assert len(delivered) <= SMALL.records_per_source
            assert sum(h.cost for h in delivered) <= SMALL.bytes_per_source
            assert len(owned) <= SMALL.records_per_owner
            assert sum(h.cost for h in owned) <= SMALL.bytes_per_owner
        assert len(store._marks) <= SMALL.marks


def test_who_mints_marks_loses_its_own() -> None:
    marks = Marks(4)
    marks.put(b"honest", Version(1, 1), LINK)
    for n in range(100):
        marks.put(str(n).encode(), Version(1, n), OTHER_LINK)
    assert len(marks) == 4
    assert marks.get(b"honest") == Version(1, 1)
    assert marks.get(b"99") == Version(1, 99)


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="marks must be a positive integer"):
        StoreLimits(marks=0)


def test_a_change_shows_in_exactly_one_bucket() -> None:
    one, two = BucketDigests(), BucketDigests()
    name = fingerprint("t", PEERS[0])
    one.toggle(name, Version(1, 1))
    assert one.differing(two.encode(256)) == (256, [name[0]])
    assert one.differing(two.encode(16)) == (16, [name[0] // 16])
    two.toggle(name, Version(1, 2))
    assert one.differing(two.encode(256)) == (256, [name[0]])
    two.toggle(name, Version(1, 2))
    two.toggle(name, Version(1, 1))
    assert one.differing(two.encode(256)) == (256, [])
