"""One peer's part in one round: a channel to each reducer, a channel from each contributor, and what became of it all.

An exchange moves numbers between the channels, the reducer and the snapshot. It does not know the live tensors, does not
look for groups, and decides nothing about retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch

from swarmavg.errors import AllreduceError
from swarmavg.identifiers import PeerId
from swarmavg.planning.partition import Layout, Part, Plan
from swarmavg.protocol.group import Group
from swarmavg.protocol.outcome import Exclusion, ExclusionCode, Ledger
from swarmavg.protocol.round_messages import RoundHello
from swarmavg.reduction.memory import plain_memory
from swarmavg.reduction.reducer import RangeReducer
from swarmavg.reduction.snapshot import Snapshot
from swarmavg.runtime.channels import ChannelHub
from swarmavg.runtime.contributor_link import ContributorLink
from swarmavg.runtime.reducer_link import ReducerLink
from swarmavg.runtime.round_link import LinkFailedError, RoundTimes
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.interface import Channel

LAG = 1.0
"""After the event loop was held up for this many seconds, arrived bytes are read before anybody is called silent."""

_log = get_logger("swarmavg.round")


class Exchange:
    """Usage: `attach` when the group stands, `start` with the weight once the snapshot is taken, `results` until every
    result this member can have is in, then `serve_out` (or `abort`).
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
    ) -> None:
        self.hub = hub
        self.purpose = purpose
        self.group = group
        self.plan = plan
        self.times = times
        self.position = group.position(hub.id)
        self.term = 0
        self.weight: float | None = None
        self.accumulator = accumulator
        self.reducer = RangeReducer(layout, plan, self.position, accumulator)
        self.ledger = Ledger(layout, plan, [member.peer_id for member in group.members])
        self.contributor_bits = sum(1 << position for position in plan.contributors)
        self.excluded: dict[PeerId, Exclusion] = {}
        self.bytes_sent = 0
        self.bytes_received = 0
        self._layout = layout
        self._snapshot = snapshot
        self.largest_payload = max((self._payload_bytes(part) for parts in plan.parts for part in parts), default=0)
        self._outgoing: dict[int, ContributorLink] = {}
        self._incoming: dict[int, ReducerLink] = {}
        self._awaited = self._awaited_contributors()
        self._served: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._attached_at = 0.0
        self._handed_out = 0
        self._broken: BaseException | None = None
        self._left = False

    # What the links use

    def encoded(self, part: Part) -> memoryview:
        """The own input of a part, as it travels."""
        return self._layout.runs[part.run].codec.encode(self._snapshot.values(part))

    def new_scratch(self) -> memoryview:
        """Memory for one received payload, aligned for every dtype."""
        return plain_memory(self.largest_payload, torch.uint8).numpy().data

    def accept_result(self, reducer: int, contributors: int, payload: memoryview) -> None:
        """Write the result of the lowest missing part of a range into the snapshot. Raises `RemoteProtocolError`."""
        part = self.plan.parts[reducer][self.ledger.next_index(reducer)]
        if contributors:
            self._layout.runs[part.run].codec.decode(payload, self._snapshot.values(part))
        self.ledger.record(reducer, contributors)
        if self.ledger.complete(reducer):
            self._changed.set()

    def results_may_have_come(self) -> None:
        """The reducer has been given something: hand out what is finished now."""
        own = self.position
        finished = len(self.reducer.results)
        if finished == self._handed_out:
            return
        self._handed_out = finished
        if self.contributes:
            while self.ledger.next_index(own) < finished:
                result = self.reducer.results[self.ledger.next_index(own)]
                self.accept_result(own, result.contributors, result.payload)
        for link in self._incoming.values():
            link.pulse.news()
        if self.reducer.finished:
            self._changed.set()

    # The course of a round

    @property
    def contributes(self) -> bool:
        return self.plan.contributes[self.position]

    @property
    def _reduces(self) -> bool:
        return bool(self.plan.parts[self.position])

    def attach(self) -> None:
        """Open the channels to all reducers; they and the contributors learn that this member is there and waits."""
        self._attached_at = asyncio.get_running_loop().time()
        if self.contributes:
            for reducer in self.plan.reducers:
                if reducer != self.position:
                    link = self._outgoing[reducer] = ContributorLink(self, reducer)
                    self._spawn(self._contribute(reducer, link), f"round-to-{self._peer(reducer).short}")
        self._spawn(self._watch(), "round-watchdog")

    def start(self, weight: float) -> None:
        """The snapshot is taken and the weight is final: send."""
        self.weight = weight
        for link in self._outgoing.values():
            link.pulse.news()
        if self.contributes and self._reduces:
            self._spawn(self._add_own(weight), "round-own-range")

    async def serve(self, channel: Channel, hello: RoundHello) -> None:
        """Handle a contributor's channel until its end. The channel is refused if it has no place in this round."""
        refusal = self._refusal(channel.peer, hello)
        if refusal is not None:
            channel.abort(refusal, code="not-in-this-round")
            return
        contributor = self.group.position(channel.peer)
        link = self._incoming[contributor] = ReducerLink(self, contributor)
        try:
            await link.run(channel)
        except LinkFailedError as failure:
            self._contributor_failed(contributor, failure)
        finally:
            self.reducer.exclude(contributor)  # nothing more will come from it
            self.results_may_have_come()
            self._awaited.discard(contributor)
            self._served.add(contributor)
            self._changed.set()

    def member_left(self, peer: PeerId, reason: str) -> None:
        """A member has said that it takes no part: nobody waits for it any longer."""
        if peer not in self.group or peer == self.hub.id:
            return
        position = self.group.position(peer)
        for link in (self._outgoing.get(position), self._incoming.get(position)):
            if link is not None:
                link.give_up(ExclusionCode.CANCELLED, reason)
        self._expect_no_longer(position, LinkFailedError(ExclusionCode.CANCELLED, reason))

    async def results(self) -> None:
        """Wait until nothing more can come in: every range is complete or its reducer is lost.

        Raises `AllreduceError` if nothing came in, or if all others were lost before they had any part in it.
        """
        while self._broken is None and not self._results_in():
            self._changed.clear()
            await self._changed.wait()
        if self._broken is not None:
            raise AllreduceError(f"round {self.group.group_id} failed on this side: {self._broken!r}") from self._broken
        if self.contributes:
            self._check_others()

    def waiting_for(self) -> list[PeerId]:
        """Members from which something is still due."""
        positions = {*self._outgoing, *self.reducer.waiting_for()} - {self.position}
        return [self._peer(position) for position in sorted(positions)]

    def _check_others(self) -> None:
        others = [member.peer_id for member in self.group.members if member.peer_id != self.hub.id]
        with_others = self.ledger.contributed_by() & ~(1 << self.position)
        nothing = self._layout.total > 0 and self.ledger.elements_held == 0
        alone = bool(others) and not with_others and all(peer in self.excluded for peer in others)
        if nothing or alone:
            reasons = {peer: str(exclusion) for peer, exclusion in self.excluded.items()}
            raise AllreduceError(f"round {self.group.group_id}: everyone who could average with this peer was lost", reasons)

    async def serve_out(self) -> None:
        """Go on until every live contributor has been given its results, then end all tasks."""
        try:
            while not self._served_all():
                self._changed.clear()
                await self._changed.wait()
        finally:
            await self.abort("left the round")

    async def abort(self, reason: str) -> None:
        """Leave the round now: tell everybody and end all tasks. Does nothing where all has ended."""
        self._left = True
        for link in (*self._outgoing.values(), *self._incoming.values()):
            if link.channel is not None:
                link.channel.abort(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Inside

    def _peer(self, position: int) -> PeerId:
        return self.group.members[position].peer_id

    def _payload_bytes(self, part: Part) -> int:
        run = self._layout.runs[part.run]
        return run.codec.encoded_bytes(len(part), run.dtype)

    def _awaited_contributors(self) -> set[int]:
        """Contributors that have yet to open their channel to this reducer."""
        if not self._reduces:
            return set()
        return {position for position in self.plan.contributors if position != self.position}

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._broken = self._broken or task.exception()
            self._changed.set()

    async def _contribute(self, reducer: int, link: ContributorLink) -> None:
        try:
            await link.run()
        except LinkFailedError as failure:
            if not self.ledger.complete(reducer):
                self._exclude(reducer, failure)
            if failure.code is ExclusionCode.CANCELLED:  # who takes no part sends nothing either
                self._expect_no_longer(reducer, failure)
        finally:
            self._outgoing.pop(reducer, None)
            self._changed.set()

    async def _add_own(self, weight: float) -> None:
        self.reducer.begin(self.position, weight)
        for part in self.reducer.parts if weight > 0 else ():
            self.reducer.add(self.position, part.index, self.encoded(part))
            self.results_may_have_come()
            await asyncio.sleep(0)
        self.results_may_have_come()

    def _results_in(self) -> bool:
        if not self.contributes:
            return self._served_all()
        own = not self._reduces or self.ledger.complete(self.position)
        return own and not self._outgoing

    def _served_all(self) -> bool:
        return not self._awaited and self._served.issuperset(self._incoming)

    def _refusal(self, peer: PeerId, hello: RoundHello) -> str | None:
        if self._left:
            return "the round is over"
        if peer not in self.group:
            return "you are not a member of this group"
        contributor = self.group.position(peer)
        if hello.sender != self.group.members[contributor].nonce or hello.receiver != self.group.members[self.position].nonce:
            return "another incarnation of a member joined this group"
        if hello.plan_hash != self.plan.hash:
            return "another plan: the members disagree about shapes, codecs or shares"
        if contributor in self._incoming or contributor not in self._awaited:
            return "this contributor has a channel already, is excluded, or has nothing to send here"
        return None

    def _expect_no_longer(self, contributor: int, failure: LinkFailedError) -> None:
        """Do not wait for the channel of a contributor that has not opened it yet."""
        if contributor in self._awaited and contributor not in self._incoming:
            self._awaited.discard(contributor)
            self._contributor_failed(contributor, failure)
        self._changed.set()

    def _contributor_failed(self, contributor: int, failure: LinkFailedError) -> None:
        if not self.reducer.delivered(contributor):
            self._exclude(contributor, failure)
        self.reducer.exclude(contributor)
        self.results_may_have_come()

    def _exclude(self, position: int, failure: LinkFailedError) -> None:
        peer = self._peer(position)
        if peer in self.excluded or self._left:
            return
        self.excluded[peer] = Exclusion(peer_id=peer, code=failure.code, detail=failure.detail)
        _log.warning(
            "peer excluded from the round",
            peer=peer.short,
            group=self.group.group_id,
            reason=failure.code.value,
            detail=failure.detail,
        )

    async def _watch(self) -> None:
        """Send heartbeats, and end the channels on which nothing comes any more."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.times.beat
            await asyncio.sleep(self.times.beat)
            if loop.time() - due > LAG:
                await asyncio.sleep(0)  # this process was held up: what has arrived meanwhile is read first
                continue
            for link in (*self._outgoing.values(), *self._incoming.values()):
                link.pulse.tick()
            self._drop_silent(loop.time())

    def _drop_silent(self, now: float) -> None:
        for link, patience in (
            *((link, self.times.reducer) for link in self._outgoing.values()),
            *((link, self.times.sender) for position, link in self._incoming.items() if position not in self._served),
        ):
            if link.channel is not None and now - link.channel.last_received > patience:
                link.give_up(ExclusionCode.SILENT, f"no byte for {now - link.channel.last_received:.1f} s")
        if now - self._attached_at > self.times.sender:
            for contributor in self._awaited - self._incoming.keys():
                detail = f"no channel from it within {self.times.sender:g} s"
                self._expect_no_longer(contributor, LinkFailedError(ExclusionCode.NEVER_ARRIVED, detail))
