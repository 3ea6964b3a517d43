"""Importing the library changes nothing in the process that imports it."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run_fresh(program: str) -> str:
    """Run in a new interpreter with warnings as errors; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:swarmavg", "-c", textwrap.dedent(program)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_prints_nothing() -> None:
    assert run_fresh("import swarmavg, swarmavg.sync, swarmavg_tcp") == ""


def test_import_starts_no_thread_process_or_connection() -> None:
    run_fresh(
        """
        import sys, threading
        import torch, numpy, anyio, structlog, cryptography  # what these do is not ours
        before = threading.enumerate()
        forbidden = ("socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.posix_spawn")
        def audit(event, args):
            if event in forbidden:
                raise SystemExit(f"import did {event} {args}")
        sys.addaudithook(audit)
        import swarmavg, swarmavg.sync, swarmavg_tcp
        assert threading.enumerate() == before
        """
    )


def test_import_writes_no_file() -> None:
    run_fresh(
        """
        import sys
        sys.dont_write_bytecode = True
        import torch, numpy, anyio, structlog, cryptography
        def audit(event, args):
            if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
                raise SystemExit(f"import wrote {args[0]}")
        sys.addaudithook(audit)
        import swarmavg, swarmavg.sync, swarmavg_tcp
        """
    )


def test_import_leaves_logging_signals_warnings_and_torch_as_they_were() -> None:
    run_fresh(
        """
        import logging, signal, sys, warnings
        import torch, numpy, anyio, structlog, cryptography
        def settings():
            return (
                list(logging.getLogger().handlers), logging.getLogger().level, structlog.is_configured(),
                [signal.getsignal(number) for number in signal.valid_signals()],
                list(warnings.filters), sys.getswitchinterval(), sys.excepthook,
                torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(),
            )
        before = settings()
        import swarmavg, swarmavg.sync, swarmavg_tcp
        assert settings() == before, (before, settings())
        (handler,) = logging.getLogger("swarmavg").handlers
        assert isinstance(handler, logging.NullHandler)
        """
    )
