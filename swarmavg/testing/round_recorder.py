"""Runs steps of simulated averagers and writes down what the oracle needs: the bridge from the product to plain facts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import torch

from swarmavg.averager import Averager
from swarmavg.control import StepResult
from swarmavg.identifiers import PeerId
from swarmavg.testing.event_log import EventLog, Failed, FaultApplied, Finished, StepEnded, StepStarted, Values
from swarmavg.testing.network import SimulatedSwarm
from swarmavg.testing.processes import ProcessKilledError

GRACE = 0.05
"""Virtual seconds beyond its timeout that a step may take to end: messages on their way, and a watchdog's beat."""


class Recorder:
    """The event log of one run in the making; its arguments are those of `EventLog`."""

    def __init__(self, *, patience: float, grouping: float, codec_relative: float = 0.0, codec_absolute: float = 0.0) -> None:
        self.log = EventLog(patience=patience, grouping=grouping, codec_relative=codec_relative, codec_absolute=codec_absolute)
        self.names: dict[PeerId, str] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unread: list[tuple[StepStarted, float, StepResult, Values]] = []

    def start(
        self,
        swarm: SimulatedSwarm,
        averager: Averager,
        tensors: Sequence[torch.Tensor],
        *,
        name: str,
        step: int = 0,
        weight: float | None = None,
        timeout: float,
        deadline: float | None = None,
    ) -> asyncio.Task[None]:
        """Let a peer step, under a name of its own. `deadline`: virtual time by which it must end; `timeout` says it otherwise.

        The task ends when the step has, whatever came of it; it raises only what no step may raise.
        """
        now = asyncio.get_running_loop().time()
        self.names[averager.peer_id] = name
        started = StepStarted(
            peer=name,
            step=step,
            time=now,
            role=averager.mode,
            weight=0.0 if averager.mode == "auxiliary" else 1.0 if weight is None else weight,
            alpha=averager.config.averaging_alpha,
            values=_copied(tensors),
            deadline=now + timeout + GRACE if deadline is None else deadline,
        )
        self.log.starts.append(started)
        task = asyncio.create_task(
            self._step(swarm, averager, tensors, started, weight, timeout), name=f"recorded step of {name}"
        )
        self._running[name] = task
        return task

    async def _step(
        self,
        swarm: SimulatedSwarm,
        averager: Averager,
        tensors: Sequence[torch.Tensor],
        started: StepStarted,
        weight: float | None,
        timeout: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            result = await swarm.step(averager, gather=started.step, weight=weight, timeout=timeout)
        except ProcessKilledError:
            return
        except Exception as error:  # noqa: BLE001  (the log says what it was; the oracle judges)
            outcome = Failed(error=type(error).__name__, message=str(error).splitlines()[0])
            self._ended(started, loop.time(), outcome, _copied(tensors))
        else:
            self._unread.append((started, loop.time(), result, _copied(tensors)))

    def fault(self, kind: str, *peers: str, seconds: float = float("inf"), time: float | None = None) -> None:
        """Something was done to a peer, or to the links between two; just now, unless `time` says when."""
        time = asyncio.get_running_loop().time() if time is None else time
        self.log.faults.append(FaultApplied(kind=kind, peers=peers, time=time, seconds=seconds))

    async def all_ended(self) -> None:
        """Wait for the steps of everybody who lives, and for the death of the others."""
        while waiting := [task for task in self._running.values() if not task.done()]:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def finish(self) -> EventLog:
        """The log, once the run is over: a result may have learnt late that it diverged."""
        for started, time, result, values in self._unread:
            self._ended(started, time, self._finished(result), values)
        self._unread.clear()
        return self.log

    def _ended(self, started: StepStarted, time: float, outcome: Finished | Failed, values: Values) -> None:
        self.log.ends.append(StepEnded(peer=started.peer, step=started.step, time=time, outcome=outcome, values=values))

    def _finished(self, result: StepResult) -> Finished:
        return Finished(
            round_id=str(result.round_id),
            members={self._name(peer): number for peer, number in result.items()},
            spans=tuple((span.start, span.stop, self._names(peers)) for span, peers in result.contributors),
            missing=tuple((span.start, span.stop) for span in result.missing),
            fraction=result.fraction,
            excluded=self._names(result.excluded),
            diverged=getattr(result, "diverged", False),
        )

    def _names(self, peers: Iterable[PeerId]) -> frozenset[str]:
        return frozenset(self._name(peer) for peer in peers)

    def _name(self, peer: PeerId) -> str:
        return self.names.get(peer, f"a stranger, {peer.short}")


def _copied(tensors: Sequence[torch.Tensor]) -> Values:
    return tuple(tensor.detach().clone().numpy() for tensor in tensors)
