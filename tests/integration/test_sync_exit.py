"""Programs that never close what they started, that are interrupted, or that fork: each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

PRELUDE = """
import asyncio, os, signal, socket, sys, threading
from swarmavg.errors import ClosedError, ForkedError
from swarmavg.sync.resident import Resident

def say(*words):
    print(*words, flush=True)

class Core:
    '''An object of the async API that owns a listening socket and a connection to itself.'''
    def __init__(self, name, hang=False):
        self.name, self.hang = name, hang
    async def start(self):
        self.served = []
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        await self.ping()
    async def serve(self, reader, writer):
        self.served.append(writer)
        try:
            while line := await reader.readline():
                writer.write(line)
        except asyncio.CancelledError:
            pass  # the streams of Python 3.11 complain about a handler that was cancelled
    async def ping(self):
        self.writer.write(b"ping\\n")
        return await asyncio.wait_for(self.reader.readline(), 20)
    async def aclose(self):
        say("closing", self.name)
        if self.hang:
            await asyncio.Event().wait()
        for writer in (self.writer, *self.served):
            writer.close()
        self.server.close()
        await self.server.wait_closed()
        say("closed", self.name)

def connections():
    '''The descriptors of this process that are internet sockets.'''
    for descriptor in range(3, 64):
        try:
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family == socket.AF_INET:
                    yield descriptor
        except OSError:
            pass

class Thing(Resident):
    def __init__(self, name, hang=False, last=False):
        super().__init__(Core(name, hang), leaves_last=last)
    def ping(self):
        return self._home().run(self._core.ping)
    def hang(self):
        return self._home().run(self._hang)
    async def _hang(self):
        try:
            say("waiting")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            say("unwound")
"""


def start(body: str) -> subprocess.Popen[str]:
    program = PRELUDE + textwrap.dedent(body)
    command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(body: str) -> tuple[int, list[str], str]:
    with start(body) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), err


def test_a_program_that_forgets_to_close_says_goodbye_in_order() -> None:
    status, out, err = run("Thing('peer', last=True).start(); Thing('averager').start()")
    assert (status, err) == (0, "")
    assert out == ["closing averager", "closed averager", "closing peer", "closed peer"]


def test_sys_exit_keeps_its_status() -> None:
    status, out, err = run("Thing('peer').start(); sys.exit(7)")
    assert (status, out, err) == (7, ["closing peer", "closed peer"], "")


def test_an_unhandled_error_is_what_the_program_dies_of() -> None:
    status, out, err = run("Thing('peer').start(); raise LookupError('of the program')")
    assert status == 1
    assert out == ["closing peer", "closed peer"]
    assert err.rstrip().endswith("LookupError: of the program")
    assert err.count("Traceback") == 1


def test_one_that_never_closes_holds_up_neither_the_others_nor_the_exit() -> None:
    status, out, err = run("Thing('peer', last=True).start(); Thing('averager', hang=True).start()")
    assert status == 0
    assert out == ["closing averager", "closing peer", "closed peer"]
    assert "Traceback" not in err


def test_a_thread_that_waits_for_ever_does_not_hold_up_the_exit() -> None:
    status, out, err = run("""
        thing = Thing('peer').start()
        began = threading.Event()
        async def wait():
            began.set()
            await asyncio.Event().wait()
        def waiting():
            try:
                thing._home().run(wait)
            except BaseException:
                pass  # the interpreter is ending
        threading.Thread(target=waiting, daemon=True).start()
        began.wait()
    """)
    assert (status, err) == (0, "")
    assert out == ["closing peer", "closed peer"]


def test_a_task_that_ignores_its_cancellation_does_not_hold_up_the_exit() -> None:
    status, out, err = run("""
        thing = Thing('peer').start()
        async def stubborn():
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    say('ignored')
        thing._home().submit(stubborn)
        thing.ping()
    """)
    assert status == 0
    assert out[:3] == ["closing peer", "closed peer", "ignored"]
    assert "Traceback" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
def test_ctrl_c_in_a_blocking_call_unwinds_it_and_closes() -> None:
    with start("with Thing('peer') as thing: thing.hang()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert out.splitlines() == ["unwound", "closing peer", "closed peer"]
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_can_neither_use_nor_disturb_what_its_parent_started() -> None:
    status, out, err = run("""
        with Thing('parent') as thing:
            say(thing.ping())
            say(len(list(connections())))
            child = os.fork()
            if child == 0:
                try:
                    thing.ping()
                except ForkedError as error:
                    say(type(error).__name__, str(os.getpid()) in str(error))
                say('connections', list(connections()))
                with Thing('child') as own:
                    say(own.ping())
                thing._core = thing._worker = None  # whatever is left behind is collected
                import gc
                gc.collect()
                sys.exit(5)
            say('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            say(thing.ping())
    """)
    assert out == [
        "b'ping\\n'",
        "3",
        "ForkedError True",
        "connections []",
        "b'ping\\n'",
        "closing child",
        "closed child",
        "child 5",
        "b'ping\\n'",
        "closing parent",
        "closed parent",
    ]
    assert (status, err) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_connections_end_with_the_parent_though_a_forked_child_lives_on() -> None:
    status, out, err = run("""
        outside = socket.create_server(('127.0.0.1', 0))
        class Caller(Core):
            async def start(self):
                self.reader, self.writer = await asyncio.open_connection(*outside.getsockname())
            async def aclose(self):
                self.writer.close()
                await self.writer.wait_closed()
        thing = Resident(Caller('caller')).start()
        connection, _ = outside.accept()
        go_on, blocked = os.pipe()
        child = os.fork()
        if child == 0:
            connection.close()
            os.close(blocked)
            os.read(go_on, 1)
            os._exit(0)
        thing.close()
        connection.settimeout(20)
        say('end of stream', connection.recv(1))
        os.close(blocked)
        os.waitpid(child, 0)
        connection.close()
        outside.close()
    """)
    assert (status, err) == (0, "")
    assert out == ["end of stream b''"]
