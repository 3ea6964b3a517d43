"""Whom a peer dials, and when: decisions only."""

import random

import pytest

from swarmavg.discovery.address_book import MAX_LOST_PEERS, AddressBook, Announcement
from swarmavg.discovery.topology import (
    DIALLED_LINKS,
    FULL_MESH,
    LOST_RETRY_SECONDS,
    MAX_DIALS,
    PRECEDENCE_SECONDS,
    RETRY_SECONDS,
    Backoff,
    Situation,
    Target,
    Topology,
)
from swarmavg.identifiers import Address, PeerId

ME = PeerId(b"m" * 32)
BOOTSTRAP = Address("tcp", "boot", 1)
ALONE = Situation(linked=(), dialled_links=0, dialling=(), avoided=())


def peer(number: int) -> PeerId:
    """Those up to 99 come before `ME`, the others after it."""
    return PeerId((b"a" if number < 100 else b"z") + number.to_bytes(31))


def announce(book: AddressBook, number: int, *, client: bool = False, now: float = 0.0) -> None:
    addresses = () if client else (Address("tcp", f"host{number}", 1),)
    book.learn(peer(number), Announcement(addresses).encode(), now)


def make(*bootstrap: Address, seed: int = 1) -> tuple[AddressBook, Topology]:
    book = AddressBook(ME)
    return book, Topology(book, bootstrap, ME, random.Random(seed))


def keys(targets: list[Target]) -> list[Address | PeerId]:
    return [target.key for target in targets]


def test_a_bootstrap_address_is_dialled_until_its_owner_is_linked() -> None:
    book, topology = make(BOOTSTRAP)
    (target,) = topology.plan(ALONE, listens=True, now=0.0)
    assert target == Target(BOOTSTRAP, (BOOTSTRAP,))
    topology.answered(target, peer(200))
    linked = Situation(linked=(peer(200),), dialled_links=1, dialling=(), avoided=())
    assert topology.plan(linked, listens=True, now=0.0) == []
    announce(book, 200)
    assert keys(topology.plan(ALONE, listens=True, now=0.0)) == [peer(200)], "by its own addresses once it announced them"


def test_a_bootstrap_address_with_a_failing_known_owner_is_dialled_again() -> None:
    book, topology = make(BOOTSTRAP)
    topology.answered(Target(BOOTSTRAP, (BOOTSTRAP,)), peer(200))
    announce(book, 200)
    topology.failed(peer(200), 0.0)
    assert keys(topology.plan(ALONE, listens=True, now=0.0)) == [BOOTSTRAP], "another process may live there now"


def test_failures_are_retried_for_ever_at_a_bounded_pace() -> None:
    _, topology = make(BOOTSTRAP)
    now, gaps = 0.0, []
    for _ in range(40):
        topology.failed(BOOTSTRAP, now)
        started = now
        while not topology.plan(ALONE, listens=True, now=now):
            now += 0.25
        gaps.append(now - started)
    assert 0.5 <= gaps[0] <= 1.25
    assert all(RETRY_SECONDS / 2 <= gap <= RETRY_SECONDS + 0.25 for gap in gaps[8:])


def test_a_peer_does_not_dial_itself() -> None:
    _, topology = make(BOOTSTRAP, Address("tcp", "me", 1, ME))
    topology.answered(Target(BOOTSTRAP, (BOOTSTRAP,)), ME)
    assert topology.plan(ALONE, listens=True, now=0.0) == []


def test_a_small_swarm_becomes_a_full_mesh_and_the_smaller_id_dials_first() -> None:
    book, topology = make()
    for number in (1, 101, 102):
        announce(book, number, now=5.0)
    announce(book, 50, client=True)
    assert keys(topology.plan(ALONE, listens=True, now=5.0)) == [peer(101), peer(102)]
    assert keys(topology.plan(ALONE, listens=True, now=5.0 + PRECEDENCE_SECONDS)) == [peer(1), peer(101), peer(102)]
    assert keys(topology.plan(ALONE, listens=False, now=5.0)) == [peer(1), peer(101), peer(102)], "nobody dials a client"


