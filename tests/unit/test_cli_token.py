"""The command line's frame, and its simplest command."""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable

import pytest

from swarmavg.cli import main as cli
from swarmavg.cli import token
from swarmavg.errors import MatchmakingError, TokenError
from swarmavg.security.tokens import derive_signing_key


def test_token_prints_one_usable_token_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["token"]) == 0
    assert cli.main(["token"]) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first != second
    for line in (first, second):
        derive_signing_key(line)
    assert err == ""


def test_token_tells_a_person_what_to_do_with_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cli.main(["token"])
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert "every peer" in err


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"swarmavg {importlib.metadata.version('swarmavg')}\n"


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["token", "--no-such-option"]])
def test_wrong_usage_is_status_2_with_a_hint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: swarmavg" in capsys.readouterr().err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        assert caught.value.code == 0
        assert f"usage: swarmavg {name}" in capsys.readouterr().out


def _raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TokenError("the token is too weak"), "swarmavg: the token is too weak\n"),
        (MatchmakingError("no group\n  a: left\n  b: late"), "swarmavg: no group; a: left; b: late\n"),
        (TokenError(), "swarmavg: TokenError\n"),
    ],
)
def test_an_error_of_ours_is_one_line_and_status_2(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(token, "run", _raising(error))
    assert cli.main(["token"]) == 2
    assert capsys.readouterr().err == line


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "run", _raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["token"])


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "run", _raising(KeyboardInterrupt()))
    assert cli.main(["token"]) == 130


def test_the_module_runs_as_a_program() -> None:
    arguments = [sys.executable, "-W", "error", "-m", "swarmavg.cli.main", "token"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    derive_signing_key(done.stdout)
    assert done.stderr == ""
