"""A learning-rate schedule that follows the epoch, by a counter of ours: no private attribute of the scheduler is read."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swarmavg.training.optimizer_setup import required_arguments
from swarmavg.training.settings import SchedulerFactory


def set_up_scheduler(scheduler: LRScheduler | SchedulerFactory | None, optimizer: Optimizer) -> LRScheduler | None:
    """Make or adopt the scheduler. Raises `ValueError` or `TypeError` for one that cannot follow the epoch of `optimizer`."""
    if scheduler is None:
        return None
    made = scheduler if isinstance(scheduler, LRScheduler) else scheduler(optimizer)
    if not isinstance(made, LRScheduler):
        raise TypeError(f"scheduler must return an LR scheduler when called with the optimizer, got {made!r}")
    if needed := required_arguments(type(made).step):
        raise ValueError(
            f"scheduler {type(made).__name__} cannot be used: its step needs {', '.join(needed)}, and the schedule here "
            "follows the epoch alone"
        )
    if made.optimizer is not optimizer:
        raise ValueError(f"scheduler {type(made).__name__} is bound to another optimizer than the one given as optimizer")
    return made


class EpochSchedule:
    """Steps the scheduler once per epoch, as many times as it is behind. Never backwards."""

    def __init__(self, scheduler: LRScheduler | None) -> None:
        self._scheduler = scheduler
        self.epoch = 0
        """The epoch that the learning rate belongs to."""

    def catch_up(self, epoch: int) -> None:
        while self.epoch < epoch:
            if self._scheduler is None:
                self.epoch = epoch
                return
            self._scheduler.step()
            self.epoch += 1
