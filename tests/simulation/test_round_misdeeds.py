"""Weights and messages that no correct peer sends: who sends them is dropped from the average, and nobody else."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarmavg import AveragingStage, ExclusionCode, StepResult, SwarmError
from swarmavg.errors import ChannelError
from swarmavg.protocol.round_messages import ChannelKind, RoundPart, RoundResult, RoundStart
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm
from swarmavg.transport.packing import pack

SIZE = 2000
VALUES = (1.0, 2.0, 6.0)
"""The mean of any two or three of them is a number that float32 and float16 hold exactly, and another for each choice."""
Frame = tuple[bytes, Any]


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="swarmavg")


def exchange_of(averager):
    (exchange,) = averager._desk._exchanges.values()
    return exchange


def tensors_of():
    return [[torch.full((SIZE,), value)] for value in VALUES]


async def standing_round(swarm, each, *, offender="client", **options):
    """Two nodes and the offender, which comes last; their group stands and waits for the offender's trigger."""
    settings = {"target_group_size": 3, "part_size_bytes": 256, **options}
    averagers = await swarm.averagers(each, roles=["node", "node", offender], **settings)
    controls = [await averager.step(wait=False, require_trigger=index == 2) for index, averager in enumerate(averagers)]
    while controls[-1].stage is not AveragingStage.AWAITING_TRIGGER:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.5)  # by then all channels stand
    return averagers, controls


def link_from_to(source, target):
    """The open channel by which the source sends its inputs to the target."""
    exchange = exchange_of(source)
    position = exchange.group.position(target.peer_id)
    (link,) = [link for link in exchange._outgoing if link.other == position]
    assert link.channel is not None
    return link


def rewrite(channel, change: Callable[[int, bytes, Any], list[Frame]]) -> None:
    """From now on, what is sent on the channel passes through `change(number, header, payload)`, which says what to send."""
    send = channel.send
    number = 0

    async def changed(header, payload=b""):
        nonlocal number
        number += 1
        for frame in change(number, bytes(header), bytes(payload)):
            await send(*frame)

    channel.send = changed


def check_values(averagers, each, results):
    """All results are whole and hold the mean over whom they name; those who share a list hold the same bits."""
    ids = [averager.peer_id for averager in averagers]
    for own, result in results.items():
        assert result.fraction == 1.0
        assert not result.diverged
        assert result.contributors[0][0].start == 0
        for span, members in result.contributors:
            who = [ids.index(member) for member in members]
            expected = torch.tensor(sum(VALUES[p] for p in who) / len(who))
            assert each[own][0][span.start : span.stop].eq(expected).all()
    first = next(iter(results))
    for own, result in results.items():
        assert result.contributors == results[first].contributors
        assert torch.equal(each[own][0], each[first][0])


def refusals_of(offender, caplog) -> str:
    """What the logs of the others say of channels that they ended because the offender broke the rules."""
    words = rf"channel of the round failed peer={offender.peer_id.short} .*(?:reason=protocol-violation|RemoteProtocolError).*"
    return "\n".join(re.findall(words, caplog.text))


def dropped_somewhere(result, offender):
    return any(offender.peer_id not in members for _, members in result.contributors)


async def finish_with_offender(averagers, controls, each, caplog):
    """The honest ones end with the right values and blame nobody else than the offender, which ends as well.

    Returns the results of the honest ones, of which the first is the one that the offender wrongs.
    """
    controls[-1].allow_allreduce()
    outcomes = await asyncio.gather(*controls, return_exceptions=True)
    assert all(isinstance(outcome, StepResult) for outcome in outcomes[:2]), outcomes
    results = {own: outcome for own, outcome in enumerate(outcomes) if isinstance(outcome, StepResult)}
    assert isinstance(outcomes[2], StepResult | SwarmError)
    check_values(averagers, each, results)
    offender, wronged = averagers[2].peer_id, averagers[0].peer_id
    for own in (0, 1):
        codes = {peer: exclusion.code for peer, exclusion in results[own].excluded.items()}
        # A member that a reducer's misdeeds have cut off from it may be missing from that reducer's range.
        assert codes.pop(wronged, ExclusionCode.SEVERED) is ExclusionCode.SEVERED
        assert set(codes) <= {offender}
    assert refusals_of(averagers[2], caplog)
    return [results[0], results[1]]


# ---- weights and messages of a contributor


def start(weight) -> bytes:
    return pack(["start", weight])


