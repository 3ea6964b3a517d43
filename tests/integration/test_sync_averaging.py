"""The blocking API against itself: several peers of one process, each driven by a thread of its own, over real sockets."""

from __future__ import annotations

import concurrent.futures
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from swarmavg.control import AveragingStage, StepResult
from swarmavg.errors import AllreduceError, BlockingCallError, ClosedError, MatchmakingError, SwarmError
from swarmavg.sync import Averager, Peer, StepControl, TrainingStateAverager

LOOPBACK = ["tcp://127.0.0.1:0"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "swarmavg-sync"]


@contextmanager
def two_averagers() -> Iterator[tuple[Averager, Averager]]:
    with (
        Peer(listen=LOOPBACK) as first,
        Peer(listen=LOOPBACK, bootstrap=first.addresses) as second,
        Averager([torch.zeros(1000)], peer=first, prefix="run", target_group_size=2) as zeros,
        Averager([torch.ones(1000)], peer=second, prefix="run", target_group_size=2) as ones,
    ):
        yield zeros, ones


def values(averager: Averager) -> set[float]:
    with averager.get_tensors() as tensors:
        return {value for tensor in tensors for value in tensor.tolist()}


def together(*calls: Callable[[], StepResult]) -> list[StepResult]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


def test_two_threads_average() -> None:
    with two_averagers() as (zeros, ones):
        results = together(
            lambda: zeros.step(gather="z", timeout=30), lambda: ones.step(gather={"loss": 1}, weight=3.0, timeout=30)
        )
        for result in results:
            assert dict(result) == {zeros.peer_id: "z", ones.peer_id: {"loss": 1}}
        assert values(zeros) == values(ones) == {0.75}
        assert zeros.peer.status()["peers"] == [str(ones.peer_id)]


def test_a_step_in_the_background_is_steered_through_its_control() -> None:
    with two_averagers() as (zeros, ones):
        control = zeros.step(wait=False, require_trigger=True, timeout=60)
        other = ones.step(wait=False, timeout=60)
        assert isinstance(control, StepControl)
        wait_for(lambda: control.stage is AveragingStage.AWAITING_TRIGGER)
        with pytest.raises(TimeoutError):
            control.result(0.01)
        assert not control.triggered
        assert not control.done()
        assert not control.began_allreduce
        assert control.deadline < math.inf
        assert control.scheduled_time is None
        control.weight = 3
        assert control.weight == 3
        control.allow_allreduce()
        with pytest.warns(UserWarning, match="triggered before"):
            control.allow_allreduce()
        assert control.result(60).group_size == 2
        assert other.result().group_size == 2
        assert values(zeros) == {0.25}
        assert control.progress == 1
    assert control.done()  # also after the worker has ended
    assert not control.cancelled()
    assert control.stage is AveragingStage.FINISHED
    assert control.result().group_size == 2


def test_a_cancelled_step_tells_its_group() -> None:
    with two_averagers() as (zeros, ones):
        control = zeros.step(wait=False, require_trigger=True, timeout=60)
        other = ones.step(wait=False, timeout=60, allow_retries=False)
        wait_for(lambda: control.stage is AveragingStage.AWAITING_TRIGGER)
        assert control.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            control.result(30)
        assert control.cancelled()
        with pytest.raises(AllreduceError):
            other.result(30)
        assert values(zeros) == {0.0}
        assert values(ones) == {1.0}


def test_an_interrupt_in_result_cancels_the_step() -> None:
    with two_averagers() as (zeros, _):
        control = zeros.step(wait=False, timeout=math.inf)
        interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            control.result()
        interrupt.join()
        assert control.cancelled()


def test_a_lone_step_fails_with_its_own_error() -> None:
    with two_averagers() as (zeros, _):
        with pytest.raises(MatchmakingError):
            zeros.step(timeout=0.2)
        with pytest.raises(ValueError, match="timeout"):
            zeros.step(timeout=-1)
        with pytest.raises(ValueError, match="require_trigger"):
            zeros.step(require_trigger=True)


def test_closing_ends_a_step_of_another_thread() -> None:
    with two_averagers() as (zeros, _), concurrent.futures.ThreadPoolExecutor(1) as pool:
        control = zeros.step(wait=False, timeout=math.inf)
        waiting = pool.submit(control.result)
        wait_for(lambda: control.stage is not AveragingStage.IDLE)
        zeros.close()
        with pytest.raises((SwarmError, concurrent.futures.CancelledError)):
            waiting.result(30)
        with pytest.raises(ClosedError):
            zeros.step()


