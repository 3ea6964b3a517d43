"""The blocking classes against the async ones: the same names, arguments and docstrings."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import swarmavg.averager
import swarmavg.control
import swarmavg.peer
import swarmavg.training.state_averager
from swarmavg import sync

PAIRS = [
    (swarmavg.peer.Peer, sync.Peer),
    (swarmavg.averager.Averager, sync.Averager),
    (swarmavg.control.StepControl, sync.StepControl),
    (swarmavg.training.state_averager.TrainingStateAverager, sync.TrainingStateAverager),
]

HUB = {  # through which averagers open channels; they use the async peer
    "accepts_channels",
    "check_running",
    "closing_with",
    "bootstrap_failures",
    "round_counters",
    "dial_address",
    "directory",
    "in_its_loop",
    "no_longer_closing_with",
    "open_channel",
    "own_addresses",
    "serve",
    "sign",
}
BLOCKING_NAMES = {"aclose": "close"}
ONLY_BLOCKING = {"result"}
ATTRIBUTES = {"config", "peer"}  # of instances in the async classes
EXTRA_ARGUMENTS = {"load_state": ["wait"], "load_state_from_peers": ["wait"]}


def public(owner: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(owner) if not name.startswith("_")}


def arguments(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


pairs = pytest.mark.parametrize(("original", "mirror"), PAIRS, ids=lambda owner: f"{owner.__module__}.{owner.__name__}")


@pairs
def test_the_same_names(original: type, mirror: type) -> None:
    expected = {BLOCKING_NAMES.get(name, name) for name in public(original) if name not in HUB}
    assert set(public(mirror)) - ONLY_BLOCKING - ATTRIBUTES == expected - ATTRIBUTES
    assert mirror.__name__ == original.__name__


@pairs
def test_the_same_constructor(original: type, mirror: type) -> None:
    if original is not swarmavg.control.StepControl:  # made by `step` alone
        assert arguments(mirror) == arguments(original)


@pairs
def test_the_same_arguments(original: type, mirror: type) -> None:
    for name, member in public(mirror).items():
        source = getattr(original, {"close": "aclose"}.get(name, name), None)
        if source is None or not inspect.isfunction(member):
            continue
        extra = EXTRA_ARGUMENTS.get(name, [])
        assert [a for a in arguments(member) if a[0] not in extra] == arguments(source), name


@pairs
def test_properties_are_properties_with_the_same_setters(original: type, mirror: type) -> None:
    for name, member in public(original).items():
        if isinstance(member, property) and name not in HUB:
            twin = inspect.getattr_static(mirror, name)
            assert isinstance(twin, property), name
            assert (twin.fset is None) == (member.fset is None), name


@pairs
def test_nothing_blocking_is_a_coroutine(original: type, mirror: type) -> None:
    for name, member in public(mirror).items():
        assert not inspect.iscoroutinefunction(member), name
        assert not inspect.isasyncgenfunction(member), name
    assert not hasattr(mirror, "__aenter__")
    assert hasattr(mirror, "__enter__") == hasattr(original, "__aenter__")


@pairs
def test_docstrings_are_there_wherever_the_original_has_one(original: type, mirror: type) -> None:
    assert mirror.__doc__
    for name, member in public(mirror).items():
        source = getattr(original, {"close": "aclose"}.get(name, name), None)
        if source is not None and source.__doc__:
            assert member.__doc__, name
        if name in ("step", "set_group_bits", "allow_allreduce", "status"):
            assert member.__doc__ == source.__doc__, name
