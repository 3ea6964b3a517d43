"""Matchmaking over a simulated network: who is grouped with whom, and when."""

from __future__ import annotations

import functools

import pytest

from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.group import Group, Member, Role
from swarmavg.protocol.matchmaking_begin import sign_begin
from swarmavg.protocol.matchmaking_events import BeginSeen, Cancel, RoundFinished
from swarmavg.protocol.matchmaking_messages import Begin, Join
from swarmavg.protocol.matchmaking_presence import MatchConfig
from swarmavg.protocol.matchmaking_states import State
from swarmavg.protocol.ordering import order_key
from swarmavg.testing.matchmaking_world import CONFIG, Actor, World, plan_of


def look_all(world: World, actors: list[Actor], **request: object) -> None:
    for actor in actors:
        world.look(actor, **{"deadline": world.now + 15.0, **request})


def same_group(actors: list[Actor]) -> bool:
    return len({actor.group.group_id for actor in actors}) == 1


@pytest.mark.parametrize("target", [None, 4])
def test_four_that_call_together_do_not_wait_for_the_window(target: int | None) -> None:
    world = World(1)
    actors = [world.add(target_group_size=target) for _ in range(4)]
    world.run(1.0)
    look_all(world, actors)
    world.run(1.3)
    assert all(actor.groups for actor in actors)
    assert same_group(actors)
    assert len(actors[0].group.members) == 4


def test_two_that_call_three_seconds_apart_meet() -> None:
    world = World(2)
    first, second = world.add(), world.add()
    world.run(1.0)
    world.look(first, deadline=16.0)
    world.at(4.0, lambda: world.look(second, deadline=20.0))
    world.run(4.2)
    assert first.groups
    assert same_group([first, second])


@pytest.mark.parametrize("seed", range(5))
def test_sixteen_in_one_bucket_make_pairs(seed: int) -> None:
    world = World(seed)
    actors = [world.add(target_group_size=2) for _ in range(16)]
    world.run(1.0)
    look_all(world, actors)
    world.run(1.5)
    assert all(actor.groups for actor in actors)
    assert len({actor.group.group_id for actor in actors}) == 8


@pytest.mark.parametrize("seed", range(5))
def test_five_with_a_target_of_four_make_three_and_two(seed: int) -> None:
    world = World(seed)
    actors = [world.add(target_group_size=4) for _ in range(5)]
    world.run(1.0)
    look_all(world, actors)
    world.run(1.5)
    assert all(actor.groups for actor in actors)
    assert sorted(len(actor.group.members) for actor in actors) == [2, 2, 3, 3, 3]


# ---- who delays whom


def test_strangers_delay_nobody_and_are_told_apart() -> None:
    world = World(3)
    actors = [world.add() for _ in range(4)]
    other_codec = MatchConfig((CONFIG.fields[0], ("compression", "float16"), CONFIG.fields[2]))
    strangers = [world.add(config=other_codec), world.add(bits="01")]
    world.run(1.0)
    look_all(world, actors)
    world.look(strangers[0], deadline=8.0)
    world.look(strangers[1], deadline=8.0, bits="01")
    world.run(1.3)
    assert all(len(actor.group.members) == 4 for actor in actors)
    world.run(9.0)
    (_, failure), (_, failure_of_bits) = strangers[0].failures[0], strangers[1].failures[0]
    assert len(failure.seen) == 5
    assert set(failure.seen.values()) == {"its configuration differs in 'compression' (ours: float16)"} | {
        text for text in failure.seen.values() if "bits" in text or "compression" in text
    }
    assert "its configuration differs in 'compression' (ours: none)" in failure_of_bits.seen.values()
    assert "in another bucket: its group bits are '', ours '01'" in failure_of_bits.seen.values()


def steps(world: World, actor: Actor, *, first: float, every: float, count: int) -> None:
    """The actor looks at regular times; whatever comes of it is over before the next."""
    for index in range(count):
        world.at(first + index * every, lambda: world.look(actor, deadline=world.now + every / 10))
        world.at(first + (index + 0.6) * every, lambda: finish(world, actor))


