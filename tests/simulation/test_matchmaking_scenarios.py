"""Matchmaking over a simulated network: who is grouped with whom, and when."""

from __future__ import annotations

import pytest

from swarmavg.testing.matchmaking_world import Actor, World


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
