"""The code that newcomers copy runs as printed: loops of the README, scripts of the tutorials, the guide to watching."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import swarmavg.sync

ROOT = Path(__file__).resolve().parents[2]
TOKEN = swarmavg.generate_token()


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def on_any_loopback_port(code: str) -> str:
    assert "tcp://0.0.0.0:31337" in code
    return code.replace("tcp://0.0.0.0:31337", "tcp://127.0.0.1:0")


class Times:
    """True so many times, then false: for ``while training``."""

    def __init__(self, count: int) -> None:
        self._left = count

    def __bool__(self) -> bool:
        self._left -= 1
        return self._left >= 0


@pytest.fixture
def member() -> Iterator[str]:
    """The address of a member of the swarm that takes no part in averaging."""
    with swarmavg.sync.Peer(listen=["tcp://127.0.0.1:0"], token=TOKEN) as peer:
        yield peer.join_line


def test_plain_loop_of_the_readme(member: str) -> None:
    (code,) = [block for block in python_blocks("README.md") if "TrainingStateAverager" in block]

    def train(target: float) -> torch.Tensor:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names: dict[str, Any] = {
            "addresses": [member],
            "token": TOKEN,
            "model": model,
            "optimizer": optimizer,
            "loss_function": torch.nn.functional.mse_loss,
            "batches": [(torch.ones(1, 1), torch.full((1, 1), target))] * 20,  # two rounds, the second at the last step
        }
        exec(on_any_loopback_port(code.replace("target_group_size=4", "target_group_size=2")), names)
        return model.weight.detach()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, [-1.0, 1.0])
    assert torch.equal(first, second)


def test_async_trainer_of_the_readme(member: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [block for block in python_blocks("README.md") if "gather=" in block]
    body = on_any_loopback_port(code.replace("target_group_size=4", "target_group_size=2"))

    async def train(value: float) -> torch.Tensor:
        tensor = torch.full((10,), value)
        names: dict[str, Any] = {
            "addresses": [member],
            "token": TOKEN,
            "tensor": tensor,
            "training": Times(2),
            "train_for_a_while": lambda: asyncio.sleep(0),
            "samples_seen": 5,
            "loss": value,
        }
        exec("async def program():\n" + textwrap.indent(body, "    "), names)
        await names["program"]()
        return tensor

    async def both() -> tuple[torch.Tensor, torch.Tensor]:
        return await asyncio.gather(train(1.0), train(3.0))

    first, second = asyncio.run(both())
    assert first.tolist() == second.tolist() == [2.0] * 10
    assert capsys.readouterr().out.count("averaged with 1 others") == 4


def test_async_trainer_of_the_readme_survives_a_round_without_partners(
    member: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [block for block in python_blocks("README.md") if "gather=" in block]
    assert "timeout=30" in code
    names: dict[str, Any] = {
        "addresses": [member],
        "token": TOKEN,
        "tensor": torch.ones(10),
        "training": Times(2),
        "train_for_a_while": lambda: asyncio.sleep(0),
        "samples_seen": 5,
        "loss": 0.5,
    }
    body = on_any_loopback_port(code).replace("timeout=30", "timeout=0.2")
    exec("async def program():\n" + textwrap.indent(body, "    "), names)
    asyncio.run(names["program"]())
    assert caplog.text.count("no average this time: no group of at least 2") == 2
    assert "averaged with" not in capsys.readouterr().out


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Takes back what a page's code does to the loggers of the package."""
    package, transport = logging.getLogger("swarmavg"), logging.getLogger("swarmavg.transport")
    handlers, level = list(package.handlers), transport.level
    yield
    package.handlers[:] = handlers
    transport.setLevel(level)


@pytest.mark.usefixtures("logging_as_before")
def test_code_of_the_guide_to_watching(
    member: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "swarmavg")  # under pytest, basicConfig finds logging configured and does nothing
    configure, handler, step, status, gate, end = python_blocks("docs/how-to/watch-a-run.md")
    log_names: dict[str, Any] = {}
    exec(configure + handler, log_names)

    def train(value: float) -> torch.Tensor:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names: dict[str, Any] = {"PEERS": 2, "swarmavg": swarmavg, "torch": torch}
        with swarmavg.sync.Peer(listen=["tcp://127.0.0.1:0"], bootstrap=[member], token=TOKEN) as peer:
            names["peer"] = peer
            exec(gate, names)
            with swarmavg.sync.TrainingStateAverager(peer=peer, prefix="my-run", optimizer=optimizer) as averager:
                names["averager"] = averager
                exec(step + status + end, names)
            json.dumps(peer.status())
        return model.weight.detach()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, [1.0, 3.0])
    assert first.item() == second.item() == 2.0
    output = capsys.readouterr().out
    assert output.count("mine: {'loss': 0.1} fraction: 1.0 left out: {}") == 2
    assert output.count("rounds of this run: {'finished': 1, 'failed': 0") == 2
    assert "may differ" not in output
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"level"')]
    finished = [line for line in lines if line["text"].startswith("round finished")]
    assert [line["size"] for line in finished] == ["2"] * 6  # the gate and two rounds, on both peers
    assert finished[0].keys() >= {"prefix", "group", "seconds", "matchmaking", "rate", "fraction"}


@pytest.mark.slow
def test_script_of_the_training_tutorial(tmp_path: Path) -> None:
    (script,) = python_blocks("docs/tutorials/train-a-model.md")
    path = tmp_path / "train.py"
    path.write_text(script)
    environment = {**os.environ, "SWARM_TOKEN": TOKEN}
    with subprocess.Popen([sys.executable, path, "0"], stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None
        address = first.stdout.readline().split()[-1]
        command = [sys.executable, str(path), "1", address]
        second = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        last = first.stdout.read().splitlines()[-1]
    assert first.returncode == 0
    assert second.stderr.count("round finished") == 1 + 500 // 5
    assert second.stdout.count("averaged by 2 peers") == 5
    assert last == second.stdout.splitlines()[-1]
    assert float(last.removeprefix("error on the whole curve: ")) < 0.02  # alone it is about 0.1


@pytest.mark.slow
def test_script_of_the_quick_start(tmp_path: Path) -> None:
    (script,) = [block for block in python_blocks("docs/tutorials/quick-start.md") if "sys.argv" in block]
    path = tmp_path / "peer.py"
    path.write_text(script)
    environment = {**os.environ, "SWARM_TOKEN": TOKEN}
    with subprocess.Popen([sys.executable, path, "1"], stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None
        address = first.stdout.readline().split()[-1]
        command = [sys.executable, str(path), "3", address]
        second = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        last = first.stdout.read().splitlines()[-1]
    assert last == second.stdout.splitlines()[-1] == "tensor is now 2.0 in a group of 2"
    assert first.returncode == 0