def finish(world: World, actor: Actor, *, ok: bool = True, failed: frozenset[PeerId] = frozenset()) -> None:
    if actor.machine.state is State.IN_ROUND:
        world.give(actor, RoundFinished("", ok=ok, failed=failed))


def test_one_expected_within_the_window_is_waited_for_and_one_after_it_is_not() -> None:
    world = World(4)
    fast = [world.add(), world.add()]
    regular, slow = world.add(), world.add()
    world.run(0.5)
    steps(world, slow, first=1.0, every=60.0, count=4)  # next: 241
    steps(world, regular, first=44.0, every=40.0, count=4)  # next: 204
    world.run(199.0)
    world.at(202.0, lambda: look_all(world, fast))
    world.at(204.0, lambda: world.look(regular, deadline=220.0))
    world.run(204.2)
    assert len(fast[0].group.members) == 3, "waited two seconds for the regular one, not for the slow one"
    assert same_group([*fast, regular])


def test_one_that_never_steps_holds_up_three_rounds_and_no_more() -> None:
    world = World(5)
    actors = [world.add() for _ in range(3)]
    world.add()
    world.run(1.0)
    waits = []
    for _ in range(5):
        began = world.now
        look_all(world, actors)
        world.run(began + 20.0)
        waits.append(actors[0].groups[-1][0] - began)
        for actor in actors:
            finish(world, actor)
        world.run(world.now + 1.0)
    assert [wait > 4.9 for wait in waits] == [True, True, True, False, False]
    assert max(waits) < 5.2
    assert max(waits[3:]) < 0.3


@pytest.mark.parametrize("refuses", [True, False])
def test_one_that_vanished_costs_one_request_timeout_at_most(refuses: bool) -> None:
    world = World(6)
    world.dead_answer = refuses
    actors, ghost = [world.add() for _ in range(3)], world.add()
    world.run(1.0)
    world.kill(ghost)
    look_all(world, actors)
    world.run(8.0)
    assert same_group(actors)
    assert actors[0].groups[0][0] < 1.0 + (0.5 if refuses else 3.3)
    for actor in actors:
        finish(world, actor)
    world.run(8.5)
    look_all(world, actors)
    world.run(9.0)
    assert all(len(actor.groups) == 2 for actor in actors), "the second time it costs nothing"


@pytest.mark.parametrize("position", range(4))
def test_a_ghost_that_still_seems_to_look_costs_one_request_timeout(position: int) -> None:
    world = World(position)
    actors = [world.add() for _ in range(4)]
    world.run(1.0)
    world.look(actors[position], deadline=20.0)
    world.run(1.2)
    world.kill(actors[position])
    rest = [actor for actor in actors if actor.alive]
    look_all(world, rest)
    world.run(6.0)
    assert same_group(rest)
    assert max(actor.groups[0][0] for actor in rest) < 1.2 + 3.0 + 0.5


def carry_the_begin(world: World, actor: Actor, group: Group) -> None:
    """What the channels of the round do: every member reaches the others and brings the begin."""
    for member in group.members:
        other = world.actors[member.peer_id]
        world.at(world.now + 0.020, lambda other=other: world.give(other, BeginSeen(group.signed)))  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(3))
def test_a_leader_that_dies_at_any_message(seed: int) -> None:
    for last in range(14):
        world = World(seed)
        actors = [world.add() for _ in range(4)]
        world.run(1.0)
        leader = min(actors, key=lambda actor: order_key("", actor.peer))
        world.loses = lambda a, _b, _m, leader=leader, last=last: (  # type: ignore[misc]
            a == leader.peer and len(leader.sent) > last
        )
        world.on_assembled = functools.partial(carry_the_begin, world)
        look_all(world, actors)
        while leader.alive and world.now < 10.0:
            world.run(world.now + 0.001)
            if len(leader.sent) > last:
                world.kill(leader)
        world.run(17.0)
        rest = [actor for actor in actors if actor is not leader]
        assert all(actor.groups for actor in rest), f"after {last} messages"
        sizes = {actor.peer: len(actor.group.members) for actor in rest}
        assert max(actor.groups[0][0] for actor in rest) < 1.0 + 3.0 + 3.0 + 1.0, sizes
        world.check_nonces()


