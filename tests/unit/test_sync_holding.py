"""An async lock held from a plain thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from swarmavg.errors import ClosedError
from swarmavg.sync.holding import held
from swarmavg.sync.tenancy import Tenant, acquire, release
from swarmavg.sync.worker import Worker


class Home:
    """A worker for the time of a test."""

    def __enter__(self) -> Worker:
        self.tenant = Tenant(asyncio.Event().wait, leaves_last=False)
        self.worker = acquire(self.tenant)
        return self.worker

    def __exit__(self, *_: object) -> None:
        release(self.worker, self.tenant)


class Guarded:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def get(self) -> AsyncIterator[str]:
        async with self.lock:
            yield "value"

    async def take(self) -> bool:
        async with self.lock:
            return True


def test_the_lock_is_held_in_the_block_while_the_loop_lives_on() -> None:
    guarded = Guarded()
    with Home() as worker:
        with held(worker, guarded.get()) as value:
            assert value == "value"
            assert guarded.lock.locked()
            taking = worker.submit_future(guarded.take)
            assert worker.run(asyncio.sleep, 0, "alive") == "alive"
            assert not taking.done()
        assert taking.result(10)


def test_the_lock_is_released_when_the_block_raises() -> None:
    guarded = Guarded()
    with Home() as worker:
        with pytest.raises(ZeroDivisionError), held(worker, guarded.get()):
            raise ZeroDivisionError
        assert not guarded.lock.locked()


def test_what_entering_raises_is_raised() -> None:
    @contextlib.asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise ClosedError("closed")
        yield

    with Home() as worker, pytest.raises(ClosedError, match="closed"), held(worker, broken()):
        pytest.fail("the block must not run")


def test_an_interrupt_while_waiting_for_the_lock_leaves_it_free() -> None:
    guarded = Guarded()
    with Home() as worker:
        with held(worker, guarded.get()):
            worker.schedule(lambda: asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt), held(worker, guarded.get()):
                pytest.fail("the block must not run")
        assert worker.run(guarded.take)


def test_the_end_of_the_worker_inside_the_block_is_survived() -> None:
    guarded = Guarded()
    home = Home()
    worker = home.__enter__()
    with held(worker, guarded.get()):
        home.__exit__()
    assert not guarded.lock.locked()
