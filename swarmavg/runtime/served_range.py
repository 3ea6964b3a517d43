"""What this member reduces: its range of the plan, or parts that it took over. One channel per contributor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from swarmavg.reduction.reducer import RangeReducer
from swarmavg.runtime.reducer_link import ReducerLink
from swarmavg.runtime.round_link import ANOTHER_TERM, LinkFailedError
from swarmavg.transport.interface import Channel

if TYPE_CHECKING:
    from swarmavg.runtime.exchange import Exchange


class ServedRange:
    """Takes inputs, finishes parts, gives results to the contributors and to this member itself."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        job: int | None,
        numbers: Sequence[int],
        contributors: Sequence[int],
        memory: torch.Tensor,
    ) -> None:
        self._exchange = exchange
        self.job = job
        self._numbers = numbers
        parts = [exchange.ledger.parts[number] for number in numbers]
        self.reducer = RangeReducer(exchange.layout, parts, contributors, memory, reject_nonfinite=exchange.reject_nonfinite)
        self.links: dict[int, ReducerLink] = {}
        self._own = exchange.position in contributors
        self._awaited = {position for position in contributors if position != exchange.position}
        self._since = asyncio.get_running_loop().time()
        self._handed_out = 0
        self._over = False

    def start(self, weight: float) -> None:
        """The own weight is final: add the own inputs."""
        if self._own:
            self._exchange.spawn(self._add_own(weight), "round-own-range")

    async def serve(self, channel: Channel, contributor: int) -> None:
        """Handle a contributor's channel until its end; refused if nothing is expected from it."""
        if self._over:
            channel.abort("this term is over", code=ANOTHER_TERM)
            return
        if contributor not in self._awaited:
            channel.abort(
                "this contributor has a channel already, is excluded, or has nothing to send here", code="not-expected"
            )
            return
        self._awaited.discard(contributor)
        link = self.links[contributor] = ReducerLink(self._exchange, self, contributor)
        failure: LinkFailedError | None = None
        try:
            await link.run(channel)
            self._exchange.acknowledged(self.job, contributor)
        except LinkFailedError as error:
            failure = error
        finally:
            self.links.pop(contributor, None)
            self._exclude(contributor)  # nothing more will come from it
        if failure is not None and not self._over:
            self._exchange.link_failed(link.id, contributor, failure)

    def drop(self, contributor: int, failure: LinkFailedError, code: str = "") -> None:
        """Wait for this contributor no longer, and end its channel."""
        self._awaited.discard(contributor)
        link = self.links.get(contributor)
        if link is not None:
            link.give_up(failure, code)
        self._exclude(contributor)

    def end(self, failure: LinkFailedError) -> None:
        """A newer term replaces this job."""
        self._over = True
        for link in self.links.values():
            link.give_up(failure, ANOTHER_TERM)

    def forgive(self, lag: float) -> None:
        """The own process stood still for so long."""
        self._since += lag

    def missing_channels(self, now: float, patience: float) -> list[int]:
        """Contributors that should have opened their channel by now. Each is named once, and waited for no longer."""
        if self._over or now - self._since <= patience:
            return []
        late = sorted(self._awaited)
        for contributor in late:
            self._awaited.discard(contributor)
            self._exclude(contributor)
        return late

    def results_may_have_come(self) -> None:
        """The reducer has been given something: hand out what is finished now."""
        finished = len(self.reducer.results)
        if finished == self._handed_out or self._over:
            return
        for index in range(self._handed_out, finished):
            result = self.reducer.results[index]
            if self._own:
                self._exchange.store.accept_result(self._numbers[index], result.contributors, result.payload)
        self._handed_out = finished
        for link in self.links.values():
            link.pulse.news()

    def _exclude(self, contributor: int) -> None:
        self.reducer.exclude(contributor)
        self.results_may_have_come()

    async def _add_own(self, weight: float) -> None:
        self.reducer.begin(self._exchange.position, weight)
        for index, number in enumerate(self._numbers if weight > 0 else ()):
            if self._over:
                return
            self.reducer.add(self._exchange.position, index, self._exchange.store.encoded(number))
            self.results_may_have_come()
            await asyncio.sleep(0)
        self.results_may_have_come()
