"""Who lives in the worker thread: it begins with the first object that is started and ends with the last that is closed.

Also what happens to those who never close: at the end of the interpreter they say goodbye, and in a forked child they are
forgotten in silence.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmavg.sync.worker import Worker, refuse_running_loop
from swarmavg.telemetry.logs import get_logger

GOODBYE_SECONDS = 2.0
"""How long the end of the interpreter may be held up for goodbyes over open channels."""

STOP_SECONDS = 5.0
"""How long the last `close` waits for the thread. A task that will not end keeps the daemon thread, not the program."""

_log = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Tenant:
    """An object that lives in the worker, as far as moving out is concerned."""

    depart: Callable[[], Awaitable[object]]
    """Closes it at the end of the interpreter; called in the worker's loop."""
    leaves_last: bool
    """Whether other tenants stand on it, so that it is to be closed after them."""


class _House:
    """The worker of this process and its tenants."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.worker: Worker | None = None
        self.tenants: list[tuple[Worker, Tenant]] = []
        self.watches_process = False


_house = _House()


def acquire(tenant: Tenant) -> Worker:
    """The worker, started if need be; it lives until its every tenant has been released."""
    refuse_running_loop()
    with _house.lock:
        _watch_process()
        if _house.worker is None or not _house.worker.alive:
            _house.worker = Worker()
        _house.tenants.append((_house.worker, tenant))
        return _house.worker


def release(worker: Worker, tenant: Tenant) -> None:
    """Give the worker back; the last one to do so ends it. A second release does nothing."""
    with _house.lock:
        if (worker, tenant) not in _house.tenants:
            return
        _house.tenants.remove((worker, tenant))
        if any(other is worker for other, _ in _house.tenants):
            return
        if _house.worker is worker:
            _house.worker = None
    worker.stop(STOP_SECONDS)


def withdraw(tenant: Tenant) -> None:
    """Release a tenant whose `acquire` was interrupted, wherever it was."""
    for worker in [worker for worker, other in _house.tenants if other is tenant]:
        release(worker, tenant)


def _watch_process() -> None:
    if _house.watches_process:
        return
    _house.watches_process = True
    atexit.register(_say_goodbye)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _say_goodbye() -> None:
    deadline = time.monotonic() + GOODBYE_SECONDS
    worker, _house.worker = _house.worker, None
    if worker is None or worker.pid != os.getpid() or not worker.alive:
        return
    tenants = [tenant for home, tenant in _house.tenants if home is worker]
    farewell = worker.submit(_all_depart, tenants, 0.75 * GOODBYE_SECONDS)
    farewell.wait(deadline - time.monotonic())
    worker.stop(max(deadline - time.monotonic(), 0.0))


async def _all_depart(tenants: list[Tenant], timeout: float) -> None:
    for last in (False, True):
        leaving = [asyncio.create_task(_depart(tenant)) for tenant in tenants if tenant.leaves_last is last]
        if leaving:
            await asyncio.wait(leaving, timeout=timeout / 2)


async def _depart(tenant: Tenant) -> None:
    try:
        await tenant.depart()
    except Exception as error:  # noqa: BLE001  (the end of the interpreter is the last place that could hear of it)
        _log.debug("could not say goodbye", tenant=tenant, error=error)


def _after_fork() -> None:
    global _house
    parents, _house = _house, _House()
    _house.watches_process = True
    if parents.worker is not None:
        parents.worker.abandon_in_child()
