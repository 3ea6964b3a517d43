"""One run of the demo: start the children, introduce the peers to each other, pass on what they report, collect results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmavg.cli.demo.children import Child, ChildFailedError, family
from swarmavg.cli.demo.messages import FromChild, Join, Listening, Ready, Setup, TrainedAlone, TrainedTogether
from swarmavg.security.tokens import generate_token

Listener = Callable[[int, FromChild], None]
"""Called with the number of a child and what it reports. The child that trains on everything has the number after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    peers: int
    steps: int
    seed: int
    scheme: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOutcome:
    """Accuracies are fractions of the held-out examples; `digest` is the sha256 of the parameters at the end."""

    alone: float
    together: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    peers: Sequence[PeerOutcome]
    everything: float
    """Accuracy of one process that trained on all data."""
    parameters: int


async def conduct(plan: Plan, listener: Listener) -> Outcome:
    """Run the demo to its end. Raises `ChildFailedError` for the first child that fails; no child survives this call."""
    token = generate_token()
    numbers: list[int | None] = [*range(plan.peers), None]
    setups = [_setup(plan, number, token) for number in numbers]
    async with family(setups) as children:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_follow(number, children, listener)) for number in range(len(children))]
        except* ChildFailedError as failures:
            raise failures.exceptions[0] from None
        return _outcome([task.result() for task in tasks], children)


def _setup(plan: Plan, peer: int | None, token: str) -> tuple[str, Setup]:
    name = "the process on all data" if peer is None else f"peer {peer}"
    return name, Setup(peer=peer, peers=plan.peers, steps=plan.steps, seed=plan.seed, scheme=plan.scheme, token=token)


@dataclass(slots=True)
class _Story:
    """What one child has said of itself."""

    parameters: int | None = None
    alone: float | None = None
    together: TrainedTogether | None = None


async def _follow(number: int, children: Sequence[Child], listener: Listener) -> _Story:
    """Pass on the messages of one child until it ends."""
    story = _Story()
    async for message in children[number].messages():
        listener(number, message)
        match message:
            case Ready():
                story.parameters = message.parameters
            case Listening():
                for other in children[1:-1]:
                    await other.send(Join(bootstrap=[message.address]))
            case TrainedAlone():
                story.alone = message.accuracy
            case TrainedTogether():
                story.together = message
    return story


def _outcome(stories: Sequence[_Story], children: Sequence[Child]) -> Outcome:
    """Put the stories of all children together; raises `ChildFailedError` for one that broke off."""
    peers: list[PeerOutcome] = []
    for story, child in zip(stories[:-1], children[:-1], strict=True):
        if story.alone is None or story.together is None:
            raise child.failure("ended without a result")
        peers.append(PeerOutcome(alone=story.alone, together=story.together.accuracy, digest=story.together.digest))
    reference, child = stories[-1], children[-1]
    if reference.alone is None or reference.parameters is None:
        raise child.failure("ended without a result")
    return Outcome(peers=peers, everything=reference.alone, parameters=reference.parameters)
