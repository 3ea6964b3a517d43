"""The async shell: threads, queueing, cancellation and closing, over an averager made up by the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from swarmavg.control import StepResult
from swarmavg.errors import ClosedError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.peer import Peer
from swarmavg.planning.partition import Span
from swarmavg.testing.clock import run_virtual
from swarmavg.training import state_averager
from swarmavg.training.state_averager import TrainingStateAverager

ME = PeerId(bytes(32))


class FakeAverager:
    """Rounds that double every tensor; they end at once, or when `gate` opens."""

    def __init__(self, tensors: Sequence[torch.Tensor], **arguments: Any) -> None:
        self.tensors = tensors
        self.arguments = arguments
        self.prefix = arguments["prefix"]
        self.config = SimpleNamespace(shutdown_timeout=5.0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.closed = False
        self.peer = SimpleNamespace(check_running=lambda: None)

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        self.closed = True

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def step(self, gather: Any = None, **_: Any) -> StepResult:
        if self.closed:
            raise ClosedError("closed")
        self.running += 1
        assert self.running == 1, "rounds must not overlap"
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        for tensor in self.tensors:
            tensor.mul_(2)
        return StepResult(
            gathered={ME: gather},
            round_id=GroupId.random(),
            contributors=[(Span(0, 2), (ME,))],
            missing=[],
            fraction=1.0,
            excluded={},
            bytes_sent=0,
            bytes_received=0,
            matchmaking_seconds=0.0,
            allreduce_seconds=0.0,
        )


@pytest.fixture(autouse=True)
def _fake_averager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_averager, "Averager", FakeAverager)


def set_up(**arguments: Any) -> tuple[nn.Parameter, TrainingStateAverager, FakeAverager]:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full_like(parameter, -1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    averager = TrainingStateAverager(peer=cast(Peer, object()), prefix="run", optimizer=optimizer, **arguments)
    return parameter, averager, cast(FakeAverager, averager.averager)


def test_the_averager_gets_buffers_descriptions_and_its_own_options() -> None:
    async def main() -> None:
        _, averager, fake = set_up(parameter_names=["w"], target_group_size=4)
        assert [tensor.tolist() for tensor in fake.tensors] == [[1.0, 1.0]]
        assert [info.key for info in fake.arguments["tensor_infos"]] == ["w"]
        assert fake.arguments["target_group_size"] == 4
        assert averager.parameter_names == ("w",)
        with pytest.raises(TypeError, match="tensor_infos"):
            set_up(tensor_infos=[])

    run_virtual(main)


def test_one_call_trains_and_averages() -> None:
    async def main() -> None:
        parameter, averager, _ = set_up()
        async with averager:
            result = await averager.step(optimizer_step=True, zero_grad=True, averaging_round=True, increment_epoch=True)
        assert result is not None
        assert result.epochs == {ME: 1}
        assert parameter.tolist() == [4.0, 4.0]
        assert parameter.grad is None
        assert averager.local_epoch == 1

    run_virtual(main)


def test_the_model_is_touched_off_the_event_loop() -> None:
    async def main() -> None:
        threads: list[str] = []
        _, averager, _ = set_up()
        averager.optimizer.register_step_pre_hook(lambda *_: threads.append(threading.current_thread().name))
        async with averager:
            await averager.step(optimizer_step=True)
        assert threads != [threading.current_thread().name]
        assert len(threads) == 1

    asyncio.run(main())


def test_calls_at_once_queue_up() -> None:
    async def main() -> None:
        parameter, averager, _ = set_up()
        async with averager:
            await asyncio.gather(*(averager.step(averaging_round=True) for _ in range(3)))
        assert parameter.tolist() == [8.0, 8.0]

    run_virtual(main)


def test_a_delayed_round_runs_beside_training() -> None:
    async def main() -> None:
        parameter, averager, fake = set_up(delta_rule_averaging=True)
        async with averager:
            fake.gate.clear()
            assert await averager.step(averaging_round=True, delay_averaging=True) is None
            await averager.step(optimizer_step=True, wait_for_delayed_update=False)
            assert parameter.tolist() == [2.0, 2.0]
            waiting = asyncio.create_task(averager.step(wait_for_delayed_update=True))
            await asyncio.sleep(1)
            assert not waiting.done()
            fake.gate.set()
            assert await waiting is not None
            assert parameter.tolist() == [3.0, 3.0]

    run_virtual(main)


def test_a_cancelled_wait_leaves_the_delayed_round_pending() -> None:
    async def main() -> None:
        parameter, averager, fake = set_up()
        async with averager:
            fake.gate.clear()
            await averager.step(averaging_round=True, delay_averaging=True)
            waiting = asyncio.create_task(averager.step(optimizer_step=True))
            await asyncio.sleep(1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert parameter.tolist() == [1.0, 1.0]
            fake.gate.set()
            assert await averager.step(wait_for_delayed_update=True) is not None
            assert parameter.tolist() == [2.0, 2.0]

    run_virtual(main)


def test_a_cancelled_round_keeps_the_local_step() -> None:
    async def main() -> None:
        parameter, averager, fake = set_up()
        async with averager:
            fake.gate.clear()
            step = asyncio.create_task(averager.step(optimizer_step=True, zero_grad=True, averaging_round=True))
            await asyncio.sleep(1)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            assert parameter.tolist() == [2.0, 2.0]
            assert fake.running == 0
            fake.gate.set()
            assert await averager.step(averaging_round=True) is not None
            assert parameter.tolist() == [4.0, 4.0]

    run_virtual(main)


def test_cancellation_never_interrupts_an_optimizer_step() -> None:
    async def main() -> None:
        parameter, averager, _ = set_up()
        inside, go_on = threading.Event(), threading.Event()

        def hold(*_: Any) -> None:
            inside.set()
            assert go_on.wait(30)

        averager.optimizer.register_step_pre_hook(hold)
        async with averager:
            step = asyncio.create_task(averager.step(optimizer_step=True, zero_grad=True, averaging_round=True))
            await asyncio.to_thread(inside.wait)
            step.cancel()
            await asyncio.sleep(0)
            assert not step.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await step
            assert parameter.tolist() == [2.0, 2.0]
            assert parameter.grad is None

    asyncio.run(main())


def test_closing_ends_a_delayed_round_and_further_steps() -> None:
    async def main() -> None:
        parameter, averager, fake = set_up()
        await averager.start()
        fake.gate.clear()
        await averager.step(averaging_round=True, delay_averaging=True)
        await averager.aclose()
        await averager.aclose()
        assert fake.running == 0
        assert parameter.tolist() == [1.0, 1.0]
        with pytest.raises(ClosedError):
            await averager.step(optimizer_step=True)
        assert parameter.tolist() == [1.0, 1.0]

    run_virtual(main)


def test_nothing_is_trained_before_the_start_nor_when_the_peer_is_gone() -> None:
    async def main() -> None:
        parameter, averager, fake = set_up()
        with pytest.raises(ClosedError, match="has not been started"):
            await averager.step(optimizer_step=True, averaging_round=True)

        def gone() -> None:
            raise ClosedError("this peer is closed")

        async with averager:
            fake.peer.check_running = gone
            with pytest.raises(ClosedError, match="this peer"):
                await averager.step(optimizer_step=True, averaging_round=True)
        assert parameter.tolist() == [1.0, 1.0]

    run_virtual(main)


def test_a_failed_optimizer_step_raises_in_the_call() -> None:
    async def main() -> None:
        _, averager, _ = set_up()

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        averager.optimizer.register_step_pre_hook(fail)
        async with averager:
            with pytest.raises(RuntimeError, match="out of memory"):
                await averager.step(optimizer_step=True, increment_epoch=True, averaging_round=True)
            assert averager.local_epoch == 0

    asyncio.run(main())
