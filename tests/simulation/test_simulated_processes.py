"""Simulated processes: frozen, killed, and with clocks of their own, as an operating system would do it."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

import pytest

from swarmavg.testing.clock import VirtualDeadlockError, run_virtual
from swarmavg.testing.processes import ProcessKilledError, SimulatedProcess, current_process, wall_clocks


def now():
    return asyncio.get_running_loop().time()


async def ticking(log, period=1.0):
    while True:
        await asyncio.sleep(period)
        log.append(round(now(), 6))


def test_tasks_and_callbacks_belong_to_the_process_in_which_they_were_started() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        seen = []

        async def work():
            seen.append(current_process())
            asyncio.get_running_loop().call_soon(lambda: seen.append(current_process()))
            asyncio.get_running_loop().call_later(1, lambda: seen.append(current_process()))
            await asyncio.create_task(asyncio.sleep(2))
            seen.append(current_process())
            return "done"

        assert await process.finish(work()) == "done"
        assert seen == [process] * 4
        assert current_process() is None

    run_virtual(main)


def test_a_frozen_process_stands_still_and_goes_on_at_the_thaw() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        log: list[float] = []
        mine: list[float] = []
        task, other = process.start(ticking(log)), asyncio.create_task(ticking(mine))
        await asyncio.sleep(2.5)
        process.freeze()
        await asyncio.sleep(20)
        assert log == [1.0, 2.0]
        assert len(mine) == 22
        process.thaw()
        await asyncio.sleep(2)
        assert log == [1.0, 2.0, 22.5, 23.5], "its clock went on: the overdue timer runs at once, and the next a second later"
        task.cancel()
        other.cancel()

    run_virtual(main)


def test_the_thaw_runs_what_was_ready_then_what_arrived_then_what_is_due() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        log: list[str] = []
        loop = asyncio.get_running_loop()
        with process.inside():
            loop.call_later(2, log.append, "due at 2")
            loop.call_later(1, log.append, "due at 1")
            loop.call_soon(log.append, "ready")
        process.freeze()
        await asyncio.sleep(5)
        process.run(log.append, "arrived")
        process.run(log.append, "arrived later")
        assert log == []
        process.thaw()
        await asyncio.sleep(0)
        assert log == ["ready", "arrived", "arrived later", "due at 1", "due at 2"]

    run_virtual(main)


def test_what_was_cancelled_while_frozen_does_not_run_and_freezing_twice_changes_nothing() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        log: list[str] = []
        loop = asyncio.get_running_loop()
        with process.inside():
            timer = loop.call_later(1, log.append, "timer")
            soon = loop.call_soon(log.append, "soon")
            loop.call_soon(log.append, "kept")
        process.freeze()
        process.freeze()
        await asyncio.sleep(2)
        timer.cancel()
        soon.cancel()
        process.thaw()
        process.freeze()  # before anything could run
        await asyncio.sleep(2)
        assert log == []
        process.thaw()
        await asyncio.sleep(0)
        assert log == ["kept"]

    run_virtual(main)


def test_a_killed_process_never_runs_again_and_whoever_waits_for_it_is_told() -> None:
    log: list[str] = []

    async def stubborn():
        try:
            await asyncio.sleep(3)
            log.append("slept")
        finally:
            await asyncio.sleep(1)
            log.append("cleaned up")

    async def main() -> None:
        process = SimulatedProcess("p")
        asyncio.get_running_loop().call_later(2, process.kill)
        with pytest.raises(ProcessKilledError, match="p, killed"):
            await process.finish(stubborn())
        assert now() == 2
        await asyncio.sleep(10)
        with pytest.raises(ProcessKilledError):
            await process.finish(stubborn())
        process.thaw()
        assert not process.alive

    run_virtual(main)
    gc.collect()
    assert log == []


def test_what_a_killed_process_leaves_is_cleared_away_without_a_word(caplog) -> None:
    async def deep(level):
        try:
            await (deep(level - 1) if level else asyncio.sleep(100))
        finally:
            logging.getLogger("test").error("this is not said")
            await asyncio.sleep(1)
            try:
                await asyncio.sleep(1)
            finally:
                await asyncio.shield(asyncio.sleep(1))

    async def numbers():
        try:
            while True:
                await asyncio.sleep(0.1)
                yield 1
        finally:
            await asyncio.sleep(1)

    async def counting():
        async for number in numbers():
            assert number == 1

    async def holding(*, begun, later):
        if begun:
            await asyncio.sleep(100)
        await later

    async def failing():
        raise RuntimeError("nobody will see this")

    async def in_a_group():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(5))
            await asyncio.shield(asyncio.sleep(5))

    async def main() -> None:
        process = SimulatedProcess("p")
        loop = asyncio.get_running_loop()
        broken = loop.create_future()

        async def waiting():
            await broken

        tasks = [process.start(work) for work in (in_a_group(), waiting(), asyncio.sleep(0.5), deep(4), counting())]
        tasks.append(process.start(holding(begun=True, later=asyncio.sleep(1))))
        await asyncio.sleep(1)
        tasks.append(process.start(failing()))
        await asyncio.sleep(0)
        tasks.append(process.start(asyncio.sleep(1)))  # never begins
        tasks.append(process.start(holding(begun=False, later=holding(begun=False, later=asyncio.sleep(1)))))
        broken.set_exception(RuntimeError("nor this"))
        process.kill()
        tasks.append(process.start(asyncio.sleep(1)))
        await asyncio.sleep(1)

    run_virtual(main)
    gc.collect()
    assert caplog.records == []


def test_killed_or_frozen_in_its_own_step_it_runs_on_to_the_next_await() -> None:
    async def main() -> None:
        log = []

        async def suicidal(process, how):
            how(process)
            log.append("still here")
            await asyncio.sleep(0)
            log.append(f"woke at {now():g}")

        frozen, killed = SimulatedProcess("f"), SimulatedProcess("k")
        asyncio.get_running_loop().call_later(5, frozen.thaw)
        await frozen.finish(suicidal(frozen, SimulatedProcess.freeze))
        with pytest.raises(ProcessKilledError):
            await killed.finish(suicidal(killed, SimulatedProcess.kill))
        assert log == ["still here", "woke at 5", "still here"]

    run_virtual(main)


def test_an_error_or_a_frozen_process_at_the_end_does_not_hang() -> None:
    async def main(error: Exception | None) -> None:
        process = SimulatedProcess("p")
        process.start(ticking([]))
        dead = SimulatedProcess("d")
        dead.start(ticking([]))
        await asyncio.sleep(0)
        process.freeze()
        dead.kill()
        if error is not None:
            raise error

    with pytest.raises(KeyError):
        run_virtual(lambda: main(KeyError("x")))
    with pytest.raises(AssertionError, match="1 tasks leaked"):
        run_virtual(lambda: main(None))


def test_a_cancelled_wait_cancels_the_work() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        log = []

        async def work():
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                log.append(now())
                raise

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await process.finish(work())
        assert log == [3.0]

    run_virtual(main)


def test_a_skewed_clock_shows_another_time_and_waits_as_long() -> None:
    async def main() -> None:
        process = SimulatedProcess("p", clock_offset=3600.0)

        async def work():
            loop = asyncio.get_running_loop()
            assert loop.time() == 3601.0
            start = loop.time()
            await asyncio.sleep(2)
            timer = loop.call_later(5, print)
            assert timer.when() == 3608.0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout_at(start + 4):
                    await asyncio.sleep(100)
            timer.cancel()
            assert timer.cancelled()
            return loop.time() - start

        await asyncio.sleep(1)
        assert await process.finish(work()) == 4.0
        assert now() == 5.0
        await asyncio.sleep(10)

    run_virtual(main)


def test_wall_clocks_are_a_matter_of_each_process() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        real = time.time()
        with wall_clocks():
            process.wall_offset = -7200.0
            with process.inside():
                early, early_ns = time.time(), time.time_ns()
            with SimulatedProcess("q").inside():
                assert time.time() - early == 7200
                assert time.time_ns() - early_ns == 7200e9
                await asyncio.sleep(2.5)
                assert time.time() - early == 7202.5
            assert time.time() - real < 60, "outside of processes it is the real one"

    before = time.time
    run_virtual(main)
    assert time.time is before


def test_faults_need_virtual_time() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        assert await process.finish(asyncio.sleep(0, "works")) == "works"
        for fault in (process.kill, process.freeze):
            with pytest.raises(RuntimeError, match="virtual time"):
                fault()
        with pytest.raises(RuntimeError, match="virtual time"):
            SimulatedProcess("p", clock_offset=1.0)

    asyncio.run(main())


def test_a_deadlock_of_a_frozen_process_is_an_error() -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        process.freeze()
        await process.finish(asyncio.sleep(1))

    with pytest.raises(VirtualDeadlockError):
        run_virtual(main)


def test_tasks_in_sets_come_in_an_order_that_repeats() -> None:
    async def main() -> list[str]:
        order = []

        async def work(name):
            try:
                await asyncio.sleep(1000)
            finally:
                order.append(name)

        ballast = [object() for _ in range(len(runs) * 7)]
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                for number in range(40):
                    tasks.create_task(work(number))
                    ballast.append(bytearray(number * 100))
                await asyncio.sleep(1)
                raise KeyError
        return order

    runs: list[list[str]] = []
    while len(runs) < 5:
        runs += [run_virtual(main)]
    assert all(run == runs[0] for run in runs)


def test_nothing_is_logged_when_all_is_well(caplog) -> None:
    async def main() -> None:
        process = SimulatedProcess("p")
        task = process.start(ticking([]))
        await asyncio.sleep(3)
        task.cancel()

    with caplog.at_level(logging.DEBUG):
        run_virtual(main, debug=True)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