def test_a_lost_begin_comes_again_with_the_next_renewal() -> None:
    world = World(8)
    actors = [world.add() for _ in range(3)]
    world.run(1.0)
    dropped: list[PeerId] = []

    def loses(_a: PeerId, b: PeerId, message: object) -> bool:
        if isinstance(message, Begin) and b not in dropped:
            dropped.append(b)
            return True
        return False

    world.loses = loses
    look_all(world, actors)
    world.run(4.0)
    assert len(dropped) == 2
    assert same_group(actors)


# ---- roles


def test_clients_alone_fail_and_say_why() -> None:
    world = World(9)
    clients = [world.add(Role.CLIENT), world.add(Role.CLIENT)]
    world.run(1.0)
    look_all(world, clients)
    world.run(17.0)
    for client in clients:
        assert client.machine.state is State.IDLE
        assert "clients cannot lead, and no node or auxiliary peer was there" in client.failures[0][1].message
        assert client.failures[0][0] == 16.0


def test_clients_never_lead_whatever_their_key() -> None:
    for seed in range(12):
        world = World(seed)
        actors = [world.add(Role.CLIENT), world.add(Role.CLIENT), world.add(Role.AUXILIARY), world.add(Role.AUXILIARY)]
        world.run(1.0)
        look_all(world, actors)
        world.run(1.3)
        assert same_group(actors)
        assert len(actors[0].group.members) == 4
        assert world.actors[actors[0].group.leader].role is Role.AUXILIARY


def test_auxiliaries_alone_are_a_group() -> None:
    world = World(10)
    actors = [world.add(Role.AUXILIARY) for _ in range(3)]
    world.run(1.0)
    look_all(world, actors)
    world.run(1.3)
    assert same_group(actors)


# ---- times and sizes


def test_an_explicit_time_delays_even_a_full_group() -> None:
    world = World(11)
    actors = [world.add(target_group_size=2), world.add(target_group_size=2)]
    world.run(1.0)
    world.look(actors[0], deadline=30.0, not_before=3.0)
    world.look(actors[1], deadline=30.0)
    world.run(3.9)
    assert not any(actor.groups for actor in actors)
    world.run(4.2)
    assert same_group(actors)


def test_one_that_starts_after_the_window_delays_nobody() -> None:
    world = World(12)
    actors = [world.add() for _ in range(3)]
    world.run(1.0)
    world.look(actors[0], deadline=60.0, not_before=20.0)
    look_all(world, actors[1:])
    world.run(2.0)
    assert same_group(actors[1:])
    assert not actors[0].groups


def test_the_shortest_window_counts_for_all() -> None:
    world = World(13)
    actors, _idle = [world.add() for _ in range(3)], world.add()
    world.run(1.0)
    for actor, window in zip(actors, (20.0, 1.5, 20.0), strict=True):
        world.look(actor, deadline=60.0, window=window)
    world.run(2.7)
    assert same_group(actors)


def test_a_deadline_before_the_end_of_the_window_is_kept() -> None:
    world = World(14)
    actors, _idle = [world.add() for _ in range(2)], world.add()
    world.run(1.0)
    world.look(actors[0], deadline=4.0)
    world.look(actors[1], deadline=60.0)
    world.run(4.0)
    assert same_group(actors)
    assert not actors[0].failures


def test_who_wants_a_larger_group_is_left_out_at_the_end_of_the_window() -> None:
    for seed in range(6):
        world = World(seed)
        actors, choosy = [world.add(), world.add()], world.add(min_group_size=4)
        world.run(1.0)
        look_all(world, [*actors, choosy])
        world.run(14.0)
        assert not choosy.groups
        # whoever leads, the two that are content with a pair find each other within their time
        assert same_group(actors), f"seed {seed}"
        assert len(actors[0].group.members) == 2


