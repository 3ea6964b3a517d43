"""The wheel that users install: what is in it, and what is not. Built in process, without a network."""

from __future__ import annotations

import configparser
import email.parser
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from hatchling import build

import swarmavg
from swarmavg.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"swarmavg": "swarmavg", "swarmavg_tcp": "transports/swarmavg_tcp", "swarmavg_bench": "bench/swarmavg_bench"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = build.build_wheel(str(folder))
    return zipfile.ZipFile(folder / name)


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    return email.parser.Parser().parsestr(read(wheel, "METADATA"))


def read(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_wheel_is_pure_python(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert wheel.filename.endswith("-py3-none-any.whl")


def test_wheel_holds_every_module_of_every_package(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert expected
    assert expected <= set(wheel.namelist())


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {entry.partition("/")[0] for entry in wheel.namelist()}
    assert tops == {*PACKAGES, f"swarmavg-{metadata_of(wheel)['Version']}.dist-info"}
    assert not [entry for entry in wheel.namelist() if "__pycache__" in entry or "/tests/" in entry]


def test_packages_that_users_import_are_typed(wheel: zipfile.ZipFile) -> None:
    assert {"swarmavg/py.typed", "swarmavg_tcp/py.typed"} <= set(wheel.namelist())


def test_entry_points_name_modules_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(read(wheel, "entry_points.txt"))
    assert points["console_scripts"]["swarmavg"] == "swarmavg.cli.main:main"
    assert "tcp" in points["swarmavg.transports"]
    targets = [target for section in points.sections() for target in points[section].values()]
    for target in targets:
        path = target.partition(":")[0].replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist()), target


def test_licence_and_readme_come_along(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    assert metadata["License-Expression"] == "MIT"
    assert (ROOT / "LICENSE").read_text() == read(wheel, "licenses/LICENSE")
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text().strip()


def test_version_told_is_that_of_the_wheel(wheel: zipfile.ZipFile, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"swarmavg {metadata_of(wheel)['Version']}\n"
    assert swarmavg.__version__ == metadata_of(wheel)["Version"]
