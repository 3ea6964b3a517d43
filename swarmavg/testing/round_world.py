"""Round machines over simulated channels: no tasks, no tensors, a clock of its own. For tests of the protocol alone.

Members may die, stand still, leave, and lose channels or each other at any event. What no honest member may do or see is an
`AssertionError`, with the stories of all machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import LinkId, Term
from swarmavg.protocol.round_events import Acknowledged, Drop, Jobs
from swarmavg.protocol.round_jobs import Job
from swarmavg.protocol.round_messages import ChannelKind
from swarmavg.protocol.round_states import RoundState
from swarmavg.testing.round_world_control import ControlWorld
from swarmavg.testing.round_world_data import Data, Result, Serving, members_of
from swarmavg.testing.round_world_members import PATIENCE, REQUEST_TIMEOUT, Actor, Why

BEAT = PATIENCE / 8
_GONE = (RoundState.FENCED, RoundState.DIVERGED, RoundState.LEFT)
_NO_BLAME = Why(ExclusionCode.REFUSED, "another term", blameless=True)
_RESET = Why(ExclusionCode.CONNECTION_LOST, "reset")
_GIVEN_UP = Why(ExclusionCode.CONNECTION_LOST, "the other side gave the channel up")


class RoundWorld(ControlWorld):
    """One round of the members in `roles`: a letter each, of node, client and auxiliary. `owners`: the reducer of each part."""

    def __init__(self, seed: int, roles: str, owners: Sequence[int], *, leader: int = 0) -> None:
        super().__init__(seed, roles, owners, leader=leader)
        self.data: list[Data] = []
        self.servings: list[dict[int | None, Serving]] = [{} for _ in roles]
        """By member: what it serves, by the number of the job; `None` = its own range."""
        self.working_in = [Term(0, 0)] * len(roles)
        """By member: the term of its jobs."""
        self.passed_on = 0
        self.recomputed = 0
        self._serials = itertools.count()

    # ---- the course of a round

    def start(self) -> None:
        """All members that live begin."""
        contributors = {actor.me for actor in self.actors if actor.receives}
        for actor in self.actors:
            parts = [part for part, owner in enumerate(self.owners) if owner == actor.me]
            if parts:
                self.servings[actor.me][None] = Serving(actor.me, None, parts, set(contributors), self.now)
        for actor in self.actors:
            self.soon(actor, lambda actor=actor: self._begin(actor))  # type: ignore[misc]

    def _begin(self, actor: Actor) -> None:
        for reducer in sorted(set(self.owners)) if actor.receives else ():
            if reducer != actor.me and reducer not in actor.machine.out:
                parts = [part for part, owner in enumerate(self.owners) if owner == reducer]
                self._dial(actor, reducer, ChannelKind.INPUTS, None, parts)
        for serving in list(self.servings[actor.me].values()):
            self._make(actor, serving)
        self.settle(actor)
        self._beat_later(actor)

    def _beat_later(self, actor: Actor) -> None:
        due = self.now + BEAT
        self.at(due, actor, lambda: self._beat(actor, due))

    def _beat(self, actor: Actor, due: float) -> None:
        """What a member does regularly: show that it lives, and see who has not come."""
        if actor.gone:
            return
        if self.now - due > BEAT:
            self.forgive(actor, self.now - due)
        else:
            self.judge(actor)
            self.miss(actor)
            for serving in list(self.servings[actor.me].values()):
                self._miss_channels(actor, serving)
        if not actor.machine.state.over:
            actor.machine.beat()
            self.settle(actor)
        for data in self._of(actor):
            other = self.actors[data.other(actor.me)]
            if data.serving is not None and other.running and not self.is_cut(actor.me, other.me):
                self.see_term(other, actor.me, actor.machine.term)
        self._beat_later(actor)

    def _miss_channels(self, actor: Actor, serving: Serving) -> None:
        if serving.over or self.now - serving.since <= PATIENCE:
            return
        late = sorted(serving.awaited)
        serving.awaited.clear()
        for member in late:
            self._exclude(actor, serving, member)
            self.accuse(actor, LinkId(member, actor.me), member, Why(ExclusionCode.NEVER_ARRIVED, "no channel from it"))

    # ---- data channels

    def _dial(self, actor: Actor, server: int, kind: ChannelKind, job: Job | None, parts: Sequence[int]) -> None:
        term = Term(0, 0) if job is None else actor.machine.term
        data = Data(actor.me, server, kind, job, term, parts, self.now)
        self.data.append(data)
        self.soon(actor, lambda: self._dialled_data(data, patient=True))

    def _dialled_data(self, data: Data, *, patient: bool) -> None:
        actor, server = self.actors[data.dialler], self.actors[data.server]
        if data.over:
            return
        if not server.alive:
            self._notice(data, actor, Why(ExclusionCode.UNREACHABLE, "connection refused"))
        elif self.is_cut(actor.me, server.me) or server.frozen:
            if patient:
                self.at(self.now + 2 * REQUEST_TIMEOUT, actor, lambda: self._dialled_data(data, patient=False))
            else:
                self._notice(data, actor, Why(ExclusionCode.UNREACHABLE, "no answer"))
        else:
            self._wake(data)
            self.at(self.now + REQUEST_TIMEOUT, server, lambda: self._lost_patience(data))

    def _lost_patience(self, data: Data) -> None:
        """Of a server that has not heard of the job in time."""
        if data.serving is None and not data.over:
            data.over = True
            self._tell(data, data.dialler, _NO_BLAME)

    def _wake(self, data: Data) -> None:
        if not (data.due or data.over):
            data.due = True
            self.soon(None, lambda: self._step(data))

    def moved(self, actor: Actor) -> None:
        """Something has changed at a member: channels may go on."""
        for data in self._of(actor):
            self._wake(data)

    def _of(self, actor: Actor) -> list[Data]:
        return [data for data in self.data if not data.over and actor.me in data.id]

    def _step(self, data: Data) -> None:
        data.due = False
        actor, server = self.actors[data.dialler], self.actors[data.server]
        if data.over or not (actor.running and server.running) or self.is_cut(data.dialler, data.server):
            return
        if data.serving is None and not self._admit(data, server):
            return
        moves = [move for move in (self._send_on, self._return) if self.rng.random() < 0.7]
        moved = [move(data, actor, server) for move in moves]
        if not moves or any(moved):
            self._wake(data)

    def _admit(self, data: Data, server: Actor) -> bool:
        """The server takes the channel, refuses it, or does not know it yet."""
        why = self.refusal(self.actors[data.dialler], server)
        if why is not None:
            data.over = True
            self._tell(data, data.dialler, why)
            return False
        if data.job is not None:
            self.see_term(server, data.dialler, data.term)
            if self.working_in[server.me] < data.term >= server.machine.term and not server.machine.state.over:
                return False
            if not data.term == self.working_in[server.me] == server.machine.term:
                data.over = True
                self._tell(data, data.dialler, _NO_BLAME)
                return False
        serving = self.servings[server.me].get(data.number)
        if serving is None or data.dialler not in serving.awaited:
            data.over = True
            self._tell(data, data.dialler, Why(ExclusionCode.REFUSED, "not expected"))
            return False
        serving.awaited.discard(data.dialler)
        data.serving = serving
        return True

    def _send_on(self, data: Data, actor: Actor, server: Actor) -> bool:
        """One part on its way to the server."""
        if data.over or data.kind is ChannelKind.FETCH or data.sent == len(data.parts):
            return False
        part, result = data.parts[data.sent], actor.holdings.find(data.parts[data.sent])
        if data.kind is ChannelKind.PUSH:
            if result is None:
                return False
            data.sent += 1
            if data.sent == len(data.parts):
                data.over = data.complete = True
            self._take(server, result)
            return True
        assert data.serving is not None
        if result is not None:
            raise AssertionError(f"m{actor.me} is to send its input of part {part}, whose result it holds\n{self.story()}")
        data.serving.delivered[data.sent].add(actor.me)
        data.sent += 1
        self._make(server, data.serving)
        return True

    def _return(self, data: Data, actor: Actor, server: Actor) -> bool:
        """One result on its way to whoever opened the channel."""
        serving = data.serving
        if data.over or data.kind is ChannelKind.PUSH or serving is None:
            return False
        if data.kind is ChannelKind.INPUTS:
            result = serving.results[data.returned] if data.returned < len(serving.results) else None
        else:
            result = server.holdings.find(data.parts[data.returned])
        if result is None:
            return False
        data.returned += 1
        if data.returned == len(data.parts):
            data.over = data.complete = True
            serving.pending.discard(actor.me)
            self.give(server, Acknowledged(data.number))
        self._take(actor, result)
        return True

    def _take(self, actor: Actor, result: Result) -> None:
        """A result has come to a member."""
        if not actor.receives:
            actor.holdings.kept[result.part] = result
        elif result.part not in actor.holdings.results:
            actor.holdings.results[result.part] = result
        self.settle(actor)

    def _make(self, actor: Actor, serving: Serving) -> None:
        """Finish the parts that can be."""
        made = [] if serving.over else serving.finished(self._serials)
        for result in made:
            if serving.own:
                self._take(actor, result)
        if made:
            self.moved(actor)

    def _exclude(self, actor: Actor, serving: Serving, member: int) -> None:
        serving.pending.discard(member)
        serving.awaited.discard(member)
        self._make(actor, serving)

    # ---- how channels end

    def _tell(self, data: Data, member: int, why: Why) -> None:
        self.soon(self.actors[member], lambda: self._notice(data, self.actors[member], why))

    def _notice(self, data: Data, actor: Actor, why: Why) -> None:
        """One end learns that the channel has ended, and complains."""
        if data.complete or actor.me in data.ended_at:
            return
        if why.code is ExclusionCode.CONNECTION_LOST and self.is_cut(*data.id):
            return  # it does not get here; the silence will be noticed
        self._end_here(data, actor)
        self.accuse(actor, data.id, data.other(actor.me), why)

    def _end_here(self, data: Data, actor: Actor) -> None:
        data.over = True
        data.ended_at.add(actor.me)
        if data.serving is not None and actor.me == data.server:
            self._exclude(actor, data.serving, data.dialler)

    def _give_up(self, data: Data, actor: Actor, why: Why) -> None:
        """One end ends the channel; the other one is told `why`."""
        if actor.me not in data.ended_at:
            self._end_here(data, actor)
            self._tell(data, data.other(actor.me), why)

    def kill(self, me: int, *, lossy: bool = False) -> None:
        super().kill(me, lossy=lossy)
        for data in self._of(self.actors[me]):
            data.over = True
            if data.serving is not None or data.server == me:
                self._tell(data, data.other(me), _RESET)

    def break_data(self, data: Data) -> None:
        """A data channel is lost, and both ends notice."""
        if not data.over:
            data.over = True
            for member in data.id if data.serving is not None else (data.dialler,):
                self._tell(data, member, _RESET)

    def judge(self, actor: Actor) -> None:
        super().judge(actor)
        for data in self._ends(actor):
            other = self.actors[data.other(actor.me)]
            if not data.over and other.running and not self.is_cut(*data.id):
                data.heard[actor.me] = self.now
            elif self.now - data.heard.setdefault(actor.me, self.now) > PATIENCE:
                self._tell(data, other.me, _GIVEN_UP)
                self._notice(data, actor, Why(ExclusionCode.SILENT, "no byte"))

    def forgive(self, actor: Actor, seconds: float) -> None:
        super().forgive(actor, seconds)
        for data in self._ends(actor):
            data.heard[actor.me] = data.heard.get(actor.me, self.now) + seconds

    def _ends(self, actor: Actor) -> list[Data]:
        """Channels whose end at this member has not ended."""
        return [
            data
            for data in self.data
            if actor.me in data.id
            and not data.complete
            and actor.me not in data.ended_at
            and (data.serving is not None or data.dialler == actor.me)
        ]

    def end(self, actor: Actor) -> None:
        super().end(actor)
        for data in self._of(actor):
            self._give_up(data, actor, Why(ExclusionCode.CANCELLED, "left the round"))

    # ---- what the machines want

    def drop(self, actor: Actor, effect: Drop) -> None:
        why = Why(ExclusionCode.FENCED, "the round goes on without you", actor.machine.fencing)
        for data in self._of(actor):
            if effect.member in data.id:
                self._give_up(data, actor, why)
        for serving in list(self.servings[actor.me].values()):
            self._exclude(actor, serving, effect.member)

    def sever(self, actor: Actor, link: LinkId) -> None:
        for data in self._of(actor):
            if data.id == link:
                self._give_up(data, actor, _GIVEN_UP)
        if link.reducer == actor.me:
            for serving in list(self.servings[actor.me].values()):
                self._exclude(actor, serving, link.contributor)

    def take_up(self, actor: Actor, effect: Jobs) -> None:
        me = actor.me
        for number in [number for number in self.servings[me] if number is not None]:
            self.servings[me].pop(number).over = True
        for data in self._of(actor):
            if data.job is not None and (data.dialler == me or data.serving is not None):
                self._give_up(data, actor, _NO_BLAME)
        if actor.machine.state.frozen:
            return
        self.working_in[me] = effect.term
        for job in effect.jobs:
            self._take_up_job(actor, job)

    def _take_up_job(self, actor: Actor, job: Job) -> None:
        me = actor.me
        if job.server == me:
            self._check_job(actor, job)
            inputs = members_of(job.contributors) if job.recomputes else set()
            serving = self.servings[me][job.number] = Serving(me, job, job.parts, inputs, self.now)
            self.soon(actor, lambda: self._make(actor, serving))
        elif job.recomputes:
            if job.contributors >> me & 1:
                self._dial(actor, job.server, ChannelKind.INPUTS, job, job.parts)
        else:
            if job.holder == me:
                self._dial(actor, job.server, ChannelKind.PUSH, job, job.parts)
            if job.consumers >> me & 1:
                self._dial(actor, job.server, ChannelKind.FETCH, job, job.parts)

    def _check_job(self, server: Actor, job: Job) -> None:
        """What any live member holds is not computed again."""
        if not job.recomputes:
            self.passed_on += 1
            return
        self.recomputed += 1
        for actor in self._fellows(server):
            held = [part for part in job.parts if part in actor.holdings.results]
            if held and actor.machine.term == server.machine.term:
                raise AssertionError(f"parts {held} are computed again, though m{actor.me} holds them\n{self.story()}")

    # ---- invariants

    def _fellows(self, actor: Actor) -> Iterator[Actor]:
        """Members that live and count each other and `actor` in."""
        for other in self.actors:
            here = other.alive and other.machine.state not in _GONE
            if here and other.me in actor.machine.live and actor.me in other.machine.live:
                yield other

    def check_agreement(self) -> None:
        """Members that have committed and are in one term hold the same results."""
        committed = [a for a in self.actors if a.alive and a.holdings.committed is not None]
        for actor in committed:
            if actor.machine.state in _GONE:
                continue
            for other in self._fellows(actor):
                if other.holdings.committed not in (None, actor.holdings.committed):
                    raise AssertionError(
                        f"m{actor.me} and m{other.me} have committed different results: "
                        f"{actor.holdings.committed} and {other.holdings.committed}\n{self.story()}"
                    )
