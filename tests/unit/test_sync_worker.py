"""The worker thread behind the blocking API: who may call, what an interrupt does, and how long it lives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from swarmavg.errors import BlockingCallError, ClosedError, ListenError
from swarmavg.sync import tenancy, worker
from swarmavg.sync.call import unwrap
from swarmavg.sync.resident import Resident

T = TypeVar("T")


class Core:
    """An object of the async API, as far as the facade is concerned."""

    def __init__(self, fail_once: BaseException | None = None) -> None:
        self.fail_once = fail_once
        self.events: list[str] = []

    async def start(self) -> None:
        if self.fail_once is not None:
            error, self.fail_once = self.fail_once, None
            raise error
        self.events.append("start")

    async def aclose(self) -> None:
        self.events.append("aclose")


class Thing(Resident[Core]):
    def __init__(self, fail_once: BaseException | None = None) -> None:
        super().__init__(Core(fail_once))

    @property
    def events(self) -> list[str]:
        return self._core.events

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        return self._home().run(function, *args)

    def future(self, function: Callable[..., Awaitable[T]], *args: Any) -> concurrent.futures.Future[T]:
        return self._home().submit_future(function, *args)


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swarmavg-sync"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert worker_threads() == []
    yield
    assert worker_threads() == []


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def forever() -> None:
    await asyncio.Event().wait()


# Life


def test_one_thread_serves_all_and_ends_with_the_last_close() -> None:
    first, second = Thing().start(), Thing().start()
    assert len(worker_threads()) == 1
    assert worker_threads()[0].daemon
    first.close()
    assert second.run(asyncio.sleep, 0, "alive") == "alive"
    second.close()
    assert worker_threads() == []
    with Thing() as third:
        assert third.run(asyncio.sleep, 0, "alive again") == "alive again"


def test_start_and_close_reach_the_core_once() -> None:
    thing = Thing()
    assert thing.start() is thing
    assert thing.start() is thing
    thing.close()
    thing.close()
    assert thing.events == ["start", "aclose"]


def test_use_before_start_and_after_close_says_what_to_do() -> None:
    thing = Thing()
    with pytest.raises(ClosedError, match=r"Thing has not been started: use `with Thing\(...\)`"):
        thing.run(asyncio.sleep, 0)
    with thing:
        pass
    with pytest.raises(ClosedError, match="Thing is closed"):
        thing.run(asyncio.sleep, 0)
    with pytest.raises(ClosedError, match="Thing is closed"):
        thing.start()


def test_close_without_start_needs_no_thread() -> None:
    thing = Thing()
    thing.close()
    assert thing.events == []


def test_a_failed_start_gives_the_thread_back_and_may_be_repeated() -> None:
    thing = Thing(fail_once=ListenError("port taken"))
    with pytest.raises(ListenError, match="port taken"):
        thing.start()
    assert worker_threads() == []
    with thing:
        assert thing.events == ["start"]


def test_close_gives_the_thread_back_when_the_core_fails_to_close() -> None:
    thing = Thing().start()

    async def broken() -> None:
        raise OSError("broken")

    thing._core.aclose = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="broken"):
        thing.close()
    assert worker_threads() == []


def test_closing_the_last_ends_what_still_runs() -> None:
    thing = Thing().start()
    pending = thing.future(forever)
    thing.close()
    with pytest.raises(ClosedError, match="closed during forever"):
        pending.result(30)


def test_a_worker_that_dies_fails_its_callers_instead_of_hanging_them() -> None:
    thing = Thing().start()

    async def kill_the_loop() -> None:
        asyncio.get_running_loop().stop()
        await forever()

    with pytest.raises((ClosedError, concurrent.futures.CancelledError)):
        thing.run(kill_the_loop)
    worker_threads_left = worker_threads()
    for thread in worker_threads_left:
        thread.join()
    with pytest.raises(ClosedError):
        thing.run(asyncio.sleep, 0)
    with pytest.raises(ClosedError):
        thing.close()
    with Thing() as another:  # a dead worker is not handed out
        assert another.run(asyncio.sleep, 0, 1) == 1


# Calling


def test_calls_from_many_threads_at_once() -> None:
    with Thing() as thing, concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: thing.run(asyncio.sleep, 0.001, number), range(200)))
    assert answers == list(range(200))


def test_things_started_and_closed_by_many_threads_at_once() -> None:
    async def one() -> int:
        return 1

    def live() -> int:
        with Thing() as thing:
            return thing.run(one)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: live(), range(40))) == 40


def test_calls_inside_a_running_loop_are_refused() -> None:
    thing, unstarted = Thing().start(), Thing()

    async def main() -> None:
        for call in (lambda: thing.run(asyncio.sleep, 0), thing.close, thing.start, unstarted.start):
            with pytest.raises(BlockingCallError, match=r"use await with swarmavg.Peer, swarmavg.Averager"):
                call()

    asyncio.run(main())
    assert thing.run(asyncio.sleep, 0, "still open") == "still open"
    thing.close()


def test_calls_inside_the_worker_itself_are_refused() -> None:
    with Thing() as thing:

        async def call_back() -> None:
            thing.run(asyncio.sleep, 0)

        with pytest.raises(BlockingCallError):
            thing.run(call_back)


def test_the_loop_sees_the_context_of_the_caller() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def look() -> str:
        return variable.get()

    with Thing() as thing:
        variable.set("set by the caller")
        assert thing.run(look) == "set by the caller"


def test_a_result_is_freed_with_its_last_reference() -> None:
    class Result:
        pass

    async def make() -> Result:
        return Result()

    gc.disable()
    try:
        with Thing() as thing:
            result = thing.run(make)
            thing.run(asyncio.sleep, 0)  # the loop has left the call behind
            gone = weakref.ref(result)
            del result
            assert gone() is None
    finally:
        gc.enable()


# Errors


def test_lone_errors_leave_their_groups() -> None:
    cause = KeyError("cause")
    lone = ListenError("port taken")

    async def fail() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            inner.create_task(raise_later(lone))
            outer.create_task(forever())

    with Thing() as thing, pytest.raises(ListenError, match="port taken") as caught:
        thing.run(fail)
    assert caught.value is lone
    group = BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [lone])])
    group.__cause__ = cause
    assert unwrap(group) is lone
    assert lone.__cause__ is cause


def test_several_errors_stay_a_group() -> None:
    async def fail() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_later(ValueError("one")))
            group.create_task(raise_later(TypeError("two")))

    with Thing() as thing, pytest.raises(ExceptionGroup) as caught:
        thing.run(fail)
    assert len(caught.value.exceptions) == 2


async def raise_later(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_error_that_ends_programs_reaches_the_caller_and_spares_the_loop(error: BaseException) -> None:
    async def leave() -> None:
        raise error

    with Thing() as thing:
        with pytest.raises(type(error)):
            thing.run(leave)
        assert thing.run(asyncio.sleep, 0, "alive") == "alive"


def test_a_cancelled_coroutine_is_an_ordinary_error_outside_the_loop() -> None:
    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with Thing() as thing, pytest.raises(concurrent.futures.CancelledError):
        thing.run(cancel_itself)


# Interrupts


def test_an_interrupt_is_raised_after_the_coroutine_has_unwound() -> None:
    events: list[str] = []

    async def step() -> None:
        try:
            asyncio.get_running_loop().call_soon(interrupt)
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # telling group mates takes more than one turn of the loop
            events.append("told the group")
            raise

    with Thing() as thing:
        with pytest.raises(KeyboardInterrupt):
            thing.run(step)
        assert events == ["told the group"]
        assert thing.run(asyncio.sleep, 0, "alive") == "alive"


def test_a_coroutine_that_will_not_unwind_holds_an_interrupt_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "UNWIND_SECONDS", 0.05)
    monkeypatch.setattr(tenancy, "STOP_SECONDS", 0.1)
    caplog.set_level(logging.WARNING)
    let_go = threading.Event()

    async def stubborn() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        while not let_go.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                continue

    thing = Thing().start()
    with pytest.raises(KeyboardInterrupt):
        thing.run(stubborn)
    assert "a cancelled call has not ended" in caplog.text
    (thread,) = worker_threads()
    thing.close()
    assert "the worker thread has not ended" in caplog.text
    let_go.set()
    thread.join()


def test_a_second_interrupt_is_not_held_up() -> None:
    let_go = threading.Event()

    async def stubborn() -> None:
        interrupts = [interrupt]
        asyncio.get_running_loop().call_soon(interrupt)
        while not let_go.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                while interrupts:
                    interrupts.pop()()

    with Thing() as thing:
        with pytest.raises(KeyboardInterrupt):
            thing.run(stubborn)
        let_go.set()


# Futures


def test_a_future_brings_the_result_or_the_error() -> None:
    with Thing() as thing:
        assert thing.future(asyncio.sleep, 0, 7).result(10) == 7
        with pytest.raises(ValueError, match="one"):
            thing.future(raise_later, ValueError("one")).result(10)


def test_cancelling_a_future_cancels_the_coroutine() -> None:
    unwound = threading.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            unwound.set()

    with Thing() as thing:
        future = thing.future(work)
        thing.run(asyncio.sleep, 0)  # it has begun
        assert future.cancel()
        assert unwound.wait(10)
