"""The pages about faults name tests that exist, every reason there is, and code that runs."""

from __future__ import annotations

import re
from pathlib import Path

from swarmavg import ExclusionCode

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs/explanation/guarantees.md").read_text()
DEBUGGING = (ROOT / "docs/how-to/debug-a-round.md").read_text()


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", GUARANTEES)
    assert named
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in files.get(file, "")]
    assert not missing


def test_every_reason_is_explained_once() -> None:
    table = DEBUGGING.partition("## Reasons")[2]
    assert re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE) == [code.value for code in ExclusionCode]


def test_the_story_of_the_guide_is_told(capsys) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", DEBUGGING, re.DOTALL | re.MULTILINE)
    exec(code, {})
    told = [without_time(line) for line in capsys.readouterr().out.splitlines()]
    (printed, *_) = re.findall(r"^```text\n(.*?)^```", DEBUGGING, re.DOTALL | re.MULTILINE)
    for line in printed.splitlines():
        before, _, after = without_time(line).partition("...")
        assert any(entry.startswith(before) and entry.endswith(after) for entry in told), f"not in the story: {line}"


def without_time(line: str) -> str:
    return line.strip().partition("  ")[2]
