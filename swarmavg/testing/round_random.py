"""Swarms of 3 to 12 peers that average again and again among mixed faults; all of a run follows from its seed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from swarmavg.averager import Averager
from swarmavg.compression import Float16Compression
from swarmavg.testing import oracle
from swarmavg.testing.event_log import CLOCK, EventLog, Finished
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.judged_run import judged_run
from swarmavg.testing.network import RoleName, SimulatedSwarm
from swarmavg.testing.processes import ProcessKilledError
from swarmavg.testing.round_recorder import Recorder

WINDOW: Final = 2.0
REQUEST_TIMEOUT: Final = 0.5
SENDER_TIMEOUT: Final = 1.0
STEP_TIMEOUT: Final = 24.0
"""Longer than any fault of a plan lasts, so that nobody leaves a round by its own deadline because of one."""
FAULT_SECONDS: Final = 2.0
GROUPING: Final = 3 * (WINDOW + 4 * REQUEST_TIMEOUT + 2 * SENDER_TIMEOUT)
"""Each may lose two groups to faults that are found out by silence before the third must stand."""
ROLES: Final[tuple[RoleName, ...]] = ("node", "client", "auxiliary")
ROLE_WEIGHTS: Final = (6, 2, 1)
AFTERMATH: Final = 4 * SENDER_TIMEOUT
INTRODUCED: Final = 1.0
"""By then the first peer, whose address is all that the others know, has told them of each other."""
FIRST_VALUES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RandomReport:
    """How a seed went."""

    seed: int
    plan: FaultPlan
    log: EventLog
    violations: list[str]
    finished: int
    failed: int


class _Swarm:
    """The swarm of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)  # noqa: S311  (repeatable, not secret)
        self.seed = seed
        self.peers = rng.randint(3, 12)
        self.steps = rng.choice([1, 2, 3])
        self.half = rng.random() < 0.25
        self.plan = FaultPlan.random(seed, peers=self.peers, faults=rng.randint(1, 4), seconds=FAULT_SECONDS)
        codec = {"codec_relative": 2.0**-11, "codec_absolute": 2.0**-25} if self.half else {}
        self.recorder = Recorder(patience=REQUEST_TIMEOUT / 2, grouping=GROUPING, **codec)

    async def run(self) -> None:
        rng = self.rng
        options: dict[str, Any] = {
            "target_group_size": rng.choice([None, None, self.peers, max(2, self.peers // 2)]),
            "part_size_bytes": rng.choice([64, 256]),
            "averaging_alpha": rng.choice([1.0, 1.0, 1.0, 0.5]),
            "min_matchmaking_time": WINDOW,
            "request_timeout": REQUEST_TIMEOUT,
            "sender_timeout": SENDER_TIMEOUT,
            "compression": Float16Compression() if self.half else None,
        }
        shapes = [(rng.choice([1, 37, 301]),), (), (3, 5)]
        directory: Literal["shared", "gossip"] = rng.choice(("shared", "shared", "gossip"))
        swarm = SimulatedSwarm(seed=self.seed, latency=rng.choice([0.001, 0.01, 0.02]), faults=self.plan, directory=directory)
        async with swarm:
            users = []
            for number in range(self.peers):
                role = rng.choices(ROLES, ROLE_WEIGHTS)[0] if number else "node"
                tensors = [torch.zeros(shape) for shape in shapes]
                try:
                    averager = await swarm.averager(tensors, role=role, **options)
                except ProcessKilledError:
                    continue
                users.append(self._live(swarm, averager, tensors, str(number), random.Random(rng.random())))  # noqa: S311
            await asyncio.gather(*users)
            await self._until_all_is_over()
        self._log_faults()
        faults = self.recorder.log.faults
        if directory == "gossip" and any("0" in fault.peers and fault.time < INTRODUCED for fault in faults):
            self.recorder.log.grouping = float("inf")  # the others may never have heard of each other

    async def _until_all_is_over(self) -> None:
        """Whoever is frozen or cut off wakes up, and learns what became of its round."""
        ends = [event.time + (self.plan.faults[event.fault].lasts or 0.0) for event in self.plan.events]
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max([0.0, *(end + AFTERMATH - now for end in ends)]))

    async def _live(
        self, swarm: SimulatedSwarm, averager: Averager, tensors: list[torch.Tensor], name: str, rng: random.Random
    ) -> None:
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(rng.randrange(FIRST_VALUES))
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            weight = None if averager.mode == "auxiliary" else rng.choice([1.0, 1.0, 0.0, 2.5, 1e-3, 1e18])
            await self.recorder.start(swarm, averager, tensors, name=name, step=step, weight=weight, timeout=STEP_TIMEOUT)
            if not swarm.process(averager).alive:
                return
            await asyncio.sleep(rng.choice([0.0, rng.random()]))

    def _log_faults(self) -> None:
        kinds = {"step_clock": CLOCK, "skew_clock": CLOCK}
        for event in self.plan.events:
            if not event.action.startswith("end of"):
                fault = self.plan.faults[event.fault]
                seconds = float("inf") if fault.lasts is None else fault.lasts
                peers = [str(peer) for peer in event.peers]
                self.recorder.fault(kinds.get(event.action, event.action), *peers, seconds=seconds, time=event.time)


def play_seed(seed: int) -> RandomReport:
    """Run one seed and judge it."""
    swarms: list[_Swarm] = []

    async def main() -> None:
        swarms.append(_Swarm(seed))
        await swarms[0].run()

    complaints = judged_run(main)
    log = swarms[0].recorder.finish()
    finished = sum(isinstance(end.outcome, Finished) for end in log.ends)
    return RandomReport(
        seed=seed,
        plan=swarms[0].plan,
        log=log,
        violations=complaints + oracle.violations(log),
        finished=finished,
        failed=len(log.ends) - finished,
    )
