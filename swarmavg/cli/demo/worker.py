"""One child of the demo, started as ``python -m swarmavg.cli.demo.worker``: trains alone first, then with the swarm.

The child without a number trains alone only, on everything, for comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

import swarmavg.sync
from swarmavg.cli.demo.data import CLASSES, BatchStream, home_digits, load_split, share_of
from swarmavg.cli.demo.messages import Join, Listening, Progress, Ready, Setup, TrainedAlone, TrainedTogether
from swarmavg.cli.demo.model import accuracy, backward, build_model, build_optimizer, digest, parameter_count
from swarmavg.cli.demo.parent_pipe import ParentPipe
from swarmavg.control import StepResult

BATCH_SIZE = 32
STEPS_PER_ROUND = 5
# Bounds the wait for a peer that got less of the processor. The parent ends everything when a peer dies.
_ROUND_TIMEOUT = 120.0

Report = Callable[[Progress], None]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)  # the peers share the machine's cores
    parent = ParentPipe()
    setup = parent.read(Setup)
    trainer = Trainer(setup, parent.tell)
    parent.tell(trainer.ready())
    parent.tell(TrainedAlone(accuracy=trainer.train_alone()))
    if setup.peer is not None:
        bootstrap = list(parent.read(Join).bootstrap) if setup.peer > 0 else []
        listen = [f"{setup.scheme}://127.0.0.1:0"]
        with swarmavg.sync.Peer(listen=listen, bootstrap=bootstrap, token=setup.token) as peer:
            if setup.peer == 0:
                parent.tell(Listening(address=str(peer.addresses[0])))
            parent.tell(trainer.train_together(peer))


class Trainer:
    """Trains the demo's model from the same start on the same batches, once alone and once in the swarm."""

    def __init__(self, setup: Setup, report: Report) -> None:
        self._setup = setup
        self._report = report
        everything, self._held_out = load_split(setup.seed)
        self._steps_per_epoch = max(1, len(everything) // (BATCH_SIZE * setup.peers))  # of the whole swarm over all data
        if setup.peer is None:
            self._examples, self._batch_size, self._digits = everything, BATCH_SIZE * setup.peers, list(range(CLASSES))
        else:
            self._examples = share_of(everything, setup.peer, setup.peers, setup.seed)
            self._batch_size, self._digits = BATCH_SIZE, home_digits(setup.peer, setup.peers)

    def ready(self) -> Ready:
        parameters = parameter_count(build_model(self._setup.seed))
        return Ready(examples=len(self._examples), digits=self._digits, parameters=parameters)

    def train_alone(self) -> float:
        """Train on this child's own examples; returns the accuracy on the held-out ones."""
        model, batches = self._fresh_start()
        optimizer = build_optimizer(model)
        for step in range(1, self._setup.steps + 1):
            loss = backward(model, batches.draw())
            optimizer.step()
            optimizer.zero_grad()
            if self._is_round(step):
                self._report(self._progress(model, step, step // self._steps_per_epoch, loss))
        return accuracy(model, self._held_out)

    def train_together(self, peer: swarmavg.sync.Peer) -> TrainedTogether:
        """The same, but average with all other peers after every few steps, the last one included."""
        model, batches = self._fresh_start()
        with swarmavg.sync.TrainingStateAverager(
            peer=peer,
            optimizer=build_optimizer(model),
            prefix="demo",
            target_group_size=self._setup.peers,
            min_group_size=self._setup.peers,
            on_averaging_failure="raise",
        ) as averager:
            for step in range(1, self._setup.steps + 1):
                loss = backward(model, batches.draw())
                meet = self._is_round(step)
                result = averager.step(
                    increment_epoch=step % self._steps_per_epoch == 0,
                    optimizer_step=True,
                    zero_grad=True,
                    averaging_round=meet,
                    averaging_opts={"timeout": _ROUND_TIMEOUT} if meet else None,
                )
                if result is not None:
                    self._report(self._progress(model, step, averager.local_epoch, loss, result))
        return TrainedTogether(accuracy=accuracy(model, self._held_out), digest=digest(model))

    def _fresh_start(self) -> tuple[nn.Module, BatchStream]:
        seed = self._setup.seed
        stream = (seed << 8) + (self._setup.peers if self._setup.peer is None else self._setup.peer)
        return build_model(seed), BatchStream(self._examples, self._batch_size, stream)

    def _is_round(self, step: int) -> bool:
        return step % STEPS_PER_ROUND == 0 or step == self._setup.steps

    def _progress(self, model: nn.Module, step: int, epoch: int, loss: float, result: StepResult | None = None) -> Progress:
        return Progress(
            step=step,
            epoch=epoch,
            loss=loss,
            accuracy=accuracy(model, self._held_out),
            group=result.group_size if result else None,
            megabytes_per_second=_rate(result) if result else None,
        )


def _rate(result: StepResult) -> float:
    """Payload sent and received by this peer, in 10^6 bytes per second of the all-reduce."""
    return (result.bytes_sent + result.bytes_received) / 1e6 / max(result.allreduce_seconds, 1e-6)


if __name__ == "__main__":
    main()
