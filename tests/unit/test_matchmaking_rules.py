"""The pure parts of matchmaking: the deal, the transition table, the arguments, and that the documentation is in step."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import LocalProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.protocol.group import Role
from swarmavg.protocol.matchmaking import LookRequest, Matchmaking
from swarmavg.protocol.matchmaking_events import Cancel, Close, Look, MatchSettings, RoundFinished, Tick, Withdraw
from swarmavg.protocol.matchmaking_states import TRANSITIONS, Cause, State, state_diagram
from swarmavg.protocol.ordering import deal, order_key
from swarmavg.testing.matchmaking_world import CONFIG, fake_signer, plan_of

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "matchmaking.md"
LOOKING = st.dictionaries(st.binary(min_size=32, max_size=32).map(PeerId), st.sampled_from(Role), min_size=1, max_size=20)


@given(LOOKING, st.none() | st.integers(1, 6), st.integers(1, 4), st.text("01", max_size=3))
@settings(max_examples=200, deadline=None)
def test_the_deal(looking: dict[PeerId, Role], target: int | None, minimum: int, bits: str) -> None:
    result = deal(looking, bits, target, minimum)
    leaders = sorted((peer for peer, role in looking.items() if role.leads), key=lambda peer: order_key(bits, peer))
    if not leaders:
        assert result.heads == ()
        return
    assert set(result.head_of) == set(looking)
    assert list(result.heads) == leaders[: len(result.heads)]
    sizes = [result.share(head) for head in result.heads]
    assert sum(sizes) == len(looking)
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 1 or min(sizes) >= minimum
    for peer, head in result.head_of.items():
        if looking[peer].leads:  # the reason why nobody can wait in a circle
            assert peer == head or order_key(bits, head) < order_key(bits, peer)
    shuffled = dict(random.Random(0).sample(sorted(looking.items(), key=str), len(looking)))
    assert deal(shuffled, bits, target, minimum) == result


@pytest.mark.parametrize(
    ("count", "target", "minimum", "sizes"),
    [(5, 4, 2, [2, 3]), (5, 4, 3, [5]), (16, 2, 2, [2] * 8), (3, 2, 2, [3]), (7, None, 2, [7]), (9, 4, 2, [3, 3, 3])],
)
def test_sizes_of_the_deal(count: int, target: int | None, minimum: int, sizes: list[int]) -> None:
    looking = {PeerId(bytes([index]) * 32): Role.NODE for index in range(count)}
    result = deal(looking, "", target, minimum)
    assert sorted(result.share(head) for head in result.heads) == sizes


def test_every_state_is_reached_and_left() -> None:
    reached = {State.IDLE} | set(TRANSITIONS.values())
    assert reached == set(State)
    assert {before for before, _ in TRANSITIONS} == set(State) - {State.CLOSED}
    assert {cause for _, cause in TRANSITIONS} == set(Cause)


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"```mermaid\n{state_diagram()}\n```" in text, "replace the diagram in the page by what state_diagram() returns"


# ---- local errors


def machine() -> Matchmaking:
    return Matchmaking(
        PeerId.from_public_key(b"me"), settings_of(), signer=fake_signer(b"me"), plan_hash=plan_of, rng=random.Random(0)
    )


def settings_of(**changes: Any) -> MatchSettings:
    values: dict[str, Any] = {
        "prefix": "run",
        "role": Role.NODE,
        "config": CONFIG,
        "target_group_size": None,
        "min_group_size": 2,
        "request_timeout": 3.0,
        "window": 5.0,
        **changes,
    }
    return MatchSettings(**values)


def test_commands_out_of_place_are_local_errors() -> None:
    one = machine()
    with pytest.raises(LocalProtocolError, match="round finished in state idle"):
        one.receive(RoundFinished("", ok=True), 0.0)
    one.receive(Look(LookRequest()), 0.0)
    with pytest.raises(LocalProtocolError, match="look in state leading"):
        one.receive(Look(LookRequest()), 0.0)
    one.validate()


def test_cancel_and_close_are_always_allowed() -> None:
    one = machine()
    one.receive(Cancel(), 0.0)
    one.receive(Look(LookRequest()), 0.0)
    one.receive(Cancel(), 1.0)
    assert one.state is State.IDLE
    one.receive(Close(), 2.0)
    assert isinstance(one.drain_effects()[-1], Withdraw)
    one.receive(Close(), 3.0)
    one.receive(Tick(), 4.0)
    assert one.drain_effects() == []
    assert one.next_deadline() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_timeout", 0.0),
        ("request_timeout", math.inf),
        ("window", -1.0),
        ("min_group_size", 0),
        ("target_group_size", 1),
        ("target_group_size", 5000),
    ],
)
def test_bad_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        settings_of(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("bandwidth", -1.0), ("bandwidth", math.nan), ("not_before", math.inf), ("deadline", math.nan), ("window", 0.0)],
)
def test_bad_requests_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        LookRequest(**{name: value})


def test_bad_bits_and_gather_are_refused() -> None:
    with pytest.raises(ValueError, match="'012' are not group bits"):
        LookRequest(bits="012")
    with pytest.raises(ValueError, match="gather must be at most 65536 bytes"):
        LookRequest(gather=bytes(65537))