WEIGHTS = {
    "negative": -1.0,
    "minus zero point one": -0.1,
    "nan": math.nan,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "1e300": 1e300,
    "2e18": 2e18,
    "1e-300": 1e-300,
    "largest int": 2**64 - 1,
    "bool": True,
    "string": "1.0",
    "none": None,
    "list": [1.0],
    "bytes": b"1.0",
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("offender", ["client", "node"])
def test_a_weight_that_is_none_drops_who_sends_it(weight, offender, caplog):
    async def main():
        each = tensors_of()
        async with SimulatedSwarm() as swarm:
            averagers, controls = await standing_round(swarm, each, offender=offender)
            link = link_from_to(averagers[2], averagers[0])
            rewrite(link.channel, lambda number, header, payload: [(start(weight) if number == 1 else header, payload)])
            for result in await finish_with_offender(averagers, controls, each, caplog):
                assert dropped_somewhere(result, averagers[2])

    run_virtual(main)


def test_a_weight_is_never_taken_for_another_number_of_parts(caplog):
    """A weight of 0 has no parts: those that come all the same are not added."""

    async def main():
        each = tensors_of()
        async with SimulatedSwarm() as swarm:
            averagers, controls = await standing_round(swarm, each)
            link = link_from_to(averagers[2], averagers[0])
            rewrite(link.channel, lambda number, header, payload: [(start(0.0) if number == 1 else header, payload)])
            for result in await finish_with_offender(averagers, controls, each, caplog):
                assert dropped_somewhere(result, averagers[2])

    run_virtual(main)


def part(index) -> bytes:
    return RoundPart(index=index).encode()


def swapped() -> Callable[[int, bytes, Any], list[Frame]]:
    """The second and the third part change places."""
    kept: list[Frame] = []

    def change(number, header, payload):
        if number == 3:
            kept.append((header, payload))
            return []
        return [(header, payload), *kept] if number == 4 else [(header, payload)]

    return change


def at(place: int, *frames: Frame) -> Callable[[], Callable[[int, bytes, Any], list[Frame]]]:
    """Other frames in the place of one."""
    return lambda: lambda number, header, payload: list(frames) if number == place else [(header, payload)]


def twice(place: int, times: int = 2) -> Callable[[], Callable[[int, bytes, Any], list[Frame]]]:
    """One frame is sent again at once."""
    return lambda: lambda number, header, payload: [(header, payload)] * (times if number == place else 1)


def replayed(place: int, when: int) -> Callable[[], Callable[[int, bytes, Any], list[Frame]]]:
    """One frame is sent again before a later one."""

    def fresh():
        kept: list[Frame] = []

        def change(number, header, payload):
            if number == place:
                kept.append((header, payload))
            return [*kept, (header, payload)] if number == when else [(header, payload)]

        return change

    return fresh


MISDEEDS = {
    # frame 1 is the weight, frame 2 the first part
    "malformed: no msgpack": at(3, (b"\xc1", b"")),
    "malformed: empty header": at(3, (b"", b"")),
    "malformed: cut short": at(3, (part(1)[:-1], bytes(256))),
    "malformed: more behind it": at(3, (part(1) + b"\x00", bytes(256))),
    "malformed: unknown kind": at(3, (pack(["nonsense", 1]), b"")),
    "malformed: too many fields": at(3, (pack(["part", 1, 2]), bytes(256))),
    "malformed: index is no number": at(3, (pack(["part", "1"]), bytes(256))),
    "malformed: deep": at(3, (b"\x91" * 200 + b"\x00", b"")),
    "malformed: a message of the other side": at(3, (RoundResult(index=0, contributors=1).encode(), bytes(256))),
    "oversized: payload": at(3, (part(1), bytes(257))),
    "oversized: large payload": at(3, (part(1), bytes(1 << 20))),
    "oversized: header": at(3, (pack(["part", b"x" * 10_000]), bytes(256))),
    "undersized: payload": at(3, (part(1), bytes(255))),
    "undersized: no payload": at(3, (part(1), b"")),
    "out of order: two parts change places": swapped,
    "out of order: a part is left out": at(3),
    "out of order: a part before the weight": at(1, (part(0), bytes(256)), (RoundStart(weight=1.0).encode(), b"")),
    "out of order: a number that is none": at(3, (part(2**31), bytes(256))),
    "out of order: a negative number": at(3, (pack(["part", -1]), bytes(256))),
    "duplicate: weight": twice(1),
    "duplicate: another weight": at(3, (RoundStart(weight=5.0).encode(), b"")),
    "duplicate: part": twice(2),
    "duplicate: part, many times": twice(3, times=50),
    "replayed: a part, later": replayed(2, when=4),
    "replayed: the weight, later": replayed(1, when=4),
}


@pytest.mark.parametrize("misdeed", MISDEEDS.values(), ids=MISDEEDS)
def test_a_contributor_that_breaks_the_rules_is_dropped_and_nobody_else(misdeed, caplog):
    async def main():
        each = tensors_of()
        async with SimulatedSwarm() as swarm:
            averagers, controls = await standing_round(swarm, each)
            rewrite(link_from_to(averagers[2], averagers[0]).channel, misdeed())
            for result in await finish_with_offender(averagers, controls, each, caplog):
                assert dropped_somewhere(result, averagers[2])

    run_virtual(main)


def test_a_part_that_comes_again_after_the_last_changes_no_value():
    async def main():
        each = tensors_of()
        async with SimulatedSwarm() as swarm:
            averagers, controls = await standing_round(swarm, each)
            link = link_from_to(averagers[2], averagers[0])
            last = len(exchange_of(averagers[0]).plan.parts[exchange_of(averagers[0]).position]) + 1
            rewrite(link.channel, lambda number, header, payload: [(header, payload)] * (2 if number == last else 1))
            controls[-1].allow_allreduce()
            results = dict(enumerate([await control for control in controls[:2]]))
            await asyncio.gather(controls[2], return_exceptions=True)
            check_values(averagers, each, results)

    run_virtual(main)


# ---- messages of a reducer


def result_frame(index, contributors=0b111) -> bytes:
    return RoundResult(index=index, contributors=contributors).encode()


FALSE_RESULTS = {
    "malformed": at(2, (b"\xc1", b"")),
    "undersized": at(2, (result_frame(1), bytes(100))),
    "oversized": at(2, (result_frame(1), bytes(1 << 20))),
    "out of order": swapped,
    "left out": at(2),
    "duplicate": twice(1),
    "contributors that the group does not have": at(2, (result_frame(1, 1 << 60), bytes(256))),
    "a message of the other side": at(2, (part(1), bytes(256))),
}


@pytest.mark.parametrize("misdeed", FALSE_RESULTS.values(), ids=FALSE_RESULTS)
def test_a_reducer_that_breaks_the_rules_towards_one_member_costs_nobody_a_value(misdeed, caplog):
    async def main():
        each = tensors_of()
        async with SimulatedSwarm() as swarm:
            averagers, controls = await standing_round(swarm, each, offender="node")
            reducer = exchange_of(averagers[2])
            (link,) = [
                link
                for link in reducer._ranges[None].links.values()
                if link.other == reducer.group.position(averagers[0].peer_id)
            ]
            rewrite_results(link.channel, misdeed())
            await finish_with_offender(averagers, controls, each, caplog)

    run_virtual(main)


def rewrite_results(channel, change) -> None:
    """As `rewrite`, for results only: heartbeats pass, and are not counted."""
    send = channel.send
    number = 0

    async def changed(header, payload=b""):
        nonlocal number
        if b"result" not in bytes(header):
            await send(header, payload)
            return
        number += 1
        for frame in change(number, bytes(header), bytes(payload)):
            await send(*frame)

    channel.send = changed


# ---- what belongs to another round


def test_the_channels_of_an_earlier_round_replayed_are_refused_and_disturb_nobody():
    async def main():
        each = tensors_of()
        async with SimulatedSwarm() as swarm:
            averagers, controls = await standing_round(swarm, each, offender="node")
            old = [exchange_of(averagers[1]), link_from_to(averagers[1], averagers[0])]
            hello = old[0].hello(kind=ChannelKind.INPUTS, server=old[0].group.position(averagers[0].peer_id), job=None).encode()
            signed = bytes(old[0].group.signed)
            controls[-1].allow_allreduce()
            for control in controls:
                await control
            for tensors, value in zip(each, VALUES, strict=True):
                tensors[0].fill_(value)
            controls = [await averager.step(wait=False, require_trigger=index == 2) for index, averager in enumerate(averagers)]
            while controls[-1].stage is not AveragingStage.AWAITING_TRIGGER:
                await asyncio.sleep(0.001)
            for with_group in (signed, b""):
                channel = await averagers[1].peer.open_channel(averagers[0].peer_id, "round:run", timeout=1.0)
                await channel.send(hello, with_group)
                with pytest.raises(ChannelError):
                    await replay_until_refused(channel)
                channel.abort()
            controls[-1].allow_allreduce()
            results = dict(enumerate([await control for control in controls]))
            assert all(result.excluded == {} for result in results.values())
            check_values(averagers, each, results)

    run_virtual(main)


async def replay_until_refused(channel) -> None:
    """What a contributor said in the round before, and then wait for the answer."""
    await channel.send(RoundStart(weight=1.0).encode())
    for index in range(8):
        await channel.send(part(index), torch.full((64,), 1e6).numpy().tobytes())
    await channel.receive()


def test_a_plan_with_another_hash_leaves_its_owner_out_and_nobody_else():
    async def main():
        each = tensors_of()
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=256, roles=["node", "node", "client"])
            planner: Any = averagers[2]._planner
            original = planner.plan_for

            def other(members):
                plan = original(members)
                object.__setattr__(plan, "hash", b"?" * 32)
                return plan

            planner.plan_for = other
            outcomes = await asyncio.gather(
                *(a.step(timeout=20, allow_retries=False) for a in averagers), return_exceptions=True
            )
            assert isinstance(outcomes[2], SwarmError)
            assert all(isinstance(outcome, StepResult) for outcome in outcomes[:2])
            results = {own: outcome for own, outcome in enumerate(outcomes) if isinstance(outcome, StepResult)}
            check_values(averagers, each, results)
            for result in results.values():
                assert all(averagers[2].peer_id not in members for _, members in result.contributors)
        assert each[2][0].eq(VALUES[2]).all()

    run_virtual(main)
