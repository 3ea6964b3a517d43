"""Who does what about parts that somebody lacks: each is covered once, nobody dials where it cannot, what is held is kept."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.protocol.round_jobs import Situation, assign

EXAMPLES = settings(max_examples=200, deadline=None)


def bits(members):
    return sum(1 << member for member in members)


def members_of(mask):
    return {position for position in range(mask.bit_length()) if mask >> position & 1}


@st.composite
def situations(draw, *, severed=True, deaths=True):
    """Two to six members, of which at least one that serves and one that receives live; some parts are held by some."""
    count = draw(st.integers(2, 6))
    everybody = range(count)
    some = st.sets(st.sampled_from(everybody))
    serves = draw(some) | {draw(st.sampled_from(everybody))}
    receives = draw(some) | (set(everybody) - serves)  # whoever does not serve is a client
    receives = receives or {min(serves)}
    owners = draw(st.lists(st.sampled_from(sorted(serves)), min_size=1, max_size=8))
    live = set(everybody) if not deaths else draw(some) | {draw(st.sampled_from(sorted(serves)))}
    pairs = [(a, b) for a in everybody for b in sorted(serves) if a != b]
    cut = draw(st.sets(st.sampled_from(pairs), max_size=4)) if severed and pairs else set()
    held = {member: draw(st.integers(0, (1 << len(owners)) - 1)) if member in receives else 0 for member in live}
    return Situation(
        salt=draw(st.binary(min_size=16, max_size=16)),
        owners=tuple(owners),
        coordinator=draw(st.sampled_from(sorted(live & serves))),
        live=frozenset(live),
        serves=frozenset(serves),
        receives=frozenset(receives),
        severed=frozenset(cut),
        held=held,
    )


def lacking(situation, part):
    return {m for m in situation.receives & situation.live if not situation.held[m] >> part & 1}


def holders(situation, part):
    return {m for m in situation.receives & situation.live if situation.held[m] >> part & 1}


def ways(situation, jobs, member, part):
    """How a member comes by a result: channels to the part's reducer, and jobs that give it the part."""
    owner = situation.owners[part]
    direct = owner in situation.live and (member == owner or situation.may_dial(member, owner))
    found = ["its reducer"] if direct else []
    for job in jobs:
        if part in job.parts:
            found += [f"job {job.number}"] if member in members_of(job.consumers) else []
            found += [f"it reduces job {job.number}"] if job.recomputes and job.server == member else []
    return found


@EXAMPLES
@given(situations())
def test_every_part_that_somebody_lacks_comes_by_exactly_one_way_or_somebody_is_hopeless(situation):
    decided = assign(situation)
    if decided.hopeless:
        assert decided.jobs == ()
        assert decided.hopeless <= situation.live
        return
    for part in range(len(situation.owners)):
        for member in lacking(situation, part):
            found = ways(situation, decided.jobs, member, part)
            assert len(found) == 1, f"member {member} gets part {part} by {found}: {decided.jobs}"
        for job in decided.jobs:
            if part in job.parts and not job.recomputes:
                assert members_of(job.consumers) <= lacking(situation, part)


@EXAMPLES
@given(situations())
def test_nobody_is_asked_to_open_a_channel_that_cannot_be(situation):
    for job in assign(situation).jobs:
        assert job.server in situation.serves & situation.live
        diallers = members_of(job.contributors) | members_of(job.consumers) | ({job.holder} - {None})
        assert diallers <= situation.receives & situation.live
        for member in diallers - {job.server}:
            assert situation.may_dial(member, job.server)


@EXAMPLES
@given(situations())
def test_a_result_is_passed_on_exactly_where_somebody_who_lives_holds_it(situation):
    for job in assign(situation).jobs:
        for part in job.parts:
            if job.recomputes:
                assert not holders(situation, part)
                assert situation.owners[part] not in situation.live
                assert job.contributors >> job.server & 1 or job.server not in situation.receives
            elif situation.owners[part] not in situation.live and job.holder not in holders(situation, part):
                # by way of a server that has it by another job first
                assert any(
                    other.recomputes and part in other.parts and ways(situation, (other,), job.holder, part)
                    for other in assign(situation).jobs
                )


@EXAMPLES
@given(situations(severed=False))
def test_where_all_channels_work_nobody_is_hopeless_and_everybody_is_in_what_is_reduced_anew(situation):
    decided = assign(situation)
    assert decided.hopeless == frozenset()
    for job in decided.jobs:
        assert all(situation.owners[part] not in situation.live for part in job.parts)
        if job.recomputes:
            assert members_of(job.contributors) == situation.live & situation.receives


