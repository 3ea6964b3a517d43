"""A step that runs in the background, for code without an event loop."""

from __future__ import annotations

from swarmavg import control as core
from swarmavg.control import AveragingStage, StepResult
from swarmavg.sync.call import Call
from swarmavg.sync.resident import mirrors
from swarmavg.sync.worker import Worker


@mirrors(core.StepControl)
class StepControl:
    """A step that runs in the background: `result` waits for its `StepResult`.

    Until the all-reduce begins, `weight` and `scheduled_time` may be set; later that warns and changes nothing.
    """

    def __init__(self, worker: Worker, control: core.StepControl) -> None:
        self._worker = worker
        self._control = control
        self._outcome: Call[StepResult] | None = None

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step's result, or raise the step's exception.

        Raises:
            TimeoutError: it is not there after `timeout` seconds; the step goes on.
            concurrent.futures.CancelledError: the step was cancelled.
        An interrupt such as Ctrl-C cancels the step.
        """
        outcome = self._watch()
        try:
            finished = outcome.wait(timeout)
        except BaseException:
            self._worker.peek(self._control.cancel)
            self._worker.give_up(outcome)
            raise
        if not finished:
            raise TimeoutError(f"the step has not ended within {timeout} s: {self!r}")
        return outcome.result()

    @property
    def stage(self) -> AveragingStage:
        return self._worker.peek(lambda: self._control.stage)

    @property
    def deadline(self) -> float:
        return self._control.deadline

    @property
    def began_allreduce(self) -> bool:
        return self._worker.peek(lambda: self._control.began_allreduce)

    @property
    def progress(self) -> float:
        return self._worker.peek(lambda: self._control.progress)

    @property
    def weight(self) -> float:
        return self._worker.peek(lambda: self._control.weight)

    @weight.setter
    def weight(self, weight: float) -> None:
        self._worker.peek(lambda: setattr(self._control, "weight", weight))

    @property
    def scheduled_time(self) -> float | None:
        return self._worker.peek(lambda: self._control.scheduled_time)

    @scheduled_time.setter
    def scheduled_time(self, moment: float | None) -> None:
        self._worker.peek(lambda: setattr(self._control, "scheduled_time", moment))

    @property
    def triggered(self) -> bool:
        return self._worker.peek(lambda: self._control.triggered)

    def allow_allreduce(self) -> None:
        self._worker.peek(self._control.allow_allreduce)

    def cancel(self) -> bool:
        return self._worker.peek(self._control.cancel)

    def cancelled(self) -> bool:
        return self._worker.peek(self._control.cancelled)

    def done(self) -> bool:
        return self._worker.peek(self._control.done)

    def __repr__(self) -> str:
        return repr(self._control)

    def _watch(self) -> Call[StepResult]:
        """Made only when somebody waits: it keeps the step's control alive, whose loss is worth a warning before."""
        if self._outcome is None:
            self._outcome = self._worker.submit(self._await)
        return self._outcome

    async def _await(self) -> StepResult:
        return await self._control
