"""An asyncio event loop in virtual time: waiting costs nothing, and a deadlock is an error instead of a hang.

Whenever nothing is ready to run, the clock jumps to the next timer. Hours of simulated training take seconds, and a run is
a function of its seeds. Only for programs without real sockets and threads: `runtime.offload` runs inline under it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualDeadlockError(RuntimeError):
    """Every task waits for something that no timer will ever bring about."""


class _JumpingSelector(selectors.BaseSelector):
    """A selector that never waits: it moves the loop's clock on by as long as it was asked to wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, descriptor, events, data)
        self._files[descriptor] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        return self._files.pop(descriptor)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlockError("virtual time stands still: no task can run and no timer is set")
        self.now += max(timeout, 0.0)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files

    def close(self) -> None:
        self._files.clear()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop. `time()` starts at 0 and counts virtual seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @property
    def is_virtual(self) -> bool:
        """Asked by `runtime.offload`, which must not use threads here."""
        return True

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, debug: bool = False) -> T:
    """Run ``main()`` to its end in a fresh virtual loop and return its result.

    Raises `VirtualDeadlockError` when nothing can ever happen again, and `AssertionError` when `main` returns while tasks
    that it started are still alive: a leak in the code under test.
    """
    with asyncio.Runner(loop_factory=VirtualLoop, debug=debug) as runner:
        return runner.run(_checked(main))


async def _checked(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    result = await main()
    for _ in range(3):  # let cancelled tasks and callbacks of the last moment unwind
        await asyncio.sleep(0)
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    if leaked:
        raise AssertionError(f"{len(leaked)} tasks leaked: {sorted(task.get_name() for task in leaked)}\n{leaked}")
    return result
