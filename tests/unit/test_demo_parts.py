"""The pure parts of the demo: shares, messages, rows and the verdict."""

from __future__ import annotations

import pytest
import torch

from swarmavg.cli.demo import verdict
from swarmavg.cli.demo.data import CLASSES, BatchStream, Examples, home_digits, load_split, share_of
from swarmavg.cli.demo.messages import Join, Progress, Ready, Setup, TrainedAlone, TrainedTogether, decode, encode
from swarmavg.cli.demo.model import accuracy, build_model, digest, parameter_count
from swarmavg.cli.demo.session import Outcome, PeerOutcome
from swarmavg.cli.demo.table import COLUMNS, Row


def rows_of(examples: Examples) -> list[tuple[float, ...]]:
    return sorted(tuple(row) for row in torch.column_stack([examples.inputs, examples.labels]).tolist())


@pytest.mark.parametrize("peers", [2, 3, 4, 7, 10, 13])
def test_shares_are_disjoint_complete_and_skewed(peers: int) -> None:
    training, _ = load_split(seed=5)
    shares = [share_of(training, peer, peers, seed=5) for peer in range(peers)]
    assert sorted(row for share in shares for row in rows_of(share)) == rows_of(training)
    for peer, share in enumerate(shares):
        at_home = torch.isin(share.labels, torch.tensor(home_digits(peer, peers)))
        assert at_home.float().mean() > 0.9
    assert {digit for peer in range(peers) for digit in home_digits(peer, peers)} == set(range(CLASSES))


def test_held_out_examples_are_not_trained_on() -> None:
    training, held_out = load_split(seed=1)
    assert len(training) + len(held_out) == 1797
    assert rows_of(training) != rows_of(load_split(seed=2)[0])
    assert set(held_out.labels.tolist()) == set(range(CLASSES))


def test_the_same_seed_gives_the_same_model_shares_and_batches() -> None:
    training, _ = load_split(seed=3)
    first, second = (BatchStream(training, 8, seed=9) for _ in range(2))
    for _ in range(3):
        assert torch.equal(first.draw().inputs, second.draw().inputs)
    assert digest(build_model(4)) == digest(build_model(4)) != digest(build_model(5))
    assert rows_of(share_of(training, 1, 4, seed=0)) == rows_of(share_of(training, 1, 4, seed=0))


def test_building_a_model_leaves_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    build_model(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_is_large_enough_to_move_real_data() -> None:
    assert parameter_count(build_model(0)) >= 2_000_000


def test_digest_tells_one_changed_bit() -> None:
    model = build_model(0)
    before = digest(model)
    with torch.no_grad():
        last = list(model.parameters())[-1]
        last[3] = torch.nextafter(last[3], torch.tensor(1e9))
    assert digest(model) != before


def test_accuracy_is_the_fraction_of_right_answers() -> None:
    examples = Examples(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    assert accuracy(torch.nn.Identity(), examples) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "message",
    [
        Setup(peer=None, peers=4, steps=10, seed=0, scheme="tcp", token="t"),
        Join(bootstrap=["tcp://x@127.0.0.1:1"]),
        Progress(step=5, epoch=1, loss=0.5, accuracy=0.25, group=4, megabytes_per_second=10.0),
        TrainedTogether(accuracy=0.9, digest="ab"),
    ],
)
def test_messages_survive_the_pipe(message: Setup | Join | Progress | TrainedTogether) -> None:
    line = encode(message)
    assert "\n" not in line
    assert decode(line) == message


@pytest.mark.parametrize(
    "line", ["", "hello", "[]", "1", "{}", '{"kind": "Nothing"}', '{"kind": "Join"}', '{"kind": "Join", "x": 1}']
)
def test_other_lines_are_refused_and_quoted(line: str) -> None:
    with pytest.raises(ValueError, match="not a message of the demo") as caught:
        decode(line)
    assert repr(line) in str(caught.value)


def outcome(*peers: tuple[float, float, str], everything: float = 0.97) -> Outcome:
    return Outcome(
        peers=[PeerOutcome(alone=alone, together=together, digest=digest) for alone, together, digest in peers],
        everything=everything,
        parameters=2_000_000,
    )


def test_verdict_passes_when_all_agree_and_averaging_pays() -> None:
    good = outcome((0.3, 0.95, "aa"), (0.4, 0.95, "aa"))
    assert verdict.failures(good) == []
    assert "identical parameters" in verdict.praise(good)
    assert "97.0%" in "\n".join(verdict.summary(good))


def test_verdict_names_the_peers_that_differ() -> None:
    (reason,) = verdict.failures(outcome((0.3, 0.95, "aa"), (0.4, 0.95, "bb")))
    assert "peer 0 aa" in reason
    assert "peer 1 bb" in reason


def test_verdict_counts_the_worst_averaged_against_the_best_lone_model() -> None:
    (reason,) = verdict.failures(outcome((0.30, 0.95, "aa"), (0.50, 0.59, "aa")))
    assert "59.0%" in reason
    assert "50.0%" in reason
    assert verdict.failures(outcome((0.3, 0.95, "aa"), (0.50, 0.61, "aa"))) == []


def test_row_follows_a_peer_through_its_stages() -> None:
    row = Row("peer 0")
    seen = []
    for message in (
        Ready(examples=300, digits=[0, 4], parameters=1),
        Progress(step=5, epoch=0, loss=1.0, accuracy=0.2),
        TrainedAlone(accuracy=0.3),
        Progress(step=5, epoch=1, loss=0.5, accuracy=0.8, group=4, megabytes_per_second=12.3),
        TrainedTogether(accuracy=0.9, digest="ab"),
    ):
        row.take(message)
        seen.append(row.stage)
    assert seen == ["alone", "alone", "joining", "together", "done"]
    assert dict(zip(COLUMNS, row.cells(200), strict=True)) == {
        "": "peer 0",
        "digits": "04",
        "stage": "done",
        "step": "5/200",
        "epoch": "1",
        "loss": "0.500",
        "group": "4",
        "MB/s": "12.3",
        "accuracy": "90.0%",
        "alone": "30.0%",
    }


def test_row_of_the_process_on_all_data_is_done_when_it_has_trained_alone() -> None:
    row = Row("all data", joins=False)
    row.take(TrainedAlone(accuracy=0.97))
    assert row.stage == "done"