def test_a_large_swarm_gets_a_few_random_links() -> None:
    book, topology = make()
    for number in range(101, 101 + 3 * FULL_MESH):
        announce(book, number)
    chosen = keys(topology.plan(ALONE, listens=True, now=0.0))
    assert len(set(chosen)) == DIALLED_LINKS
    peers = [key for key in chosen if isinstance(key, PeerId)]
    some = Situation(linked=peers[:4], dialled_links=4, dialling=peers[4:5], avoided=())
    more = keys(topology.plan(some, listens=True, now=0.0))
    assert len(more) == DIALLED_LINKS - 5
    assert not set(more) & set(chosen[:5])
    _, other = make(seed=2)
    other._book = book
    assert keys(other.plan(ALONE, listens=True, now=0.0)) != chosen, "others choose otherwise"


def test_the_number_of_dials_at_once_is_bounded() -> None:
    _, topology = make(*(Address("tcp", f"boot{n}", 1) for n in range(50)))
    assert len(topology.plan(ALONE, listens=True, now=0.0)) == MAX_DIALS
    busy = Situation(linked=(), dialled_links=0, dialling=[Address("tcp", f"boot{n}", 1) for n in range(MAX_DIALS)], avoided=())
    assert topology.plan(busy, listens=True, now=0.0) == []


def test_avoided_and_linked_peers_are_left_alone() -> None:
    book, topology = make()
    announce(book, 101)
    announce(book, 102)
    situation = Situation(linked=(peer(101),), dialled_links=1, dialling=(), avoided=(peer(102),))
    assert topology.plan(situation, listens=True, now=9.0) == []


def test_a_peer_that_sent_us_away_is_left_alone_for_a_while() -> None:
    book, topology = make()
    announce(book, 101)
    topology.sent_away(peer(101), 0.0)
    assert topology.plan(ALONE, listens=True, now=RETRY_SECONDS / 2 - 1) == []
    assert keys(topology.plan(ALONE, listens=True, now=RETRY_SECONDS)) == [peer(101)]


def test_lost_peers_are_dialled_for_ever_and_those_who_left_are_not() -> None:
    book, topology = make()
    announce(book, 101)
    announce(book, 102)
    assert book.lose(peer(101))
    assert book.leave(peer(102))
    assert book.peers() == []
    assert keys(topology.plan(ALONE, listens=True, now=0.0)) == [peer(101)]
    now = 0.0
    for _ in range(20):
        topology.failed(peer(101), now)
        now += LOST_RETRY_SECONDS
        assert keys(topology.plan(ALONE, listens=True, now=now)) == [peer(101)]
    announce(book, 101)
    assert book.lost() == []


def test_memory_of_lost_peers_is_bounded() -> None:
    book, _ = make()
    for number in range(MAX_LOST_PEERS + 10):
        announce(book, number)
        book.lose(peer(number))
    assert len(book.lost()) == MAX_LOST_PEERS
    assert peer(0) not in book.lost(), "the oldest goes first"


def test_a_good_link_clears_the_record_of_failures() -> None:
    book, topology = make(BOOTSTRAP)
    for _ in range(10):
        topology.failed(BOOTSTRAP, 0.0)
    topology.answered(Target(BOOTSTRAP, (BOOTSTRAP,)), peer(101))
    topology.lasted(peer(101))
    assert keys(topology.plan(ALONE, listens=True, now=0.0)) == [BOOTSTRAP]
    assert book.addresses_of(peer(101)) == []


def test_an_unreadable_announcement_counts_as_one_without_addresses() -> None:
    book, _ = make()
    announce(book, 101)
    assert book.learn(peer(101), b"\xc1", 0.0)
    assert book.peers() == [peer(101)]
    assert book.addresses_of(peer(101)) == []


@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_backoff_grows_to_its_cap_and_forgets_what_it_is_told_to(cap: float) -> None:
    backoff = Backoff(random.Random(3), cap)
    for _ in range(50):
        backoff.failed("a", 100.0)
    assert 100.0 + cap / 2 <= backoff.ready_at("a") <= 100.0 + cap
    assert backoff.has_failed("a")
    backoff.retain({"b"})
    assert backoff.ready_at("a") == 0.0
    assert not backoff.has_failed("a")
