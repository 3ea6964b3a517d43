"""One peer's part in one round: its channels, what it reduces, and what the round's machine decides about them.

An exchange moves numbers between the channels, the reducers and the snapshot, and carries out the effects of the machine
(`protocol.round`). It does not know the live tensors, does not look for groups, and decides nothing about retries.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import torch

from swarmavg.errors import AllreduceError, FencedError
from swarmavg.identifiers import PeerId
from swarmavg.planning.partition import Layout, Plan
from swarmavg.protocol.group import Group
from swarmavg.protocol.outcome import Exclusion, ExclusionCode, Ledger, RoundFate
from swarmavg.protocol.round import Round
from swarmavg.protocol.round_control import LinkId, Term
from swarmavg.protocol.round_events import (
    Acknowledged,
    CommitBegun,
    CommitEnded,
    ControlLost,
    ControlMissing,
    Drop,
    HeldUp,
    Jobs,
    LeaveRound,
    LinkFailed,
    MemberLeft,
    Open,
    RoundEvent,
    RoundSetting,
    Send,
    Sever,
    TermSeen,
    Tick,
)
from swarmavg.protocol.round_jobs import Job
from swarmavg.protocol.round_messages import ChannelKind, RoundHello
from swarmavg.protocol.round_states import RoundState
from swarmavg.reduction.memory import plain_memory
from swarmavg.reduction.reducer import RangeReducer
from swarmavg.reduction.snapshot import Snapshot
from swarmavg.runtime.channels import ChannelHub
from swarmavg.runtime.contributor_link import ContributorLink
from swarmavg.runtime.control_links import ControlLinks
from swarmavg.runtime.lag import LAG, lenient_timeout
from swarmavg.runtime.relay_links import Relay, RelayLink
from swarmavg.runtime.round_link import ANOTHER_TERM, Link, LinkFailedError, RoundTimes, fenced_code, hello_of
from swarmavg.runtime.round_store import RoundStore
from swarmavg.runtime.served_range import ServedRange
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.interface import Channel

_log = get_logger("swarmavg.round")


class Exchange:
    """Usage: `attach` when the group stands, `start` with the weight once the snapshot is taken, `results` until every
    result is in and may be committed, `begin_commit` and `end_commit` around the commit, then `serve_out` (or `leave` and
    `wind_down`).
    """

    def __init__(
        self,
        hub: ChannelHub,
        *,
        purpose: str,
        group: Group,
        layout: Layout,
        plan: Plan,
        times: RoundTimes,
        snapshot: Snapshot,
        accumulator: torch.Tensor,
        reject_nonfinite: bool = True,
    ) -> None:
        self.hub = hub
        self.purpose = purpose
        self.group = group
        self.layout = layout
        self.plan = plan
        self.times = times
        self.reject_nonfinite = reject_nonfinite
        self.position = group.position(hub.id)
        self.weight: float | None = None
        self.snapshot = snapshot
        self.accumulator = accumulator
        self.ledger = Ledger(layout, plan, [member.peer_id for member in group.members])
        self.store = RoundStore(
            layout,
            self.ledger,
            snapshot if self.contributes else None,
            contributors=plan.contributors,
            on_held=self._held,
        )
        self.bytes_sent = 0
        self.bytes_received = 0
        self.fate = RoundFate()
        self.machine = Round(self._setting())
        self._control = ControlLinks(self, self._feed)
        self._outgoing: dict[Link, None] = {}
        """Channels that this member opens, until their work is done."""
        self._ranges: dict[int | None, ServedRange] = {}
        self._relays: dict[int, Relay] = {}
        self._jobs_of = Term(0, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._attached_at = 0.0
        self._awake_at = self.now()
        """When this process last did anything for the round; the watchdog does something at every heartbeat."""
        self._broken: BaseException | None = None
        self._left = False
        self._dropped: dict[PeerId, Exclusion] = {}
        """Contributors that this member dropped from what it reduces. The others learn of it with the next term."""
        self._acknowledgements = 0
        self._done_with: dict[int, float] = {}
        """When a channel with a member came to its clean end."""
        self._inbound = 0
        """Channels of others that are being handled."""
        self._announced = RoundState.RUNNING

    def _setting(self) -> RoundSetting:
        members = self.group.members
        return RoundSetting(
            me=self.position,
            names=[member.peer_id.short for member in members],
            salt=self.group.group_id.digest,
            leader=self.group.position(self.group.leader),
            serves=frozenset(i for i, member in enumerate(members) if member.role.leads),
            receives=frozenset(self.plan.contributors),
            owners=self.plan.owners,
            request_timeout=self.times.dial,
            patience=self.times.longest,
            holdings=lambda: self.ledger.bits,
            heard=self._heard,
        )

    # What the channels use

    @property
    def term(self) -> Term:
        return self.machine.term

    @property
    def contributes(self) -> bool:
        return self.plan.contributes[self.position]

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def hello(self, kind: ChannelKind, server: int, job: int | None) -> RoundHello:
        return hello_of(self, kind, server, job)

    def acknowledged(self, job: int | None, member: int) -> None:
        """A member has fetched every result of the own range, or of a job."""
        self._done_with[member] = self.now()
        self._acknowledgements += 1
        self._feed(Acknowledged(job))

    def link_failed(self, link: LinkId, accused: int, failure: LinkFailedError) -> None:
        """A data channel ended before its work was done."""
        if self._left or self.machine.state.over:
            return
        if failure.fenced_by is not None or failure.closed:
            self._feed(ControlLost(accused, failure.code, failure.detail, failure.fenced_by, failure.closed))
        elif not failure.blameless:
            peer = self._peer(accused)
            _log.info(
                "channel of the round failed",
                peer=peer.short,
                group=self.group.group_id,
                reason=failure.code.value,
                detail=failure.detail,
            )
            if accused == link.contributor:
                self._dropped.setdefault(peer, Exclusion(peer_id=peer, code=failure.code, detail=failure.detail))
            self._feed(LinkFailed(link, accused, failure.code, failure.detail))

    def changed(self) -> None:
        """Something that others may wait for has changed."""
        self._changed.set()

    def term_seen(self, sender: int, term: Term) -> None:
        if term > self.machine.term:
            self._feed(TermSeen(sender, term))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the round; an exception that escapes it ends the round on this side."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    # The course of a round

    def attach(self) -> None:
        """Open the channels to all reducers; they and the contributors learn that this member is there and waits."""
        self._attached_at = self._awake_at = self.now()
        if self.plan.parts[self.position]:
            self._ranges[None] = ServedRange(
                self,
                job=None,
                numbers=self.plan.numbers(self.position),
                contributors=[position for position in self.plan.contributors if position not in self.machine.out],
                memory=self.accumulator,
            )
        for reducer in self.plan.reducers if self.contributes else ():
            if reducer != self.position and reducer not in self.machine.out:
                link = ContributorLink(self, reducer=reducer, job=None, numbers=self.plan.numbers(reducer))
                self._begin(link, link.run)
        self._carry_out()
        self.spawn(self._watch(), "round-watchdog")

    def start(self, weight: float) -> None:
        """The snapshot is taken and the weight is final: send."""
        self.weight = weight
        for link in self._outgoing:
            link.pulse.news()
        for served in self._ranges.values():
            served.start(weight)

    async def serve(self, channel: Channel, hello: RoundHello) -> None:
        """Handle a channel that another member opened, until its end. Refused if it has no place in this round."""
        refusal = self._refusal(channel.peer, hello)
        if refusal is not None:
            channel.abort(refusal, code="not-in-this-round")
            return
        self._inbound += 1
        try:
            await self._serve(channel, self.group.position(channel.peer), hello)
        finally:
            self._inbound -= 1
            self._changed.set()

    async def _serve(self, channel: Channel, member: int, hello: RoundHello) -> None:
        if member in self.machine.out:
            channel.abort("the round goes on without you", code=fenced_code(self.machine.fencing))
        elif hello.kind is ChannelKind.CONTROL:
            await self._control.serve(channel, member)
        elif hello.kind is ChannelKind.INPUTS and hello.job is None:
            served = self._ranges.get(None)
            if served is None:
                channel.abort("this member reduces nothing", code="not-expected")
            else:
                await served.serve(channel, member)
        else:
            await self._serve_job(channel, member, hello)

    def member_left(self, peer: PeerId, reason: str) -> None:
        """A member has said that it takes no part: nobody waits for it any longer."""
        if peer in self.group and peer != self.hub.id:
            self._feed(MemberLeft(self.group.position(peer), reason))

    async def results(self) -> None:
        """Wait until every result is in and may be committed, or nothing more can come in.

        Raises `FencedError` if the others went on without this member, `AllreduceError` if nothing came in, or if all others
        were lost before they had any part in it.
        """
        while self._broken is None and not self._results_in():
            self._changed.clear()
            await self._changed.wait()
        if self._broken is not None:
            raise AllreduceError(f"round {self.group.group_id} failed on this side: {self._broken!r}") from self._broken
        if self.machine.state in (RoundState.FENCED, RoundState.DIVERGED):
            raise FencedError(
                f"round {self.group.group_id}: the others went on without this peer: {self.machine.fenced_because}",
                self._reasons(),
            )
        if self.contributes:
            self._check_others()
        elif self.machine.out and not self._acknowledgements and not self.machine.live.intersection(self.plan.contributors):
            raise AllreduceError(f"round {self.group.group_id}: all contributors were lost", self._reasons())

    async def failed(self) -> None:
        """Wait until the round cannot become anything for this member, then raise why. For those who have yet to begin."""
        while not (self._broken is not None or self.machine.state.over or self._alone()):
            self._changed.clear()
            await self._changed.wait()
        if self._broken is None and not self.machine.state.over:
            raise AllreduceError(f"round {self.group.group_id}: all other members were lost", self._reasons())
        await self.results()

    def begin_commit(self) -> bool:
        """The tensors' lock is held: whether the averages may be written now. If so, they must be."""
        if self.machine.may_commit:
            self._feed(CommitBegun())
            return True
        return self.machine.state is RoundState.ORPHANED or not self.contributes

    def end_commit(self) -> None:
        """The averages are written."""
        if self.machine.state.committed:
            self._feed(CommitEnded())

    def waiting_for(self) -> list[PeerId]:
        """Members from which something is still due."""
        positions = {link.other for link in self._outgoing}
        for served in self._ranges.values():
            positions.update(served.reducer.waiting_for())
        return [self._peer(position) for position in sorted(positions - {self.position})]

    @property
    def excluded(self) -> dict[PeerId, Exclusion]:
        """Members that are out, and those that live but are missing from a range. All members of a term know of its own."""
        out = dict(self.machine.out)
        if self.machine.state is RoundState.ORPHANED:
            out = {**self.machine.suspected, **out}
        exclusions = {
            self._peer(member): Exclusion(peer_id=self._peer(member), code=code, detail=detail)
            for member, (code, detail) in sorted(out.items())
        }
        for link, severed in sorted(self.machine.severed.items()):
            peer = self._peer(link.contributor)
            code = severed.code if severed.accused == link.contributor else ExclusionCode.SEVERED
            detail = f"its channel to {self._peer(link.reducer).short} failed: {severed.code.value}, {severed.detail}"
            exclusions.setdefault(peer, Exclusion(peer_id=peer, code=code, detail=detail))
        return {**self._dropped, **exclusions}

    async def serve_out(self) -> None:
        """Go on until everybody has everything, then end all tasks."""
        try:
            while not self.machine.state.over and self._broken is None:
                self._changed.clear()
                await self._changed.wait()
            self._control.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.times.dial):
                    while self._inbound or len(self._tasks) > 1:  # the watchdog stays
                        self._changed.clear()
                        await self._changed.wait()
        finally:
            self.leave("it served for as long as it could")
            await self.wind_down()

    def leave(self, reason: str) -> None:
        """Leave the round now and tell everybody. `wind_down` must follow."""
        if self._left:
            return
        self._left = True
        if not self.machine.state.over:
            self._feed(LeaveRound(reason))
        if self._timer is not None:
            self._timer.cancel()
        self._control.close()
        for link in [*self._outgoing, *self._serving_links()]:
            link.give_up(LinkFailedError(ExclusionCode.CANCELLED, reason))

    async def wind_down(self) -> None:
        """End all tasks, once the last control messages are out: bounded by `FAREWELL`."""
        try:
            async with asyncio.timeout(FAREWELL):
                while self._control.busy:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._control.abort("left the round")
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # The machine

    def _feed(self, event: RoundEvent) -> None:
        self._receive(event, self.now())

    def _tick(self, deadline: float) -> None:
        self._receive(Tick(), max(deadline, self.now()))  # timers may be early by the clock's resolution

    def _receive(self, event: RoundEvent, now: float) -> None:
        lag = now - self._awake_at - self.times.beat
        self._awake_at = now
        if lag > LAG:
            self.machine.receive(HeldUp(lag), now)
        self.machine.receive(event, now)
        self._carry_out()

    def _carry_out(self) -> None:
        for effect in self.machine.drain_effects():
            match effect:
                case Send():
                    self._control.send(effect.to, effect.term, effect.message)
                case Open():
                    self._control.open(effect.member)
                case Drop():
                    self._drop(effect)
                case Sever():
                    self._sever(effect.link)
                case Jobs():
                    self._take_up(effect.term, effect.jobs)
        self._arm()
        self._note_state()
        self._changed.set()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None and not self._left:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick, deadline)

    def _note_state(self) -> None:
        state = self.machine.state
        if state is self._announced:
            return
        self._announced = state
        if state in (RoundState.FENCED, RoundState.DIVERGED):
            _log.warning("the others go on without this peer", group=self.group.group_id, committed=state.committed)
        self.fate.diverged = state is RoundState.DIVERGED

    def _drop(self, effect: Drop) -> None:
        """A member is out: nothing more is taken from it."""
        failure = LinkFailedError(ExclusionCode.FENCED, f"the round goes on without you: {effect.code.value}, {effect.detail}")
        code = fenced_code(self.machine.fencing)
        _log.warning(
            "peer excluded from the round",
            peer=self._peer(effect.member).short,
            group=self.group.group_id,
            reason=effect.code.value,
            detail=effect.detail,
        )
        self._end_links(lambda link: link.other == effect.member, failure, code)
        for served in self._served():
            served.drop(effect.member, failure, code)

    def _sever(self, link: LinkId) -> None:
        failure = LinkFailedError(ExclusionCode.SEVERED, "this channel had failed on the other side")
        self._end_links(lambda own: own.id == link, failure, "")
        if link.reducer == self.position:
            for served in self._served():
                served.drop(link.contributor, failure)

    def _end_links(self, chosen: Callable[[Link], bool], failure: LinkFailedError, code: str) -> None:
        for link in [link for link in self._outgoing if chosen(link)]:
            link.give_up(failure, code)

    def _take_up(self, term: Term, jobs: tuple[Job, ...]) -> None:
        """End the jobs of earlier terms, and begin these."""
        over = LinkFailedError(ExclusionCode.REFUSED, f"term {term} has begun", blameless=True)
        self._end_links(lambda link: link.job is not None, over, ANOTHER_TERM)
        for key in [key for key in self._ranges if key is not None]:
            self._ranges.pop(key).end(over)
        for number in list(self._relays):
            self._relays.pop(number).end(over)
        if self.machine.state.frozen:
            return
        self._jobs_of = term
        for job in jobs:
            self._begin_job(job)

    def _begin_job(self, job: Job) -> None:
        me = self.position
        if job.recomputes:
            contributors = [position for position in self.plan.contributors if job.contributors >> position & 1]
            if job.server == me:
                self._reduce_anew(job, contributors)
            elif me in contributors:
                link = ContributorLink(self, reducer=job.server, job=job.number, numbers=job.parts)
                self._begin(link, link.run)
        elif job.server == me:
            self._relays[job.number] = Relay(self, job)
        else:
            if job.holder == me:
                push = RelayLink(self, job, dialler=me)
                self._begin(push, push.push)
            if job.consumers >> me & 1:
                fetch = RelayLink(self, job, dialler=me)
                self._begin(fetch, fetch.fetch)

    def _reduce_anew(self, job: Job, contributors: list[int]) -> None:
        parts = [self.ledger.parts[number] for number in job.parts]
        memory = plain_memory(RangeReducer.accumulator_bytes(self.layout, parts), torch.uint8)
        served = ServedRange(self, job=job.number, numbers=job.parts, contributors=contributors, memory=memory)
        self._ranges[job.number] = served
        if self.weight is not None:
            served.start(self.weight)

    async def _serve_job(self, channel: Channel, member: int, hello: RoundHello) -> None:
        """A channel of a job, which may not have been heard of yet."""
        self.term_seen(member, hello.term)
        try:
            async with lenient_timeout(self.times.dial):
                while self._jobs_of < hello.term >= self.term and not self.machine.state.over:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        job = hello.job if hello.term == self._jobs_of == self.term else None
        served, relay = self._ranges.get(job), self._relays.get(-1 if job is None else job)
        if job is not None and hello.kind is ChannelKind.INPUTS and served is not None:
            await served.serve(channel, member)
        elif job is not None and hello.kind is not ChannelKind.INPUTS and relay is not None:
            await relay.serve(channel, member, hello.kind)
        else:
            channel.abort(f"term {hello.term} is not the present one, or has no such job", code=ANOTHER_TERM)

    # Inside

    def _begin(self, link: Link, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._outgoing[link] = None
        link.task = self.spawn(self._run_link(link, work), f"round-to-{self._peer(link.other).short}")

    async def _run_link(self, link: Link, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        failure: LinkFailedError | None = None
        try:
            await work()
        except LinkFailedError as error:
            failure = error
        finally:
            self._outgoing.pop(link, None)
            self._changed.set()
        if failure is not None:
            self.link_failed(link.id, link.other, failure)
        else:
            self._done_with[link.other] = self.now()

    def _held(self) -> None:
        """The result of a part is here."""
        self._news_for_relays()
        if self.ledger.complete:
            self._changed.set()

    def _news_for_relays(self) -> None:
        if self.machine.term.number == 0:
            return
        for relay in self._relays.values():
            for link in relay.links.values():
                link.pulse.news()
        for own in self._outgoing:
            if isinstance(own, RelayLink):
                own.pulse.news()

    def _serving_links(self) -> list[Link]:
        return [link for served in self._served() for link in served.links.values()]

    def _served(self) -> list[ServedRange | Relay]:
        return [*self._ranges.values(), *self._relays.values()]

    def _peer(self, position: int) -> PeerId:
        return self.group.members[position].peer_id

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled() and task.exception() is not None:
            self._broken = self._broken or task.exception()

    def _results_in(self) -> bool:
        return self.machine.may_commit or self.machine.state.over

    def _alone(self) -> bool:
        return len(self.group.members) > 1 and not self.machine.live - {self.position}

    def _reasons(self) -> dict[PeerId, str]:
        return {peer: str(exclusion) for peer, exclusion in self.excluded.items()}

    def _check_others(self) -> None:
        with_others = self.ledger.contributed_by() & ~(1 << self.position)
        nothing = self.layout.total > 0 and self.ledger.elements_held == 0
        alone = not with_others and (self._alone() or self.machine.state is RoundState.ORPHANED)
        if nothing or (alone and len(self.group.members) > 1):
            raise AllreduceError(
                f"round {self.group.group_id}: everyone who could average with this peer was lost", self._reasons()
            )

    def _refusal(self, peer: PeerId, hello: RoundHello) -> str | None:
        if self._left:
            return "the round is over"
        if peer not in self.group:
            return "you are not a member of this group"
        member = self.group.members[self.group.position(peer)]
        if hello.sender != member.nonce or hello.receiver != self.group.members[self.position].nonce:
            return "another incarnation of a member joined this group"
        if hello.plan_hash != self.plan.hash:
            return "another plan: the members disagree about shapes, codecs or shares"
        return None

    def _heard(self, member: int) -> bool:
        """On an open channel just now, or when all was done with it, within what is granted to silent members."""
        now = self.now()
        since = now - max(4 * self.times.beat, self.times.dial / 2)
        links = [*self._outgoing, *self._serving_links()]
        return (
            self._done_with.get(member, -math.inf) > now - self.times.longest
            or self._control.heard(member, since)
            or any(link.other == member and link.channel is not None and link.channel.last_received > since for link in links)
        )

    async def _watch(self) -> None:
        """Send heartbeats, and end the channels on which nothing comes any more."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.times.beat
            await asyncio.sleep(self.times.beat)
            lag = loop.time() - due
            if lag > 0:
                self._forgive(lag)
            if lag > LAG:
                continue  # this process was held up: what has arrived meanwhile is read first
            self._awake_at = loop.time()
            self.machine.beat()
            self._carry_out()
            for link in [*self._outgoing, *self._serving_links()]:
                link.pulse.tick()
                link.judge(loop.time())
            self._control.tick(loop.time())
            self._miss_channels(loop.time())

    def _forgive(self, lag: float) -> None:
        """Nobody else is blamed for the time in which this process stood still."""
        self._attached_at += lag
        for served in self._served():
            served.forgive(lag)
        for link in [*self._outgoing, *self._serving_links()]:
            if link.patience is not None:
                link.patience.forgive(lag)
        self._control.forgive(lag)

    def _miss_channels(self, now: float) -> None:
        """Members that should have opened a channel to this one by now."""
        detail = f"no channel from it within {self.times.arrival:g} s"
        for served in self._served():
            for member in served.missing_channels(now, self.times.arrival):
                failure = LinkFailedError(ExclusionCode.NEVER_ARRIVED, detail)
                self.link_failed(LinkId(member, self.position), member, failure)
        if now - self._attached_at > self.times.arrival and self.machine.coordinates and self.term.number == 0:
            for member in sorted(self.machine.unconnected()):
                self._feed(ControlMissing(member, detail))


FAREWELL = 0.5
"""Seconds for the last control messages of a member that leaves."""
