"""Arguments of the averager are checked at construction, with name and value in the message."""

from __future__ import annotations

import warnings

import pytest

from swarmavg.config import AveragerConfig


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prefix": "a.b"}, ValueError, "prefix.*'a.b'"),
        ({"prefix": ""}, ValueError, "prefix"),
        ({"prefix": 5}, TypeError, "prefix.*5"),
        ({"target_group_size": 1}, ValueError, "target_group_size.*1"),
        ({"target_group_size": 2.0}, TypeError, "target_group_size.*2.0"),
        ({"min_group_size": 1}, ValueError, "min_group_size.*1"),
        ({"min_group_size": True}, TypeError, "min_group_size.*True"),
        ({"target_group_size": 2, "min_group_size": 3}, ValueError, "min_group_size=3 exceeds target_group_size=2"),
        ({"initial_group_bits": "012"}, ValueError, "initial_group_bits.*'012'"),
        ({"initial_group_bits": 1}, TypeError, "initial_group_bits.*1"),
        ({"min_matchmaking_time": 0}, ValueError, "min_matchmaking_time.*0"),
        ({"min_matchmaking_time": float("inf")}, ValueError, "min_matchmaking_time.*inf"),
        ({"request_timeout": -1.0}, ValueError, "request_timeout.*-1.0"),
        ({"request_timeout": "3"}, TypeError, "request_timeout.*'3'"),
        ({"averaging_alpha": float("nan")}, ValueError, "averaging_alpha.*nan"),
        ({"part_size_bytes": 10}, ValueError, "part_size_bytes.*10"),
        ({"allreduce_timeout": 0.0}, ValueError, "allreduce_timeout.*0.0"),
        ({"sender_timeout": 5.0, "reducer_timeout": 5.0}, ValueError, "reducer_timeout=5 must exceed sender_timeout=5"),
        ({"next_chunk_timeout": 5.0, "reducer_timeout": 4.0}, ValueError, "reducer_timeout=4 must exceed sender_timeout=5"),
        ({"bandwidth": -1.0}, ValueError, "bandwidth.*-1.0"),
        ({"bandwidth": float("inf")}, ValueError, "bandwidth.*inf"),
        ({"bandwidth": "fast"}, TypeError, "bandwidth.*'fast'"),
        ({"min_vector_size": -1}, ValueError, "min_vector_size.*-1"),
        ({"nonfinite": "drop"}, ValueError, "nonfinite must be 'reject' or 'allow', got 'drop'"),
        ({"nonfinite": True}, ValueError, "nonfinite.*True"),
        ({"client_mode": 1}, TypeError, "client_mode.*1"),
        ({"client_mode": True, "auxiliary": True}, ValueError, "auxiliary=True excludes client_mode=True"),
        ({"shutdown_timeout": 0}, ValueError, "shutdown_timeout.*0"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        AveragerConfig(**{"prefix": "run", **arguments})


def test_timeouts_follow_from_each_other():
    assert AveragerConfig(prefix="run", sender_timeout=4.0).reducer_patience == 8.0
    assert AveragerConfig(prefix="run", next_chunk_timeout=3.0).sender_patience == 3.0
    assert AveragerConfig(prefix="run", reducer_timeout=3.0).sender_patience == 1.5
    default = AveragerConfig(prefix="run")
    assert default.sender_patience is None
    assert default.reducer_patience is None


def test_warnings_for_legal_but_doubtful_values():
    with pytest.warns(UserWarning, match=r"request_timeout=6 is not below min_matchmaking_time=5"):
        AveragerConfig(prefix="run", request_timeout=6.0)
    with pytest.warns(UserWarning, match="target_group_size=3 is not a power of two"):
        AveragerConfig(prefix="run", target_group_size=3, initial_group_bits="01")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AveragerConfig(prefix="run", target_group_size=3)
