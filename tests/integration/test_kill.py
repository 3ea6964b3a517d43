"""Four real processes, one of which is killed in mid-round: the others go on, with right numbers or a typed error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import swarmavg

WORKER = Path(__file__).with_name("kill_worker.py")


def start(index, token, bootstrap, fate):
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(WORKER), str(index), token, bootstrap, fate], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_process_killed_in_mid_round_costs_the_others_neither_numbers_nor_their_lives():
    token = swarmavg.generate_token()
    workers = [start(0, token, "", "lives")]
    try:
        bootstrap = workers[0].stdout.readline().strip()
        workers += [start(index, token, bootstrap, "dies" if index == 3 else "lives") for index in range(1, 4)]
        outputs = [worker.communicate(timeout=110)[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert workers[3].returncode != 0
    assert [worker.returncode for worker in workers[:3]] == [0, 0, 0]
    for lines in outputs[:3]:
        first, second = (json.loads(line) for line in lines[-2:])
        if "error" in first:
            assert first["error"] in {"AllreduceError", "MatchmakingError"}
            assert first["unchanged"]
        else:
            assert first["wrong"] == 0
            assert set(first["excluded"]) <= {"3"}
            assert first["fraction"] > 0
        assert second == {"group": [0, 1, 2], "value": 1.0, "even": True}
