"""Interrupts at the worst moments: nothing deadlocks, and nothing is left behind that nobody can close."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swarmavg.errors import ClosedError
from swarmavg.sync import resident, tenancy, worker
from swarmavg.sync.call import Call, Signal
from swarmavg.sync.holding import held
from swarmavg.sync.resident import Resident


class Core:
    def __init__(self) -> None:
        self.events: list[str] = []

    async def start(self) -> None:
        self.events.append("start")

    async def aclose(self) -> None:
        self.events.append("aclose")


class Thing(Resident[Core]):
    def __init__(self) -> None:
        super().__init__(Core())


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swarmavg-sync"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for thread in worker_threads():
        thread.join(30)
    assert worker_threads() == []
    assert tenancy._house.tenants == []


def interrupted_after(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do all that `function` does, and be interrupted before its result arrives; the first time only."""
    times = itertools.count()

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if next(times) == 0:
            raise KeyboardInterrupt
        return result

    return wrapped


def interrupted_before(function: Callable[..., Any]) -> Callable[..., Any]:
    times = itertools.count()

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if next(times) == 0:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return wrapped


def test_a_signal_is_seen_by_all_who_wait_before_and_after() -> None:
    signal = Signal()
    assert not signal.wait(0)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(signal.wait, 60) for _ in range(3)]
        signal.set()
        assert [one.result(60) for one in waiting] == [True] * 3
    assert signal.wait(0)
    assert signal.is_set()


@pytest.mark.parametrize("when", [interrupted_before, interrupted_after])
def test_an_interrupt_while_the_thread_begins_leaves_no_thread(
    when: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker._Entrance, "wait", when(worker._Entrance.wait))
    thing = Thing()
    with pytest.raises(KeyboardInterrupt):
        thing.start()
    for thread in worker_threads():
        thread.join(30)
    assert worker_threads() == []
    with thing:
        assert thing._core.events == ["start"]


@pytest.mark.parametrize("when", [interrupted_before, interrupted_after])
def test_an_interrupt_while_moving_in_leaves_no_tenant(when: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "acquire", when(tenancy.acquire))
    thing = Thing()
    with pytest.raises(KeyboardInterrupt):
        thing.start()
    assert tenancy._house.tenants == []
    with thing:
        assert thing._core.events == ["start"]


def test_what_has_started_when_the_interrupt_comes_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "wait", interrupted_after(Call.wait))
    thing = Thing()
    with pytest.raises(KeyboardInterrupt):
        thing.start()
    thing.close()
    assert thing._core.events == ["start", "aclose"]


def test_a_with_statement_closes_what_had_started_when_the_interrupt_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "wait", interrupted_after(Call.wait))
    thing = Thing()
    with pytest.raises(KeyboardInterrupt), thing:
        pytest.fail("the block must not run")
    assert thing._core.events == ["start", "aclose"]


def test_a_call_that_was_interrupted_before_it_was_scheduled_never_runs_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[bool] = []

    async def never() -> None:
        ran.append(True)

    with Thing() as thing:
        monkeypatch.setattr(Call, "start", interrupted_before(Call.start))
        with pytest.raises(KeyboardInterrupt):
            thing._home().run(never)
        thing._home().run(asyncio.sleep, 0)
    assert ran == []
    assert "has not ended" not in caplog.text


def test_a_lock_is_released_though_the_wait_for_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = asyncio.Lock()
    with Thing() as thing:
        block = held(thing._home(), lock)
        block.__enter__()
        monkeypatch.setattr(Call, "start", interrupted_before(Call.start))
        with pytest.raises(KeyboardInterrupt):
            block.__exit__(None, None, None)
        thing._home().run(lock.acquire)


def test_a_lock_is_released_when_the_garbage_collector_ends_the_block_inside_an_event_loop() -> None:
    lock = asyncio.Lock()
    with Thing() as thing:
        blocks = [held(thing._home(), lock)]
        blocks[0].__enter__()

        async def collect() -> None:
            blocks.clear()
            gc.collect()

        asyncio.run(collect())
        thing._home().run(lock.acquire)


def test_callers_of_other_threads_hear_that_the_last_one_closed() -> None:
    thing = Thing().start()
    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thing._home().run, endless)
        assert begun.wait(60)
        thing.close()
        with pytest.raises(ClosedError, match="closed during"):
            waiting.result(60)


def test_a_worker_that_winds_down_takes_no_more_calls() -> None:
    thing = Thing().start()
    home = thing._home()

    async def unwinding() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(ClosedError):
                home.schedule(lambda: None)

    pending = home.submit_future(unwinding)
    home.run(asyncio.sleep, 0)
    thing.close()
    assert isinstance(pending.exception(60), ClosedError)