def test_another_plan_is_refused_with_a_reason() -> None:
    world = World(15)
    actors = [world.add(), world.add()]
    follower = max(actors, key=lambda actor: order_key("", actor.peer))
    follower.machine._core.plan_hash = lambda _members: b"x" * 32
    world.run(1.0)
    look_all(world, actors)
    world.run(1.5)
    leader = next(actor for actor in actors if actor is not follower)
    assert not follower.groups
    assert [lost.reason for lost in leader.lost] == ["its plan of who reduces what differs from ours"]
    world.run(17.0)
    assert "its plan of who reduces what differs from ours" in follower.failures[0][1].seen[leader.peer]


# ---- rounds one after another


def test_survivors_of_a_failed_round_regroup_together() -> None:
    world = World(16)
    actors = [world.add(target_group_size=4) for _ in range(4)]
    world.run(1.0)
    look_all(world, actors)
    world.run(1.5)
    assert same_group(actors)
    world.kill(actors[0])
    dead = frozenset({actors[0].peer})
    for delay, actor in zip((0.0, 0.4, 1.2), actors[1:], strict=True):
        world.at(2.0 + delay, lambda actor=actor: finish(world, actor, ok=False, failed=dead))  # type: ignore[misc]
        world.at(2.0 + delay, lambda actor=actor: world.look(actor, deadline=20.0))  # type: ignore[misc]
    world.run(3.5)
    assert same_group(actors[1:])
    assert len(actors[1].group.members) == 3


@pytest.mark.parametrize("seed", range(4))
def test_eight_peers_in_pairs_with_two_bits_reach_the_mean(seed: int) -> None:
    world = World(seed)
    buckets = ["00", "00", "01", "01", "10", "10", "11", "11"]
    actors = [world.add(target_group_size=2, bits=bits) for bits in buckets]
    bits = {actor.peer: text for actor, text in zip(actors, buckets, strict=True)}
    values = {actor.peer: float(index) for index, actor in enumerate(actors)}
    world.run(1.0)
    for _ in range(3):
        for actor in actors:
            world.look(actor, deadline=world.now + 15.0, bits=bits[actor.peer])
        world.run(world.now + 12.0)
        before = dict(values)
        for actor in actors:
            assert len(actor.group.members) == 2
            values[actor.peer] = sum(before[member.peer_id] for member in actor.group.members) / 2
            bits[actor.peer] = actor.group.next_bits(actor.peer, 2)
        assert sum(values.values()) == pytest.approx(28.0)
        for actor in actors:
            world.give(actor, RoundFinished(bits[actor.peer], ok=True))
    assert set(values.values()) == {3.5}


def test_sixty_four_peers_in_one_bucket_are_grouped() -> None:
    world = World(17)
    actors = [world.add(target_group_size=8) for _ in range(64)]
    world.run(1.0)
    look_all(world, actors)
    world.run(12.0)
    assert all(actor.groups for actor in actors)
    assert all(2 <= len(actor.group.members) <= 8 for actor in actors)


def test_a_begin_that_names_an_earlier_join_is_refused() -> None:
    world = World(18)
    actors, _idle = [world.add(), world.add()], world.add()  # for whom the leader waits
    leader, follower = sorted(actors, key=lambda actor: order_key("", actor.peer))
    world.run(1.0)
    world.look(leader, deadline=30.0)
    world.run(1.5)
    world.loses = lambda a, _b, _m: a == leader.peer  # so that the join stays unanswered
    world.look(follower, deadline=30.0)
    world.run(1.6)
    world.give(follower, Cancel())
    world.look(follower, deadline=30.0)
    joins = [message for _, _, message in follower.sent if isinstance(message, Join)]
    assert len({join.nonce for join in joins}) == 2
    for join, obeyed in ((joins[0], False), (joins[-1], True)):
        members = (
            Member(peer_id=leader.peer, nonce=b"l" * 16, role=Role.NODE, bandwidth=None, gather=b""),
            Member(peer_id=follower.peer, nonce=join.nonce, role=Role.NODE, bandwidth=None, gather=b""),
        )
        begin = sign_begin(
            group_id=GroupId(join.nonce),
            leader=leader.peer,
            members=members,
            bits="",
            plan_hash=plan_of(members),
            prefix="run",
            config_hash=CONFIG.hash,
            signer=leader.machine._core.signer,
        )
        world.give(follower, BeginSeen(begin.signed))
        assert bool(follower.groups) is obeyed
