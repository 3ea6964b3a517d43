"""One attempt at a round: find a group, wait for the trigger, exchange, commit. Either all of it happens or the tensors stay.

Internal to the averager, which decides about retries and holds the public API.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from swarmavg.config import AveragerConfig
from swarmavg.control import AveragingStage, StepResult, StepState
from swarmavg.errors import AllreduceError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.planning.partition import Layout, Plan, make_plan
from swarmavg.protocol.group import Group, Member
from swarmavg.protocol.matchmaking_events import LookRequest
from swarmavg.reduction.memory import plain_memory
from swarmavg.reduction.reducer import RangeReducer
from swarmavg.reduction.snapshot import Snapshot
from swarmavg.runtime.channels import ChannelHub
from swarmavg.runtime.exchange import Exchange
from swarmavg.runtime.gathering import read_gather
from swarmavg.runtime.matchmaker import Matchmaker
from swarmavg.runtime.offload import INLINE_BYTES, offload
from swarmavg.runtime.round_desk import RoundDesk
from swarmavg.runtime.round_link import RoundTimes
from swarmavg.telemetry.logs import get_logger

_log = get_logger("swarmavg.round")


REMEMBERED_STORIES = 32

LONGEST_LINGER = 10
"""A member that keeps saying that it waits for results is served for so many times `reducer_timeout` at most."""


class OwnFailureError(AllreduceError):
    """The own tensors could not be read or written. Another group would not change that: it is not tried again."""


class RoundPlanner:
    """From the members of a group to the plan that all of them compute alike."""

    def __init__(self, layout: Layout, part_size_bytes: int, min_vector_size: int) -> None:
        self.layout = layout
        self._part_size_bytes = part_size_bytes
        self._min_vector_size = min_vector_size
        self._latest: tuple[tuple[Member, ...], Plan] | None = None

    def plan_for(self, members: Sequence[Member]) -> Plan:
        """Raises `ValueError` for a group in which nobody can reduce, such as one of clients only."""
        key = tuple(members)
        if self._latest is None or self._latest[0] != key:
            plan = make_plan(
                self.layout,
                contributes=[member.role.contributes for member in key],
                reduces=[member.role.reduces for member in key],
                bandwidths=[member.bandwidth for member in key],
                part_size_bytes=self._part_size_bytes,
                min_vector_size=self._min_vector_size,
            )
            self._latest = (key, plan)
        return self._latest[1]

    def hash_for(self, members: Sequence[Member]) -> bytes:
        """The plan's hash. Raises like `plan_for`."""
        return self.plan_for(members).hash


