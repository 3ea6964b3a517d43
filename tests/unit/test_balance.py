"""`balance` against a bisection that knows nothing of how it works."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from swarmavg.planning.balance import balance

FINE = 10**15  # elements enough that rounding disappears below 1e-9

Group = tuple[list[float | None], list[bool], list[bool]]

BANDWIDTHS = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0, 10.0]), st.floats(1e-3, 1e3))


@st.composite
def groups(draw: st.DrawFn, bandwidths: st.SearchStrategy[float | None] = BANDWIDTHS, smallest: int = 0) -> Group:
    """Nodes, clients and auxiliaries, at least one of whom can reduce, and at least `smallest` contributors."""
    roles = draw(st.lists(st.sampled_from([(True, True), (True, True), (True, False), (False, True)]), min_size=1, max_size=9))
    given_bandwidths = [draw(bandwidths) for _ in roles]
    contributes, reduces = [role[0] for role in roles], [role[1] for role in roles]
    assume(sum(contributes) >= smallest)
    assume(any(able and bandwidth != 0 for able, bandwidth in zip(reduces, given_bandwidths, strict=True)))
    return given_bandwidths, contributes, reduces


def seconds(group: Group, fractions: Sequence[float]) -> list[float]:
    """What the specification says each peer takes per unit of vector; 0 for those whose time does not count."""
    bandwidths, contributes, _ = group
    contributors = sum(contributes)
    times = []
    for bandwidth, own, fraction in zip(bandwidths, contributes, fractions, strict=True):
        moved = own * (1 - fraction) + fraction * (contributors - own)
        times.append(moved / bandwidth if bandwidth else 0.0)
    return times


def is_feasible(group: Group, limit: float) -> bool:
    """Whether some split lets everybody finish within the limit: each peer's fraction lies in an interval."""
    bandwidths, contributes, reduces = group
    contributors = sum(contributes)
    least = most = 0.0
    for bandwidth, own, able in zip(bandwidths, contributes, reduces, strict=True):
        if not bandwidth:
            continue
        low, high = 0.0, 1.0 if able else 0.0
        slope, slack = contributors - 2 * own, limit * bandwidth - own
        if slope > 0:
            high = min(high, slack / slope)
        elif slope < 0:
            low = max(low, slack / slope)
        elif slack < 0:
            return False
        if low > high:
            return False
        least, most = least + low, most + high
    return least <= 1 <= most


def shortest_time(group: Group) -> float:
    low, high = 0.0, 1e-6
    while not is_feasible(group, high):
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if is_feasible(group, middle) else (middle, high)
    return high


@settings(max_examples=400, deadline=None)
@given(groups())
@example(([1.0, 1.0], [True, True], [True, False]))
@example(([0.0, 3.0, 5.0], [True, False, False], [True, True, True]))
@example(([1.0, 10.0, 100.0, 0.0], [True] * 4, [True] * 4))
@example(([1e-3, 100.0, 100.0, 100.0], [True] * 4, [False, True, True, True]))
def test_slowest_peer_is_as_fast_as_can_be(group: Group) -> None:
    shares = balance(*group, total=FINE)
    assert sum(shares) == FINE
    best = shortest_time(group)
    assert max(seconds(group, [share / FINE for share in shares])) <= best * (1 + 1e-9) + 1e-11


@settings(max_examples=200, deadline=None)
@given(groups(), st.integers(0, 300))
def test_rounding_costs_at_most_one_element(group: Group, total: int) -> None:
    bandwidths, contributes, reduces = group
    shares = balance(*group, total=total)
    assert sum(shares) == total
    assert all(share >= 0 for share in shares)
    assert all(not share or (able and bandwidth) for share, able, bandwidth in zip(shares, reduces, bandwidths, strict=True))
    if not total:
        return
    best = shortest_time(group)
    for taken, bandwidth, own in zip(seconds(group, [share / total for share in shares]), bandwidths, contributes, strict=True):
        one_element = abs(sum(contributes) - 2 * own) / (bandwidth or math.inf) / total
        assert taken <= best * (1 + 1e-9) + one_element + 1e-12