def test_tensors_are_held_while_a_round_waits() -> None:
    with two_averagers() as (zeros, ones):
        with zeros.get_tensors() as tensors:
            control = zeros.step(wait=False, timeout=60)
            other = ones.step(wait=False, timeout=60)
            with pytest.raises(TimeoutError):
                control.result(0.2)
            for call in (zeros.step, lambda: zeros.get_tensors().__enter__()):
                with pytest.raises(BlockingCallError, match="inside get_tensors"):
                    call()
            assert not tensors[0].any()
        assert control.result(60).fraction == 1
        assert other.result(60).fraction == 1
        with pytest.raises(ZeroDivisionError), zeros.get_tensors():
            raise ZeroDivisionError
        assert values(zeros) == {0.5}


def test_an_untriggered_control_that_is_lost_warns() -> None:
    with two_averagers() as (zeros, _):
        control = zeros.step(wait=False, require_trigger=True, timeout=60)
        zeros.get_group_bits()  # the loop has left the call behind
        with pytest.warns(ResourceWarning, match="dropped before allow_allreduce"):
            del control


def test_group_bits_and_names() -> None:
    with two_averagers() as (zeros, ones):
        zeros.set_group_bits("01")
        assert zeros.get_group_bits() == "01"
        assert (zeros.prefix, zeros.mode, zeros.total_size) == ("run", "node", 1000)
        assert zeros.schema_hash == ones.schema_hash
        assert zeros.peer_id == zeros.peer.id
        assert zeros.config.target_group_size == 2


def test_the_state_download_is_not_there_yet() -> None:
    with two_averagers() as (zeros, _):
        with pytest.raises(NotImplementedError):
            zeros.load_state(timeout=1)
        with pytest.raises(NotImplementedError):
            zeros.load_state(wait=False).result(30)


def test_an_averager_needs_a_blocking_peer_that_runs() -> None:
    with pytest.raises(TypeError, match=r"peer must be a swarmavg\.sync\.Peer, got 'tcp"):
        Averager([torch.zeros(1)], peer="tcp://127.0.0.1:1", prefix="run")  # type: ignore[arg-type]
    peer = Peer(listen=LOOPBACK)
    averager = Averager([torch.zeros(1)], peer=peer, prefix="run")
    with pytest.raises(ClosedError, match="not running"):
        averager.start()
    with peer, averager:
        assert averager.peer_id == peer.id


def test_training_touches_the_model_in_the_calling_thread_alone() -> None:
    touched: set[int] = set()

    class Recording(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            touched.add(threading.get_ident())
            super().step()

    def train(peer: Peer, start: float) -> tuple[list[float], int]:
        weight = torch.nn.Parameter(torch.full((10,), start))
        with TrainingStateAverager(
            peer=peer, prefix="train", optimizer=Recording([weight], lr=1.0), target_group_size=2
        ) as averager:
            for delay in (False, True):
                weight.grad = torch.ones(10)
                averager.step(
                    increment_epoch=True,
                    optimizer_step=True,
                    zero_grad=True,
                    averaging_round=True,
                    delay_averaging=delay,
                    averaging_opts={"timeout": 60},
                )
            result = averager.step(wait_for_delayed_update=True)
            assert result is not None
            assert set(result.epochs.values()) == {2}
            mine = touched & {threading.get_ident()}
            assert mine
            return weight.tolist(), averager.local_epoch

    with (
        Peer(listen=LOOPBACK) as first,
        Peer(listen=LOOPBACK, bootstrap=first.addresses) as second,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        threads = [pool.submit(train, first, 0.0), pool.submit(train, second, 4.0)]
        assert [thread.result(100) for thread in threads] == [([0.0] * 10, 2), ([0.0] * 10, 2)]
    assert len(touched) == 2


def test_training_after_close_and_with_a_pending_round() -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    with Peer(listen=LOOPBACK) as peer:
        averager = TrainingStateAverager(peer=peer, prefix="train", optimizer=torch.optim.SGD([weight], lr=1.0))
        with pytest.raises(ClosedError, match="has not been started"):
            averager.step()
        with averager:
            averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": math.inf})
        averager.close()
        with pytest.raises(ClosedError):
            averager.step()


def test_an_interrupt_while_a_delayed_round_is_waited_for_leaves_it_running() -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    with (
        Peer(listen=LOOPBACK) as peer,
        TrainingStateAverager(peer=peer, prefix="train", optimizer=torch.optim.SGD([weight], lr=1.0)) as averager,
    ):
        averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": 1.5})
        interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            averager.step(wait_for_delayed_update=True)
        interrupt.join()
        assert averager.step(wait_for_delayed_update=True) is None  # it failed for want of peers, as a warning
