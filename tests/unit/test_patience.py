"""Patience: who is called silent or stalled, when, and who never is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmavg.protocol.round_control import Term
from swarmavg.protocol.round_messages import RoundBeat
from swarmavg.runtime.patience import (
    CONTRIBUTOR_BASE,
    GAP_FACTOR,
    LONGEST_STRETCH,
    MIN_RATE,
    REDUCER_BASE,
    Patience,
)
from swarmavg.runtime.round_link import LONGEST_BEAT
from swarmavg.transport.framing import HEAD

SHARED_SLOW_LINE = 1_000_000 / 8 / 32
"""Bytes per second of one of 32 channels on a line of 1 Mbit/s."""
BEAT_BYTES = HEAD.size + len(RoundBeat(term=Term(1000, 1000), waiting_for=()).encode())
START = 1000.0

BASES = st.sampled_from([CONTRIBUTOR_BASE, REDUCER_BASE])
PATIENT = settings(max_examples=150, deadline=None)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    size: int
    is_beat: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    at: float
    kind: str
    seconds: float


def watch(
    patience: Patience,
    arrivals: Iterable[Arrival],
    *,
    until: float,
    beat: float = 0.5,
    owes: Callable[[float], bool] = lambda now: True,
    told_of_beats: bool = False,
) -> Verdict | None:
    """The first verdict of a watchdog that looks at the channel at every beat."""
    due = sorted(arrivals, key=lambda arrival: arrival.at)
    total, last, index = 0, START, 0
    for tick in range(1, int((until - START) / beat) + 1):
        now = START + tick * beat
        while index < len(due) and due[index].at <= now:
            total, last = total + due[index].size, due[index].at
            if told_of_beats and due[index].is_beat:
                patience.discount(due[index].size)
            index += 1
        patience.observe(total, last, now)
        for kind, seconds in (("silent", patience.silent(now)), ("stalled", patience.stalled(now, owes(now)))):
            if seconds is not None:
                return Verdict(now, kind, seconds)
    return None


def steady(rate: float, piece: int, *, until: float, first: float = 0.0) -> list[Arrival]:
    """`piece` bytes at a time."""
    every = piece / rate
    return [Arrival(START + first + number * every, piece) for number in range(int((until - START - first) / every) + 1)]


def beats(every: float, *, until: float, size: int = BEAT_BYTES) -> list[Arrival]:
    return [Arrival(START + number * every, size, is_beat=True) for number in range(1, int((until - START) / every) + 1)]


# --- who is never accused


@PATIENT
@given(
    base=BASES,
    rate=st.floats(SHARED_SLOW_LINE, 1e9),
    piece=st.integers(1, 16 * 1024),
    beat=st.floats(0.05, 0.5),
    first=st.floats(0, 1),
    debts=st.lists(st.booleans(), min_size=1, max_size=20),
)
@example(base=CONTRIBUTOR_BASE, rate=SHARED_SLOW_LINE, piece=16 * 1024, beat=0.5, first=1.0, debts=[True])
def test_a_steady_sender_on_a_shared_slow_line_is_never_accused(
    base: float, rate: float, piece: int, beat: float, first: float, debts: list[bool]
) -> None:
    until = START + 5 * base
    piece = max(piece, int(rate / 100))  # enough to see every moment, not to take for ever
    verdict = watch(
        Patience(None, START, base=base),
        steady(rate, piece, until=until, first=first),
        until=until,
        beat=beat,
        owes=lambda now: debts[int(now) % len(debts)],
    )
    assert verdict is None


@PATIENT
@given(base=BASES, rate=st.floats(1.1 * MIN_RATE, 2 * MIN_RATE), beat=st.floats(0.05, 0.5))
def test_the_slowest_sender_that_moves_stays(base: float, rate: float, beat: float) -> None:
    until = START + 10 * base
    assert watch(Patience(None, START, base=base), steady(rate, 20, until=until), until=until, beat=beat) is None


@PATIENT
@given(base=BASES, growths=st.lists(st.floats(1.0, 0.9 * GAP_FACTOR), min_size=1, max_size=6), phase=st.floats(0.1, 1.0))
def test_bursts_stretch_the_limit(base: float, growths: list[float], phase: float) -> None:
    """Each pause may be nearly as many times the longest before as the factor says."""
    longest, at, arrivals = phase * base, START, []
    for growth in growths:
        at += 0.9 * longest
        arrivals.append(Arrival(at, 10_000_000))
        longest = min(max(longest, growth * 0.9 * longest), LONGEST_STRETCH * base)
    patience = Patience(None, START, base=base)
    assert watch(patience, arrivals, until=at, beat=0.25) is None
    assert base <= patience.limit <= LONGEST_STRETCH * base


@PATIENT
@given(base=BASES, held_up=st.floats(1.5, 500), before=st.floats(0, 9), explicit=st.one_of(st.none(), st.floats(10, 100)))
def test_nobody_is_accused_of_the_time_that_this_process_was_held_up(
    base: float, held_up: float, before: float, explicit: float | None
) -> None:
    patience = Patience(explicit, START, base=base)
    now = START + before
    patience.observe(0, START, now)
    assert patience.stalled(START, owes=True) is None
    now += held_up
    patience.forgive(held_up)
    limit = patience.limit
    patience.observe(0, START, now)
    assert patience.silent(now) is None
    assert patience.stalled(now, owes=True) is None
    patience.observe(100, now, now)
    assert patience.limit <= max(limit, GAP_FACTOR * (before + 1e-6)), "nor does it count as a gap of theirs"


def test_what_came_just_before_this_process_was_held_up_is_not_held_against_them() -> None:
    patience = Patience(None, START, base=CONTRIBUTOR_BASE)
    patience.observe(10, START + 1, START + 1)
    patience.forgive(50)  # from 1.2 to 51.2
    patience.observe(20, START + 1.1, START + 51.5)
    assert patience.silent(START + 51.5) is None
    assert patience.silent(START + 60) is None
    assert patience.silent(START + 61.2) is not None


def test_what_owes_nothing_does_not_stall() -> None:
    until = START + 100
    patience = Patience(None, START, base=CONTRIBUTOR_BASE)
    assert watch(patience, beats(0.5, until=until), until=until, owes=lambda now: False) is None


def test_a_debt_counts_only_while_it_lasts_without_a_break() -> None:
    until = START + 300
    patience = Patience(None, START, base=CONTRIBUTOR_BASE)
    assert watch(patience, beats(0.5, until=until), until=until, owes=lambda now: now % 10 != 0) is None


# --- who always is


@PATIENT
@given(
    base=BASES,
    explicit=st.one_of(st.none(), st.floats(2, 200)),
    beat=st.floats(0.05, 0.5),
    lives=st.floats(0, 30),
    owed=st.booleans(),
)
def test_the_dead_are_found_within_the_limit_and_a_beat(
    base: float, explicit: float | None, beat: float, lives: float, owed: bool
) -> None:
    patience = Patience(explicit, START, base=base)
    arrivals = steady(100_000, 10_000, until=START + lives)
    dies = max(arrivals[-1].at, START)
    verdict = watch(patience, arrivals, until=dies + 300, beat=beat, owes=lambda now: owed)
    assert verdict is not None
    assert verdict.at <= dies + patience.limit + beat + 1e-6
    assert verdict.seconds >= patience.limit
    if verdict.kind == "silent":
        assert verdict.at <= dies + patience.limit + beat + 1e-6
        assert verdict.seconds == pytest.approx(verdict.at - dies)
    else:
        assert owed


@PATIENT
@given(base=BASES, moves=st.floats(0, 30), every=st.floats(0.25, 0.5), beat=st.floats(0.05, 0.5))
def test_heartbeats_do_not_count_as_payload(base: float, moves: float, every: float, beat: float) -> None:
    patience = Patience(None, START, base=base)
    payload = steady(SHARED_SLOW_LINE, 500, until=START + moves)
    verdict = watch(patience, [*payload, *beats(every, until=START + 200)], until=START + 200, beat=beat)
    assert verdict is not None
    assert verdict.kind == "stalled"
    assert patience.limit == base
    assert verdict.at <= payload[-1].at + base + 2 * beat + base / 32
    since = verdict.at - verdict.seconds
    assert sum(arrival.size for arrival in payload if arrival.at > since) < MIN_RATE * verdict.seconds, "as it was said"
    assert base <= verdict.seconds <= base + 2 * beat + base / 32


@PATIENT
@given(limit=st.floats(0.02, 2), moves=st.floats(0, 3))
def test_nor_do_fast_heartbeats_of_the_impatient(limit: float, moves: float) -> None:
    patience = Patience(limit, START, base=CONTRIBUTOR_BASE)
    payload = steady(100_000, int(5_000 * limit), until=START + moves)
    until = START + moves + 3 * limit
    verdict = watch(patience, [*payload, *beats(limit / 4, until=until)], until=until, beat=limit / 4, told_of_beats=True)
    assert verdict is not None
    assert verdict.kind == "stalled"
    assert verdict.at <= payload[-1].at + 1.5 * limit + 1e-6
    assert verdict.seconds >= limit


@PATIENT
@given(base=BASES, rate=st.floats(1, 0.9 * MIN_RATE))
def test_a_trickle_is_a_stall(base: float, rate: float) -> None:
    until = START + 5 * base
    verdict = watch(Patience(None, START, base=base), steady(rate, 4, until=until), until=until)
    assert verdict is not None
    assert verdict.kind == "stalled"


def test_after_a_held_up_process_the_dead_are_found_all_the_same() -> None:
    patience = Patience(None, START, base=CONTRIBUTOR_BASE)
    patience.observe(0, START, START + 1)
    patience.observe(10, START + 20.5, START + 21)  # it arrived just before this process noticed the lag
    patience.forgive(20)
    patience.observe(10, START + 20.5, START + 21)
    limit = patience.limit
    assert patience.silent(START + 21 + limit) is None
    assert patience.silent(START + 21 + limit + 0.01) is not None


# --- limits


@PATIENT
@given(limit=st.floats(0.01, 1000), gaps=st.lists(st.floats(0, 3), max_size=20), base=BASES)
def test_an_explicit_limit_binds_exactly(limit: float, gaps: list[float], base: float) -> None:
    patience = Patience(limit, START, base=base)
    now, total = START, 0
    for gap in gaps:
        now, total = now + gap * limit, total + 1
        patience.observe(total, now, now)
        assert patience.limit == limit
        assert patience.silent(now) is None
    assert patience.silent(now + 0.999 * limit) is None
    over = patience.silent(now + 1.001 * limit)
    assert over == pytest.approx(1.001 * limit)


@PATIENT
@given(base=BASES, steps=st.lists(st.tuples(st.floats(0, 200), st.integers(0, 100_000), st.booleans()), max_size=40))
def test_the_limit_never_shrinks_and_verdicts_only_harden(base: float, steps: list[tuple[float, int, bool]]) -> None:
    patience = Patience(None, START, base=base)
    now = last = START
    total = 0
    for passed, size, owes in steps:
        before, now = patience.limit, now + passed
        if size:
            total, last = total + size, now
        patience.observe(total, last, now)
        assert base <= before <= patience.limit <= LONGEST_STRETCH * base
        verdicts = [patience.silent(now + later) for later in (0.0, 1.0, 100.0, 1000.0)]
        known = [math.inf if verdict is None else verdict for verdict in verdicts]
        first = next((index for index, verdict in enumerate(known) if verdict < math.inf), len(known))
        assert known[first:] == sorted(known[first:])
        assert all(verdict < math.inf for verdict in known[first:]), "once silent, silent until a byte comes"
        stalled = patience.stalled(now, owes)
        assert stalled is None or (owes and stalled >= patience.limit)
        assert patience.stalled(now, owes) == stalled, "asking changes nothing"


def test_a_stall_ends_with_the_payload_that_comes() -> None:
    patience = Patience(10, START, base=CONTRIBUTOR_BASE)
    assert patience.stalled(START, owes=True) is None
    assert patience.stalled(START + 10, owes=True) == 10
    assert patience.stalled(START + 11, owes=True) == 11
    patience.observe(10_000, START + 12, START + 12)
    assert patience.stalled(START + 12, owes=True) is None
    assert patience.stalled(START + 21.9, owes=True) is None
    assert patience.stalled(START + 22, owes=True) == 10


def test_the_constants_fit_each_other() -> None:
    assert 3 * BEAT_BYTES / LONGEST_BEAT < MIN_RATE, "heartbeats alone are a stall, with a wide margin"
    assert 10 * MIN_RATE < SHARED_SLOW_LINE
    assert CONTRIBUTOR_BASE >= 4 * LONGEST_BEAT
    assert REDUCER_BASE >= 2 * CONTRIBUTOR_BASE
    assert (LONGEST_STRETCH * CONTRIBUTOR_BASE, LONGEST_STRETCH * REDUCER_BASE) == (60, 120)