@settings(max_examples=200, deadline=None)
@given(groups(smallest=3))
def test_reducers_finish_together_and_idle_ones_could_not_have_helped(group: Group) -> None:
    bandwidths, _, reduces = group
    shares = balance(*group, total=FINE)
    times = seconds(group, [share / FINE for share in shares])
    level = max(taken for taken, share in zip(times, shares, strict=True) if share)
    for share, taken, able, bandwidth in zip(shares, times, reduces, bandwidths, strict=True):
        if share > 1000:
            assert taken == pytest.approx(level, rel=1e-6)
        elif able and bandwidth:
            assert taken >= level * (1 - 1e-6)


@settings(max_examples=200, deadline=None)
@given(st.data(), groups(), st.integers(0, 500))
def test_order_decides_one_element_at_most(data: st.DataObject, group: Group, total: int) -> None:
    order = data.draw(st.permutations(range(len(group[0]))))
    bandwidths, contributes, reduces = group
    before = balance(bandwidths, contributes, reduces, total)
    after = balance(
        [bandwidths[index] for index in order],
        [contributes[index] for index in order],
        [reduces[index] for index in order],
        total,
    )
    assert sum(after) == sum(before) == total
    assert all(abs(after[place] - before[index]) <= 1 for place, index in enumerate(order))


def test_position_breaks_ties() -> None:
    assert balance([1.0] * 4, [True] * 4, [True] * 4, 6) == (2, 2, 1, 1)
    assert balance([5.0] * 4, [True] * 4, [True] * 4, 10, min_size=4) == (5, 5, 0, 0)
    assert balance([1.0, 2.0, 1.0], [True] * 3, [True] * 3, 1, min_size=1) == (0, 1, 0)
    assert balance([2.0, 1.0, 2.0], [True] * 3, [True] * 3, 1, min_size=7) == (1, 0, 0)


@settings(max_examples=100, deadline=None)
@given(groups(), st.sampled_from([2.0**-40, 0.25, 8.0, 2.0**60]), st.integers(0, 10**6))
def test_the_unit_does_not_matter(group: Group, unit: float, total: int) -> None:
    scaled = [None if bandwidth is None else bandwidth * unit for bandwidth in group[0]]
    assert balance(scaled, group[1], group[2], total) == balance(*group, total)


@settings(max_examples=100, deadline=None)
@given(groups(st.one_of(st.none(), st.just(0.0), st.integers(1, 99).map(float))), st.integers(0, 10**6))
def test_unknown_bandwidth_counts_as_the_mean_of_the_known(group: Group, total: int) -> None:
    known = [int(bandwidth) for bandwidth in group[0] if bandwidth]
    count, mean = (len(known), sum(known)) if known else (1, 1)
    filled = [mean if bandwidth is None else int(bandwidth) * count for bandwidth in group[0]]  # whole numbers: exact
    assert balance(group[0], group[1], group[2], total) == balance(filled, group[1], group[2], total)


def drop_one_at_a_time(group: Group, total: int, min_size: int) -> set[int]:
    """Who is left when, of all who reduce, the one whose share lags most leaves until nobody lags. Quadratic, on purpose."""
    bandwidths, contributes, reduces = group
    contributors = sum(contributes)
    fewest = Fraction(total if 2 * min_size > total else min_size, total)
    left = [index for index, able in enumerate(reduces) if able and bandwidths[index]]

    def needed(index: int) -> Fraction:
        own = int(contributes[index])
        return (own + fewest * (contributors - 2 * own)) / Fraction(bandwidths[index] or 0)

    while len(left) > 1:
        kept = [able and index in left for index, able in enumerate(reduces)]
        shares = balance(bandwidths, contributes, kept, FINE)
        if all(shares[index] + 1 >= fewest * FINE for index in left):
            break
        left.remove(max(left, key=lambda index: (needed(index), index)))
    return set(left)