class AveragingRound:
    """Runs the rounds of one averager, one after another; the last ones may still be serving results to slow members."""

    def __init__(
        self,
        hub: ChannelHub,
        *,
        purpose: str,
        config: AveragerConfig,
        planner: RoundPlanner,
        tensors: Sequence[torch.Tensor],
        lock: asyncio.Lock,
        desk: RoundDesk,
    ) -> None:
        self._hub = hub
        self._purpose = purpose
        self._config = config
        self._planner = planner
        self._tensors = tensors
        self._lock = lock
        self._desk = desk
        self._spare_snapshots: list[Snapshot] = []
        """Memory of an earlier round, ready for the next. A round that is still serving members keeps its own."""
        self._spare: torch.Tensor | None = None
        """The same, of an accumulator."""
        self._stories: OrderedDict[GroupId, Callable[[], list[str]]] = OrderedDict()
        self._serving: set[asyncio.Task[None]] = set()
        self._small = planner.layout.nbytes <= INLINE_BYTES

    async def attempt(
        self, state: StepState, matchmaker: Matchmaker, *, bits: str, gather: bytes, search_until: float, attempts: int
    ) -> tuple[StepResult, str]:
        """Returns the result and the group bits for the next round. Raises `MatchmakingError` or `AllreduceError`."""
        loop = asyncio.get_running_loop()
        state.stage = AveragingStage.LOOKING_FOR_GROUP
        began = loop.time()
        group = await matchmaker.find_group(
            LookRequest(
                bits=bits,
                gather=gather,
                bandwidth=self._config.bandwidth,
                not_before=None if state.scheduled_time is None else max(0.0, state.scheduled_time - began),
                deadline=search_until,
                window=self._config.min_matchmaking_time,
            )
        )
        next_bits = group.next_bits(self._hub.id, self._config.target_group_size)
        matchmaker.round_state(bits=next_bits)
        stood = loop.time()
        lost: set[PeerId] = set()
        succeeded = False
        try:
            exchange = self._new_exchange(group)
            try:
                await self._run(state, exchange)
                succeeded = True
            finally:
                exchange.machine.note(loop.time(), "the step has its result" if succeeded else "the step failed")
                lost = {group.members[position].peer_id for position in exchange.machine.out} - {self._hub.id}
        finally:
            if not succeeded:
                state.began_allreduce = False
            matchmaker.round_finished(bits=next_bits if succeeded else bits, ok=succeeded, failed_members=lost)
        result = self._result(exchange, attempts, stood - began, loop.time() - stood)
        _log_round(self._config.prefix, group, result)
        return result, next_bits

    def story(self, round_id: GroupId | str | None) -> str:
        """What happened in one of the latest rounds, by default the last one. Raises `ValueError` for any other."""
        known = {str(group_id): lines for group_id, lines in self._stories.items()}
        wanted = next(reversed(known), None) if round_id is None else str(round_id)
        if wanted is None:
            return "no round has begun"
        if wanted not in known:
            raise ValueError(f"round_id={wanted!r} is none of the latest {len(known)} rounds of this averager")
        return "\n".join(known[wanted]())

    async def aclose(self, patience: float) -> None:
        """Let members that still wait for results have them, for at most `patience` seconds, then end."""
        if self._serving:
            _, late = await asyncio.wait(self._serving, timeout=patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _new_exchange(self, group: Group) -> Exchange:
        layout = self._planner.layout
        try:
            plan = self._planner.plan_for(group.members)
        except ValueError as error:
            raise AllreduceError(f"group {group.group_id} cannot average: {error}") from None
        exchange = Exchange(
            self._hub,
            purpose=self._purpose,
            group=group,
            layout=layout,
            plan=plan,
            times=RoundTimes(
                sender=self._config.sender_patience,
                reducer=self._config.reducer_patience,
                dial=self._config.request_timeout,
            ),
            snapshot=self._spare_snapshots.pop() if self._spare_snapshots else Snapshot(layout),
            accumulator=self._memory(RangeReducer.accumulator_bytes(layout, plan.parts[group.position(self._hub.id)])),
            reject_nonfinite=self._config.rejects_nonfinite,
        )
        exchange.machine.note(asyncio.get_running_loop().time(), _beginning(group))
        self._stories[group.group_id] = exchange.machine.story
        while len(self._stories) > REMEMBERED_STORIES:
            self._stories.popitem(last=False)
        self._desk.open(exchange)
        return exchange

    def _memory(self, size: int) -> torch.Tensor:
        """The spare accumulator if it is large enough, else new memory. Taken out of the spare while it is used."""
        spare, self._spare = self._spare, None
        if spare is None or spare.numel() < size:
            return plain_memory(size, torch.uint8)
        return spare

    async def _run(self, state: StepState, exchange: Exchange) -> None:
        group_id = exchange.group.group_id
        why = "failed"
        try:
            state.progress = lambda: exchange.ledger.progress
            await self._within_deadline(state, exchange)
        except BaseException as error:
            why = "left the round" if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}"
            exchange.leave(why)
            self._desk.close(group_id, f"the round is over: {why}")
            self._in_background(self._wind_down(exchange), f"round-wind-down-{group_id}")
            raise
        finally:
            reached = exchange.ledger.progress
            state.progress = lambda: reached  # a control that is kept keeps no memory of the round
        state.stage = AveragingStage.FINISHED
        self._in_background(self._serve_out(exchange), f"round-serve-out-{group_id}")

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _wind_down(self, exchange: Exchange) -> None:
        await exchange.wind_down()
        self._recycle(exchange)

    async def _within_deadline(self, state: StepState, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout_at(None if state.deadline == float("inf") else state.deadline):
                exchange.attach()
                state.stage = AveragingStage.AWAITING_TRIGGER
                if not state.may_begin_now():
                    await _unless_failed(_may_begin(state), exchange)
                state.began_allreduce = True
                state.stage = AveragingStage.RUNNING_ALLREDUCE
                async with asyncio.timeout(self._config.allreduce_timeout):
                    await self._take_snapshot(exchange, state.weight)
                    exchange.start(state.weight)
                    await self._commit(exchange)
        except TimeoutError:
            reasons = {peer: str(exclusion) for peer, exclusion in exchange.excluded.items()}
            waiting = ", ".join(peer.short for peer in exchange.waiting_for()) or "nobody"
            raise AllreduceError(
                f"round {exchange.group.group_id} was not finished in time ({state.stage.value}); waiting for {waiting}",
                reasons,
            ) from None

    async def _take_snapshot(self, exchange: Exchange, weight: float) -> None:
        if not exchange.contributes:
            return
        rejects = self._config.rejects_nonfinite and weight > 0  # with weight 0 nothing is sent
        async with self._lock:
            with _naming_own_failure("read"):
                if self._small:
                    exchange.snapshot.take(self._tensors, rejects)
                else:
                    await offload(exchange.snapshot.take, self._tensors, rejects)

    async def _commit(self, exchange: Exchange) -> None:
        """Write what was averaged. Once it has begun, it ends: a cancellation or deadline that comes later comes too late."""
        while True:
            await exchange.results()
            async with self._lock:
                if exchange.begin_commit():  # else a member was lost while somebody held the tensors
                    await self._write(exchange)
                    exchange.end_commit()
                    return

    async def _write(self, exchange: Exchange) -> None:
        parts = exchange.ledger.averaged_parts()
        alpha = self._config.averaging_alpha
        with _naming_own_failure("written"):
            if not parts:
                return
            if self._small:
                exchange.snapshot.commit(self._tensors, parts, alpha)
            else:
                await _uninterrupted(offload(exchange.snapshot.commit, self._tensors, parts, alpha))

    async def _serve_out(self, exchange: Exchange) -> None:
        """Members on slow links are served while they say that they wait; the silent ones are dropped by the exchange."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_LINGER * exchange.times.longest):
                await exchange.serve_out()
        self._desk.close(exchange.group.group_id, "the round is over")
        self._recycle(exchange)

    def _recycle(self, exchange: Exchange) -> None:
        """The round's memory serves the next one. Only one set is kept."""
        lines = exchange.machine.story()
        self._stories[exchange.group.group_id] = lambda: lines  # without what the machine refers to
        self._spare = exchange.accumulator
        self._spare_snapshots = [exchange.snapshot]

    def _result(self, exchange: Exchange, attempts: int, matchmaking: float, allreduce: float) -> StepResult:
        ledger = exchange.ledger
        everything = exchange.contributes
        return StepResult(
            gathered=read_gather(exchange.group),
            round_id=exchange.group.group_id,
            contributors=ledger.contributors(),
            missing=ledger.missing() if everything else [],
            fraction=ledger.fraction() if everything else 1.0,
            excluded=dict(exchange.excluded),
            fate=exchange.fate,
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            matchmaking_seconds=matchmaking,
            allreduce_seconds=allreduce,
            attempts=attempts,
        )


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, whatever cancellations arrive meanwhile, and raise what it raised."""
    task = asyncio.create_task(work, name="round-commit")
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()


@contextmanager
def _naming_own_failure(verb: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:  # what torch raises for tensors of another shape, or without memory
        raise OwnFailureError(f"the own tensors could not be {verb}: {error}") from error


async def _unless_failed(waiting: Coroutine[Any, Any, None], exchange: Exchange) -> None:
    """Wait, but not for a round that has nobody else left. Raises `AllreduceError` then."""
    tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(exchange.failed())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _beginning(group: Group) -> str:
    members = ", ".join(f"{member.peer_id.short} ({member.role.value})" for member in group.members)
    return f"round {group.group_id} begins; leader {group.leader.short}; members in order: {members}"


async def _may_begin(state: StepState) -> None:
    """Wait for the trigger and for the scheduled time, which may be moved meanwhile."""
    await state.trigger.wait()
    loop = asyncio.get_running_loop()
    while state.scheduled_time is not None and loop.time() < state.scheduled_time:
        state.schedule_changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(state.scheduled_time):
                await state.schedule_changed.wait()


def _log_round(prefix: str, group: Group, result: StepResult) -> None:
    megabytes = (result.bytes_sent + result.bytes_received) / 1e6
    _log.info(
        "round finished",
        prefix=prefix,
        group=group.group_id,
        size=len(group.members),
        seconds=f"{result.allreduce_seconds:.3f}",
        matchmaking=f"{result.matchmaking_seconds:.3f}",
        rate=f"{megabytes / max(result.allreduce_seconds, 1e-9):.1f}MB/s",
        fraction=f"{result.fraction:.4f}",
    )
    if result.missing:
        spans = ", ".join(f"{span.start}-{span.stop}" for span in result.missing[:8])
        _log.warning(
            "some elements could not be averaged and keep their local values",
            prefix=prefix,
            group=group.group_id,
            fraction=f"{result.fraction:.4f}",
            spans=spans + (", ..." if len(result.missing) > 8 else ""),
        )
