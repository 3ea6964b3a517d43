"""The blocking API in careless hands: steps within steps, forks at bad moments, things closed in the wrong order."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import pytest
import torch

from swarmavg.errors import BlockingCallError, ClosedError, ForkedError
from swarmavg.sync import Averager, Peer, TrainingStateAverager

posix_only = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")


def weight_of_ones() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    return weight


def trained(peer: Peer, weight: torch.Tensor) -> TrainingStateAverager:
    return TrainingStateAverager(peer=peer, prefix="train", optimizer=torch.optim.SGD([weight], lr=1.0))


@contextmanager
def loopback() -> Iterator[Peer]:
    with Peer(listen=["tcp://127.0.0.1:0"]) as peer:
        yield peer


def in_a_child(function: Callable[[], int]) -> int:
    """The status of a forked child that runs `function`; one that hangs dies of SIGALRM."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(function())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@posix_only
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_another_threads_step_is_refused_and_does_not_hang() -> None:
    begun = threading.Event()
    with loopback() as peer, trained(peer, weight_of_ones()) as averager:
        averager.optimizer.register_step_post_hook(lambda *_: begun.set())

        def step() -> None:
            with pytest.raises(ClosedError):
                averager.step(optimizer_step=True, averaging_round=True, averaging_opts={"timeout": math.inf})

        thread = threading.Thread(target=step)
        thread.start()
        assert begun.wait(60)

        def use() -> int:
            with pytest.raises(ForkedError):
                averager.step()
            return 7

        assert in_a_child(use) == 7
        averager.close()
        thread.join(60)
        assert not thread.is_alive()


@posix_only
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_forked_while_tensors_are_held_leaves_the_block_in_silence() -> None:
    with loopback() as peer, Averager([torch.ones(3)], peer=peer, prefix="held") as averager:

        def leave() -> int:
            block.close()
            return 7

        def hold() -> Generator[None, None, None]:
            with averager.get_tensors():
                yield

        block = hold()
        next(block)
        assert in_a_child(leave) == 7
        next(block, None)
        with averager.get_tensors() as tensors:
            assert tensors[0].tolist() == [1.0, 1.0, 1.0]


def test_a_step_within_a_step_is_an_error_instead_of_a_deadlock() -> None:
    with loopback() as peer:
        averager = trained(peer, weight_of_ones())

        def step_again(*_: object) -> None:
            averager.step(zero_grad=True)

        averager.optimizer.register_step_post_hook(step_again)
        with averager:
            with pytest.raises(BlockingCallError, match="within a step"):
                averager.step(optimizer_step=True)
            averager.step(zero_grad=True)


def test_nothing_is_trained_once_the_peer_is_closed() -> None:
    weight = weight_of_ones()
    peer = Peer(listen=["tcp://127.0.0.1:0"]).start()
    averager = trained(peer, weight).start()
    peer.close()
    with pytest.raises(ClosedError, match="peer of this averager"):
        averager.step(optimizer_step=True, averaging_round=True)
    assert weight.tolist() == [1.0] * 4
    averager.close()
    peer.close()


def test_a_bad_schedule_is_refused_before_the_optimizer_steps() -> None:
    weight = weight_of_ones()
    with loopback() as peer, trained(peer, weight) as averager, pytest.raises(ValueError, match="over a year ahead"):
        averager.step(optimizer_step=True, averaging_round=True, averaging_opts={"scheduled_time": 1e12})
    assert weight.tolist() == [1.0] * 4