@settings(max_examples=200, deadline=None)
@given(groups(smallest=3), st.integers(1, 1000), st.integers(1, 400))
def test_small_shares_are_given_up_one_at_a_time(group: Group, total: int, min_size: int) -> None:
    shares = balance(*group, total, min_size)
    assert sum(shares) == total
    reducing = {index for index, share in enumerate(shares) if share}
    assert reducing
    assert len(reducing) == 1 or all(shares[index] >= min_size for index in reducing)
    assert reducing == drop_one_at_a_time(group, total, min_size)


def test_hand_worked_groups() -> None:
    # Four nodes of 1, 1, 2, 2: level T with (T-1)/2 * 2 + (2T-1)/2 * 2 = 1, so T = 1 and only the fast ones reduce.
    assert balance([1.0, 1.0, 2.0, 2.0], [True] * 4, [True] * 4, 100) == (0, 0, 50, 50)
    # Three nodes and an auxiliary of equal speed: 3 (T - 1) + T / 3 = 1, so T = 1.2: fractions 0.2 and 0.4.
    assert balance([7.0] * 4, [True, True, True, False], [True] * 4, 100) == (20, 20, 20, 40)
    # Two clients and two auxiliaries: in proportion to bandwidth.
    assert balance([1.0, 1.0, 3.0, 1.0], [True, True, False, False], [False, False, True, True], 100) == (0, 0, 75, 25)


def test_two_contributors_or_fewer_reduce_for_free() -> None:
    assert balance([1.0, 3.0], [True, True], [True, True], 100) == (25, 75)
    assert balance([1.0, 3.0, 9.0], [True, True, False], [True, True, True], 100) == (25, 75, 0)
    assert balance([1.0, 9.0], [True, False], [True, True], 100) == (100, 0)
    assert balance([0.0, 1.0, 3.0], [True, False, False], [True, True, True], 100) == (0, 25, 75)
    assert balance([1.0, 3.0], [False, False], [True, True], 100) == (25, 75)


def test_a_peer_of_bandwidth_zero_leaves_the_work_to_those_who_gave_none() -> None:
    assert balance([0, None, None], [True] * 3, [True] * 3, 10) == (0, 5, 5)


def test_extreme_bandwidths_stay_exact() -> None:
    smallest, largest = 5e-324, 1.7976931348623157e308
    assert balance([smallest, largest, largest], [True] * 3, [True] * 3, 11) == (0, 6, 5)
    assert balance([smallest] * 3, [True] * 3, [True] * 3, 10**18 + 1) == (
        333333333333333334,
        333333333333333334,
        333333333333333333,
    )


def test_an_empty_vector_needs_nobody() -> None:
    assert balance([1.0, None], [True, True], [True, False], 0, min_size=5) == (0, 0)


@pytest.mark.parametrize(
    ("bandwidths", "reduces"), [([0.0, 0.0], [True, True]), ([1.0, 1.0], [False, False]), ([0.0, 5.0], [True, False]), ([], [])]
)
def test_nobody_can_reduce(bandwidths: list[float | None], reduces: list[bool]) -> None:
    with pytest.raises(ValueError, match="nobody can reduce"):
        balance(bandwidths, [True] * len(reduces), reduces, 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-300])
def test_bandwidths_must_be_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match=r"bandwidths\[1\]=" + repr(bad)):
        balance([1.0, bad], [True, True], [True, True], 10)


def test_other_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"bandwidths\[0\]='fast'"):
        balance(["fast"], [True], [True], 10)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="equally long, not 1, 2 and 1"):
        balance([1.0], [True, True], [True], 10)
    with pytest.raises(ValueError, match="total=-1"):
        balance([1.0], [True], [True], -1)
    with pytest.raises(ValueError, match="min_size=-2"):
        balance([1.0], [True], [True], 1, min_size=-2)
