"""The directory contract on the in-process back end, and what only that one does."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from swarmavg.discovery.memory import SharedDirectory
from swarmavg.errors import DirectoryError
from swarmavg.identifiers import PeerId
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.contracts.directory import DIRECTORY_CHECKS, Check, Member


@asynccontextmanager
async def connect(count: int) -> AsyncIterator[Sequence[Member]]:
    shared = SharedDirectory()
    ids = [PeerId(bytes([number]) * 32) for number in range(count)]
    members = [Member(peer, shared.directory(peer)) for peer in ids]
    yield members
    for member in members:
        await member.directory.aclose()


@pytest.mark.parametrize("check", DIRECTORY_CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    run_virtual(partial(check, connect))


def test_a_later_member_with_the_same_id_takes_over() -> None:
    async def main() -> None:
        shared, peer = SharedDirectory(), PeerId(b"p" * 32)
        early = shared.directory(peer)
        await early.publish("t", b"early", ttl=9.0)
        late = shared.directory(peer)
        await late.publish("t", b"late", ttl=9.0)
        with pytest.raises(DirectoryError, match="same id"):
            await early.publish("t", b"early again", ttl=9.0)
        await early.aclose()
        assert [record.value for record in await late.fetch("t")] == [b"late"]
        await late.aclose()

    run_virtual(main)


def test_a_reader_that_never_looks_costs_no_memory_for_what_came_and_went() -> None:
    async def main() -> None:
        shared = SharedDirectory()
        reader = shared.directory(PeerId(b"r" * 32))
        async with reader.watch("t") as changes:
            for number in range(100):
                passer_by = shared.directory(PeerId(bytes([number]) * 32))
                await passer_by.publish("t", b"here", ttl=9.0)
                await passer_by.aclose()
            await reader.publish("t", b"own", ttl=9.0)
            assert (await anext(changes)).owner == reader.owner, "and is shown nothing of it"
        await reader.aclose()

    run_virtual(main)
