"""Plans of faults: what each kind does to an averaging round, that plans replay exactly, and that they tell what they are."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmavg import StepResult, SwarmError
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.message_watch import MessageSeen
from swarmavg.testing.network import SimulatedSwarm
from swarmavg.testing.processes import ProcessKilledError

SIZE = 600


@dataclass
class Played:
    """What became of one step of a swarm under a plan."""

    plan: FaultPlan
    outcomes: list[StepResult | BaseException]
    ended: list[float]
    tensors: list[torch.Tensor]
    trace: list[MessageSeen]
    arrivals: list[tuple[float, MessageSeen]]
    ids: list[Any]

    def sent_by(self, number: int, content: str = "") -> list[MessageSeen]:
        return [m for m in self.trace if m.source == self.ids[number] and content in ("", m.content)]

    def between(self, a: int, b: int) -> list[float]:
        """When messages from one to the other arrived."""
        return [when for when, m in self.arrivals if (m.source, m.target) == (self.ids[a], self.ids[b])]

    def moment(self, action: str) -> float:
        return next(event.time for event in self.plan.events if event.action == action)


def play(
    plan: FaultPlan, *, roles: list[Any] | None = None, directory: Any = "shared", wait: float = 0, **options: Any
) -> Played:
    """Three peers average once, each in a process of its own."""
    settings: dict[str, Any] = {
        "part_size_bytes": 400,
        "min_matchmaking_time": 1.0,
        "request_timeout": 0.5,
        "sender_timeout": 3.0,
        "reducer_timeout": 4.0,
        **options,
    }
    roles = roles or ["node"] * 3

    async def main() -> Played:
        loop = asyncio.get_running_loop()
        async with SimulatedSwarm(seed=3, directory=directory, faults=plan) as swarm:
            trace: list[MessageSeen] = []
            arrivals: list[tuple[float, MessageSeen]] = []
            swarm.messages.on_sending.append(trace.append)
            swarm.messages.on_received.append(lambda message: arrivals.append((loop.time(), message)))
            tensors = [torch.full((SIZE,), float(number)) for number in range(len(roles))]
            averagers = await swarm.averagers([[tensor] for tensor in tensors], roles=roles, **settings)
            await asyncio.sleep(wait)
            ended = [0.0] * len(roles)

            async def one(number: int) -> StepResult:
                try:
                    return await swarm.step(averagers[number], timeout=60)
                finally:
                    ended[number] = loop.time()

            outcomes = await asyncio.gather(*map(one, range(len(roles))), return_exceptions=True)
            return Played(plan, list(outcomes), ended, tensors, trace, arrivals, swarm.ids)

    return run_virtual(main)


QUIET = FaultPlan()


def round_began(played: Played) -> float:
    return next(m.time for m in played.trace if m.is_part)


# ---- what each kind does


def test_without_faults_everybody_gets_the_mean() -> None:
    played = play(QUIET)
    assert all(isinstance(outcome, StepResult) for outcome in played.outcomes)
    assert all(torch.equal(tensor, torch.ones(SIZE)) for tensor in played.tensors)
    assert len(played.sent_by(2, "part")) == 8, "256 bytes each, for two ranges of 800"


@pytest.mark.parametrize(("when", "parts"), [("at_part", 2), ("after_part", 3)])
def test_a_peer_is_killed_at_its_third_part(when: str, parts: int, caplog: pytest.LogCaptureFixture) -> None:
    """A client that reduces nothing: the others average without it, over the parts that it did not deliver at least."""
    plan = getattr(FaultPlan().kill(2), when)(3)
    played = play(plan, roles=["node", "node", "client"])
    assert isinstance(played.outcomes[2], ProcessKilledError)
    assert [isinstance(outcome, StepResult) for outcome in played.outcomes[:2]] == [True, True]
    arrived = [m for _, m in played.arrivals if m.source == played.ids[2] and m.is_part]
    assert len(arrived) == parts, "not a byte of the one it was about to send; or that one too"
    assert played.sent_by(2)[-1].number == [m.number for m in played.sent_by(2, "part")][2]
    assert torch.equal(played.tensors[0], played.tensors[1])
    assert torch.equal(played.tensors[2], torch.full((SIZE,), 2.0)), "its process did nothing more"
    assert [(event.action, event.peers) for event in plan.events] == [("kill", (2,))]
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_an_abrupt_kill_loses_what_is_under_way() -> None:
    whole, abrupt = (play(FaultPlan().kill(2, abrupt=abrupt).after_message(12)) for abrupt in (False, True))
    assert whole.sent_by(2) == abrupt.sent_by(2)
    lost = set(whole.sent_by(2)) - {m for _, m in abrupt.arrivals if m.source == abrupt.ids[2]}
    assert lost
    assert {m for _, m in whole.arrivals if m.source == whole.ids[2]} == set(whole.sent_by(2))


def test_a_peer_is_killed_after_receiving_its_tenth_message_and_acts_on_nothing_more() -> None:
    plan = FaultPlan().kill(1).after_receiving(10)
    played = play(plan)
    received = [when for when, m in played.arrivals if m.target == played.ids[1]]
    assert len(received) == 10
    assert all(m.time <= received[-1] for m in played.sent_by(1))
    assert isinstance(played.outcomes[1], ProcessKilledError)
    assert played.ended[1] == plan.events[0].time == received[-1]


def test_a_frozen_peer_says_nothing_and_goes_on_later() -> None:
    plan = FaultPlan().freeze(1, seconds=2).at_part(2)
    played = play(plan)
    frozen, thawed = played.moment("freeze"), played.moment("end of freeze")
    assert thawed == frozen + 2
    assert not [m for m in played.sent_by(1) if frozen < m.time < thawed]
    assert [m for m in played.sent_by(1) if m.time >= thawed]
    assert [m for m in played.sent_by(0) if frozen < m.time < thawed], "the others do not stand still"
    assert all(isinstance(outcome, StepResult) for outcome in played.outcomes), "two seconds are within everybody's patience"
    assert all(torch.equal(tensor, torch.ones(SIZE)) for tensor in played.tensors)


def test_over_a_cut_link_nothing_passes_either_way_for_so_long() -> None:
    plan = FaultPlan().cut(0, 1, seconds=2).at_part(1)
    played = play(plan)
    cut, healed = played.moment("cut"), played.moment("end of cut")
    assert healed == cut + 2
    for a, b in ((0, 1), (1, 0)):
        assert not [when for when in played.between(a, b) if cut < when < healed]
        assert [when for when in played.between(a, b) if when >= healed]
    assert [when for when in played.between(0, 2) if cut < when < healed]
    assert all(isinstance(outcome, StepResult) for outcome in played.outcomes)


def test_a_stalled_link_moves_nothing_one_way() -> None:
    plan = FaultPlan().stall(0, 1, seconds=2).at_part(1)
    played = play(plan)
    stalled, over = played.moment("stall"), played.moment("end of stall")
    assert not [when for when in played.between(0, 1) if stalled + 0.011 < when < over]
    assert [when for when in played.between(1, 0) if stalled + 0.011 < when < over]
    assert all(isinstance(outcome, StepResult) for outcome in played.outcomes)


def test_a_slow_link_takes_its_time_and_is_fast_again_afterwards() -> None:
    plans = [FaultPlan().slow(0, 1, bytes_per_second=4000, seconds=seconds).at_part(1) for seconds in (None, 0.1)]
    slow, brief, quiet = map(play, [*plans, QUIET])
    for played in (slow, brief, quiet):
        assert all(torch.equal(tensor, torch.ones(SIZE)) for tensor in played.tensors)
    assert slow.ended[1] - round_began(slow) > 0.4, "1600 bytes of parts and results, and what goes with them"
    assert slow.ended[1] > brief.ended[1] > quiet.ended[1]
    assert brief.moment("end of slow") == pytest.approx(brief.moment("slow") + 0.1)


def test_a_corrupt_frame_is_noticed_and_the_step_still_ends() -> None:
    plan = FaultPlan().corrupt(2).at_part(2)
    played = play(plan, roles=["node", "node", "client"])
    assert [event.action for event in plan.events] == ["corrupt"]
    corrupted = played.sent_by(2, "part")[1]
    assert corrupted not in [m for _, m in played.arrivals][-1:]
    cancels = [m for m in played.trace if m.kind == "cancel" and b"violation" in m.header]
    assert [(m.source, m.target) for m in cancels] == [(corrupted.target, played.ids[2])]
    assert all(isinstance(outcome, StepResult | SwarmError) for outcome in played.outcomes)


def test_a_corrupt_payload_is_another_value_at_one_place_and_that_follows_from_the_seed() -> None:
    def values(seed: int) -> torch.Tensor:
        plan = FaultPlan(seed).corrupt(2, where="payload").at_part(1)
        return play(plan, roles=["node", "node", "client"]).tensors[0]

    wrong = [values(seed) for seed in (1, 1, 2)]
    assert [int(tensor.ne(torch.ones(SIZE)).sum()) for tensor in wrong] == [1, 1, 1]
    assert torch.equal(wrong[0], wrong[1])
    assert not torch.equal(wrong[0], wrong[2])


def said(played: Played) -> list[Any]:
    """What was said, without the last bits of moments and of times, and without the order of what was said at one moment."""
    return sorted(
        (round(m.time, 6), m.source, m.target, m.kind, m.purpose, m.content, m.header if m.purpose == "round:run" else b"")
        for m in played.trace
    )


@pytest.mark.parametrize("directory", ["shared", "gossip"])
def test_a_skewed_clock_changes_nothing_of_what_is_said(directory: Any) -> None:
    wall = play(FaultPlan().step_clock(1, hours=1), directory=directory, wait=3)
    both = play(FaultPlan().skew_clock(1, hours=1), directory=directory, wait=3)
    assert all(torch.equal(tensor, torch.ones(SIZE)) for tensor in both.tensors)
    assert said(wall) == said(both), "no moment of a peer's event loop is in it"


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wall_clock_that_is_set_disturbs_nobody(hours: int) -> None:
    plan = FaultPlan().step_clock(1, hours=hours).at(2)
    played = play(plan, directory="gossip", wait=3)
    assert [event.action for event in plan.events] == ["step_clock"]
    assert all(torch.equal(tensor, torch.ones(SIZE)) for tensor in played.tensors)


def test_messages_of_another_peer_may_be_the_moment() -> None:
    plan = FaultPlan().kill(2).after_part(1, of=0)
    played = play(plan)
    assert played.moment("kill") == played.sent_by(0, "part")[0].time


def test_a_fault_without_a_moment_waits_for_its_peers_only() -> None:
    plan = FaultPlan().slow(0, 2, bytes_per_second=1e4).freeze(2, seconds=0.5)
    played = play(plan)
    assert [event.action for event in plan.events] == ["slow", "freeze", "end of freeze"]
    assert all(isinstance(outcome, StepResult) for outcome in played.outcomes)


def test_faults_of_one_kind_that_overlap_end_with_the_last() -> None:
    plan = FaultPlan().freeze(1, seconds=1).at(1).freeze(1, seconds=1).at(1.5)
    log: list[float] = []

    async def main() -> None:
        async with SimulatedSwarm(faults=plan) as swarm:
            for _ in range(2):
                await swarm.peer()
            await swarm.run(1, _note_times(log, until=4))

    run_virtual(main)
    assert [when for when in log if 1.01 < when < 2.49] == []
    assert [event.action for event in plan.events] == ["freeze", "freeze", "end of freeze"]


async def _note_times(log: list[float], until: float) -> None:
    while (now := asyncio.get_running_loop().time()) < until:
        log.append(now)
        await asyncio.sleep(0.1)


def test_a_swarm_ends_whatever_its_plan_has_left_behind() -> None:
    plan = FaultPlan().freeze(0).at(1).cut(1, 2).at(1).kill(1).at(1.5).kill(2).at_part(10_000)

    async def main() -> None:
        async with SimulatedSwarm(faults=plan) as swarm:
            await swarm.averagers([[torch.zeros(10)]] * 3)
            await asyncio.sleep(5)
            with pytest.raises(ProcessKilledError):
                await swarm.step(1)
        assert asyncio.get_running_loop().time() < 30

    run_virtual(main)
    assert plan.unapplied == ("kill peer 2 when peer 2 is about to send its part 10000",)


def test_a_peer_killed_before_it_has_started_is_not_handed_out() -> None:
    async def main() -> None:
        async with SimulatedSwarm(faults=FaultPlan().kill(1)) as swarm:
            await swarm.peer()
            with pytest.raises(ProcessKilledError):
                await swarm.peer()
            assert [process.alive for process in swarm.processes] == [True, False]
            await swarm.peer()

    run_virtual(main)


def test_by_hand_and_by_whichever_name_of_the_peer() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers([[torch.zeros(3)], [torch.ones(3)]])
            await swarm.step_all([first, second])
            swarm.freeze(first)
            swarm.thaw(first.peer)
            swarm.kill(1)
            assert not swarm.process(second).alive
            with pytest.raises(ProcessKilledError):
                await swarm.run(second.peer, asyncio.sleep(1))
            with pytest.raises(ValueError, match="got 7"):
                swarm.kill(7)

    run_virtual(main)


# ---- replay


@pytest.mark.parametrize("seed", range(6))
def test_the_same_plan_twice_gives_the_same_messages_to_the_last_byte(seed: int) -> None:
    plan = FaultPlan.random(seed, peers=3, faults=3, seconds=1.0)
    directory = "gossip" if seed % 2 else "shared"
    first, second = play(plan, directory=directory), play(eval(repr(plan)), directory=directory)
    assert first.trace == second.trace
    assert [(when, m.number) for when, m in first.arrivals] == [(when, m.number) for when, m in second.arrivals]
    assert first.plan.events == second.plan.events
    assert first.ended == second.ended
    assert list(map(repr, first.outcomes)) == list(map(repr, second.outcomes))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


def test_the_code_of_the_guide_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/test-under-faults.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for code in blocks:
        names: dict[str, Any] = {}
        exec(code, names)
        for name, test in names.items():
            if name.startswith("test_"):
                test()
    assert capsys.readouterr().out.count("FaultPlan(") == 3


def test_a_plan_needs_virtual_time() -> None:
    async def main() -> None:
        async with SimulatedSwarm(faults=FaultPlan().kill(0)) as swarm:
            await swarm.peer()

    with pytest.raises(RuntimeError, match="virtual time"):
        asyncio.run(main())
