"""What arrives on a round's channels, right and wrong: only the offender is dropped, and early arrivals wait."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmavg import AveragingStage, ExclusionCode
from swarmavg.errors import ChannelRefusedError
from swarmavg.identifiers import GroupId
from swarmavg.protocol.matchmaking_messages import Begin, decode_message
from swarmavg.protocol.round_control import Term
from swarmavg.protocol.round_messages import ChannelKind, RoundBeat, RoundHello, RoundPart, RoundStart
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm
from swarmavg.transport.packing import pack


def hello_for(exchange, member_id, **changes):
    group = exchange.group
    fields = {
        "group_id": group.group_id,
        "kind": ChannelKind.INPUTS,
        "term": Term(0, 0),
        "job": None,
        "sender": group.member(member_id).nonce,
        "receiver": group.members[exchange.position].nonce,
        "plan_hash": exchange.plan.hash,
    }
    return RoundHello(**{**fields, **changes})


async def standing_round(swarm, count=3):
    """Averagers whose group stands and waits for the trigger of the last one, which has not been given."""
    each = [[torch.full((2000,), float(index))] for index in range(count)]
    averagers = await swarm.averagers(each, target_group_size=count, part_size_bytes=256)
    controls = [await averager.step(wait=False, require_trigger=index == count - 1) for index, averager in enumerate(averagers)]
    while controls[-1].stage is not AveragingStage.AWAITING_TRIGGER:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.5)  # by then all channels stand
    return each, averagers, controls


def exchange_of(averager):
    (exchange,) = averager._desk._exchanges.values()
    return exchange


def test_hellos_that_do_not_fit_are_refused_with_the_reason_and_disturb_nobody():
    async def main():
        async with SimulatedSwarm() as swarm:
            each, averagers, controls = await standing_round(swarm)
            stranger = await swarm.peer()
            await asyncio.sleep(0.1)
            exchange = exchange_of(averagers[0])
            member = averagers[1].peer
            cases = [
                (stranger, hello_for(exchange, member.id), "not a member"),
                (member, hello_for(exchange, member.id, sender=b"x" * 16), "another incarnation"),
                (member, hello_for(exchange, member.id, receiver=b"x" * 16), "another incarnation"),
                (member, hello_for(exchange, member.id, plan_hash=b"x" * 32), "another plan"),
                (member, hello_for(exchange, member.id), "has a channel already"),
                (member, hello_for(exchange, member.id, group_id=GroupId(b"x" * 16)), "does not know the group"),
                (member, RoundPart(index=0), "not a hello"),
            ]
            for peer, message, reason in cases:
                channel = await peer.open_channel(averagers[0].peer_id, "round:run", timeout=1.0)
                await channel.send(message.encode(), b"no begin")
                with pytest.raises(ChannelRefusedError, match=reason):
                    await channel.receive()
                channel.abort()
            controls[-1].allow_allreduce()
            for control in controls:
                assert (await control).excluded == {}
            assert all(tensors[0].eq(1.0).all() for tensors in each)

    run_virtual(main)


@pytest.mark.parametrize(
    ("header", "payload", "code"),
    [
        (RoundPart(index=0).encode(), bytes(256), ExclusionCode.PROTOCOL_VIOLATION),  # before its weight
        (RoundStart(weight=1e30).encode(), b"", ExclusionCode.PROTOCOL_VIOLATION),
        (pack(["start", -1.0]), b"", ExclusionCode.PROTOCOL_VIOLATION),
        (pack(["start", float("nan")]), b"", ExclusionCode.PROTOCOL_VIOLATION),
        (b"\xc1 garbage", b"", ExclusionCode.PROTOCOL_VIOLATION),
        (RoundBeat(term=Term(0, 0), waiting_for=()).encode(), b"", ExclusionCode.STALLED),
        (
            pack(["hello", "inputs", [0, 0], None, bytes(16), bytes(16), bytes(16), bytes(32)]),
            b"",
            ExclusionCode.PROTOCOL_VIOLATION,
        ),
    ],
    ids=["part-first", "huge-weight", "negative", "nan", "garbage", "beat-without-reason", "second-hello"],
)
def test_a_contributor_that_breaks_the_protocol_is_dropped_and_nobody_else(header, payload, code):
    async def main():
        async with SimulatedSwarm() as swarm:
            each, averagers, controls = await standing_round(swarm)
            offender = exchange_of(averagers[2])
            target = offender.group.position(averagers[0].peer_id)
            (link,) = [link for link in offender._outgoing if link.other == target]
            assert link.channel is not None
            await link.channel.send(header, payload)
            controls[-1].allow_allreduce()
            honest = [await control for control in controls[:2]]
            await asyncio.gather(controls[-1], return_exceptions=True)
            assert honest[0].excluded[averagers[2].peer_id].code is code
            assert averagers[1].peer_id not in honest[0].excluded
            for own, result in enumerate(honest):
                for span, members in result.contributors:
                    expected = sum([a.peer_id for a in averagers].index(member) for member in members) / len(members)
                    assert each[own][0][span.start : span.stop].eq(expected).all()

    run_virtual(main)


@pytest.mark.parametrize("kind", [ChannelKind.INPUTS, ChannelKind.FETCH, ChannelKind.PUSH])
def test_channels_of_another_term_are_refused_and_blame_nobody(kind):
    async def main():
        async with SimulatedSwarm() as swarm:
            each, averagers, controls = await standing_round(swarm)
            exchange = exchange_of(averagers[0])
            member = averagers[1].peer
            channel = await member.open_channel(averagers[0].peer_id, "round:run", timeout=1.0)
            hello = hello_for(exchange, member.id, kind=kind, term=Term(0, 0), job=3)
            await channel.send(hello.encode(), b"no begin")
            with pytest.raises(ChannelRefusedError, match="another-term"):
                await channel.receive()
            controls[-1].allow_allreduce()
            for control in controls:
                result = await control
                assert result.fraction == 1.0
                assert result.excluded == {}
            assert all(tensors[0].eq(1.0).all() for tensors in each)

    run_virtual(main)


def test_a_member_whose_begin_was_lost_learns_of_the_group_from_the_first_contributor(monkeypatch):
    async def main():
        async with SimulatedSwarm() as swarm:
            each = [[torch.full((500,), float(index))] for index in range(3)]
            averagers = await swarm.averagers(each, target_group_size=3)
            lost: list[object] = []

            def losing_the_first_begin(send):
                def sent(peer, header, payload):
                    if not lost and isinstance(decode_message(header, payload)[1], Begin):
                        lost.append(peer)
                    else:
                        send(peer, header, payload)

                return sent

            for averager in averagers:
                assert averager._matchmaker is not None
                links = averager._matchmaker._links
                monkeypatch.setattr(links, "send", losing_the_first_begin(links.send))
            results = await swarm.step_all(averagers, timeout=4.0)
            assert len(lost) == 1
            assert {result.round_id for result in results} == {results[0].round_id}

    run_virtual(main)