@EXAMPLES
@given(situations())
def test_jobs_are_numbered_and_name_each_of_their_parts_once(situation):
    jobs = assign(situation).jobs
    assert [job.number for job in jobs] == list(range(len(jobs)))
    for job in jobs:
        assert job.parts
        assert list(job.parts) == sorted(set(job.parts))
        assert job.recomputes or job.consumers
    anew = [part for job in jobs if job.recomputes for part in job.parts]
    assert len(anew) == len(set(anew))


@EXAMPLES
@given(situations(deaths=False, severed=False))
def test_while_all_live_and_reach_each_other_there_is_nothing_to_do(situation):
    assert assign(situation).jobs == ()


def group(count=6, parts=60, out=()):
    live = frozenset(range(count)) - set(out)
    return Situation(
        salt=b"one group's id..",
        owners=tuple(part % count for part in range(parts)),
        coordinator=min(live),
        live=live,
        serves=frozenset(range(count)),
        receives=frozenset(range(count)),
        severed=frozenset(),
        held=dict.fromkeys(live, 0),
    )


def reducers(situation, owner):
    """Who reduces each part of a lost reducer anew."""
    return {
        part: job.server
        for job in assign(situation).jobs
        for part in job.parts
        if job.recomputes and situation.owners[part] == owner
    }


def test_the_choice_does_not_move_when_an_unrelated_member_is_lost():
    before = reducers(group(parts=600, out=[0]), owner=0)
    after = reducers(group(parts=600, out=[0, 4]), owner=0)
    assert before.keys() == after.keys()
    for part, server in before.items():
        assert after[part] == server or server == 4
        assert after[part] != 4


def test_the_parts_of_a_lost_reducer_spread_over_all_others():
    chosen = reducers(group(parts=600, out=[0]), owner=0)
    counts = [list(chosen.values()).count(server) for server in range(1, 6)]
    assert sum(counts) == 100
    assert min(counts) >= 10


def test_another_group_spreads_them_in_another_way():
    mine, theirs = group(parts=600, out=[0]), replace(group(parts=600, out=[0]), salt=b"another group...")
    assert reducers(mine, 0) != reducers(theirs, 0)


def test_an_auxiliary_peer_may_take_over_and_is_no_contributor():
    situation = Situation(
        salt=bytes(16),
        owners=(0, 0),
        coordinator=3,
        live=frozenset({1, 2, 3}),
        serves=frozenset({0, 3}),
        receives=frozenset({0, 1, 2}),
        severed=frozenset(),
        held={1: 0, 2: 0, 3: 0},
    )
    (job,) = assign(situation).jobs
    assert (job.server, job.holder, job.contributors, job.consumers, job.parts) == (3, None, 0b110, 0b110, (0, 1))


def test_what_only_a_client_holds_travels_by_way_of_a_member_that_serves():
    situation = Situation(
        salt=bytes(16),
        owners=(0,),
        coordinator=2,
        live=frozenset({1, 2, 3}),
        serves=frozenset({0, 2}),
        receives=frozenset({0, 1, 2, 3}),
        severed=frozenset(),
        held={1: 1, 2: 0, 3: 0},
    )
    (job,) = assign(situation).jobs
    assert (job.server, job.holder, job.contributors, job.consumers) == (2, 1, 0, bits({2, 3}))


def test_a_reducer_out_of_reach_for_the_half_of_a_pair_that_coordinates_is_hopeless():
    two = Situation(
        salt=bytes(16),
        owners=(0, 1),
        coordinator=0,
        live=frozenset({0, 1}),
        serves=frozenset({0, 1}),
        receives=frozenset({0, 1}),
        severed=frozenset({(0, 1), (1, 0)}),
        held={0: 0, 1: 0},
    )
    assert assign(two).hopeless


def test_with_one_severed_pair_in_four_each_gets_the_others_range_by_way_of_a_third():
    situation = Situation(
        salt=bytes(16),
        owners=(0, 1, 2, 3),
        coordinator=0,
        live=frozenset(range(4)),
        serves=frozenset(range(4)),
        receives=frozenset(range(4)),
        severed=frozenset({(1, 2), (2, 1)}),
        held=dict.fromkeys(range(4), 0),
    )
    decided = assign(situation)
    assert decided.hopeless == frozenset()
    assert [(job.holder == job.server, job.server in {0, 3}) for job in decided.jobs] == [(True, True)] * 2
    assert {(job.parts, job.consumers) for job in decided.jobs} == {((1,), bits({2})), ((2,), bits({1}))}
