"""Child processes of the demo, seen from the parent: started, heard, and stopped without fail."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from swarmavg.cli.demo.messages import FromChild, Setup, ToChild, decode, encode

_STDERR_LINES_KEPT = 20
_GRACE_SECONDS = 5.0


class ChildFailedError(Exception):
    """A child ended otherwise than it should: says which one, how, and the last lines of its stderr."""

    def __init__(self, name: str, what: str, last_words: Sequence[str]) -> None:
        super().__init__("\n    ".join([f"{name} {what}", *last_words]))


class Child:
    """One running child. Read `messages` to the end: that is where a failure comes out."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process
        self._last_words: deque[str] = deque(maxlen=_STDERR_LINES_KEPT)
        self._listener = asyncio.create_task(self._keep_last_words(), name=f"stderr of {name}")

    @classmethod
    async def start(cls, name: str, setup: Setup) -> Child:
        # A session of its own: Ctrl-C in the terminal reaches the parent alone, which then stops its children.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "swarmavg.cli.demo.worker", stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        child = cls(name, process)
        await child.send(setup)
        return child

    async def send(self, message: ToChild) -> None:
        """Give an order. One to a child that has died is lost; `messages` tells of the death."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{encode(message)}\n".encode())
            await stdin.drain()
        except ConnectionError:
            return

    async def messages(self) -> AsyncIterator[FromChild]:
        """What the child reports, until it ends. Raises `ChildFailedError` unless its exit status is 0."""
        stdout = self._process.stdout
        assert stdout is not None
        async for line in stdout:
            yield self._read(line.decode(errors="replace"))
        status = await self._process.wait()
        await self._listener
        if status:
            raise self.failure(f"ended with exit status {status}")

    def failure(self, what: str) -> ChildFailedError:
        return ChildFailedError(self.name, what, self._last_words)

    def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    async def wait_or_kill(self) -> None:
        """Wait for the end, and force it if it does not come within the grace time."""
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        finally:
            self._listener.cancel()

    def _read(self, line: str) -> FromChild:
        try:
            message = decode(line)
        except ValueError as error:
            raise self.failure(f"reported {error}") from error
        if isinstance(message, ToChild):
            raise self.failure(f"reported what only a parent says: {message!r}")
        return message

    async def _keep_last_words(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        async for line in stderr:
            self._last_words.append(line.decode(errors="replace").rstrip())


@asynccontextmanager
async def family(setups: Sequence[tuple[str, Setup]]) -> AsyncIterator[list[Child]]:
    """Start a child for each (name, setup); on leaving, for whatever cause, none is left running."""
    children: list[Child] = []
    try:
        for name, setup in setups:
            children.append(await Child.start(name, setup))
        yield children
    finally:
        for child in children:
            child.terminate()
        await asyncio.gather(*(child.wait_or_kill() for child in children))
