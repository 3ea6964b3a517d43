"""What every `swarmavg.discovery.interface.Directory` must do, as checks to run on an implementation.

Each check is an async function that takes a `Connect` and raises `AssertionError` when the implementation falls short. Nothing
here depends on a test runner; with pytest:

    @pytest.mark.parametrize("check", DIRECTORY_CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        asyncio.run(check(connect))

The checks wait in short sleeps for what must happen in the end, so they run in virtual time as well as in real time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from swarmavg.discovery.interface import MAX_TOPIC_BYTES, MAX_VALUE_BYTES, Change, Directory, Record, Version
from swarmavg.errors import ClosedError
from swarmavg.identifiers import PeerId

PATIENCE: Final = 20.0
"""Seconds in which everybody must have heard of something."""
SHORT_TTL: Final = 1.5
LONG_TTL: Final = 300.0


@dataclass(frozen=True, slots=True)
class Member:
    """One directory of a connected set, and the peer on whose behalf it publishes."""

    id: PeerId
    directory: Directory


Connect: TypeAlias = Callable[[int], AbstractAsyncContextManager[Sequence[Member]]]
"""``connect(n)``: inside the block there are n members of one swarm; at its end they are closed."""

Check: TypeAlias = Callable[[Connect], Coroutine[Any, Any, None]]


async def own_record_is_there_at_once(connect: Connect) -> None:
    async with connect(1) as (member,):
        await member.directory.publish("run.a", b"value", ttl=LONG_TTL)
        (record,) = await member.directory.fetch("run.a")
        assert (record.topic, record.owner, record.value) == ("run.a", member.id, b"value"), record
        assert LONG_TTL - 1 < record.expires_in <= LONG_TTL, record
        assert await member.directory.fetch("run.b") == []


async def every_member_sees_every_record(connect: Connect) -> None:
    async with connect(4) as members:
        for number, member in enumerate(members):
            await member.directory.publish("run.a", b"%d" % number, ttl=LONG_TTL, urgent=number % 2 == 0)
        expected = sorted((member.id, b"%d" % number) for number, member in enumerate(members))
        for member in members:
            records = await _until(member, "run.a", lambda records: len(records) == 4)
            assert [(record.owner, record.value) for record in records] == expected, "sorted by owner, one each"
            assert all(0 < record.expires_in <= LONG_TTL for record in records)


async def the_latest_publication_replaces_the_earlier_ones(connect: Connect) -> None:
    async with connect(3) as (writer, *readers):
        for number in range(5):
            await writer.directory.publish("run.a", b"%d" % number, ttl=LONG_TTL, urgent=True)
        for reader in readers:
            (record,) = await _until(reader, "run.a", lambda records: [r.value for r in records] == [b"4"])
            await writer.directory.publish("run.b", b"later", ttl=LONG_TTL, urgent=True)
            await _until(reader, "run.b", bool)
            (again,) = await reader.directory.fetch("run.a")
            assert again.version == record.version, "an older version does not come back"
        versions = [await _version_of(writer, b"%d" % number) for number in range(3)]
        assert versions == sorted(set(versions)), "versions grow"


async def withdrawing_removes_the_record_for_everybody(connect: Connect) -> None:
    async with connect(3) as members:
        for member in members:
            await member.directory.publish("run.a", b"here", ttl=LONG_TTL, urgent=True)
        for member in members:
            await _until(member, "run.a", lambda records: len(records) == 3)
        await members[0].directory.withdraw("run.a")
        assert members[0].id not in {record.owner for record in await members[0].directory.fetch("run.a")}
        for member in members:
            records = await _until(member, "run.a", lambda records: len(records) == 2)
            assert {record.owner for record in records} == {members[1].id, members[2].id}


async def withdrawing_what_is_not_there_is_no_error(connect: Connect) -> None:
    async with connect(2) as (one, two):
        await two.directory.publish("run.a", b"two's", ttl=LONG_TTL, urgent=True)
        await _until(one, "run.a", bool)
        await one.directory.withdraw("run.a")
        await one.directory.withdraw("run.b")
        assert [record.owner for record in await one.directory.fetch("run.a")] == [two.id], "others' records stay"


async def a_withdrawn_topic_can_be_published_again(connect: Connect) -> None:
    async with connect(2) as (writer, reader):
        for number in range(3):
            await writer.directory.publish("run.a", b"%d" % number, ttl=LONG_TTL, urgent=True)
            await _until(reader, "run.a", partial(_holds_only, b"%d" % number))
            await writer.directory.withdraw("run.a")
            await _until(reader, "run.a", lambda records: not records)


async def a_record_is_gone_when_its_time_is_over(connect: Connect) -> None:
    async with connect(2) as (writer, reader):
        await writer.directory.publish("run.a", b"short", ttl=SHORT_TTL, urgent=True)
        await writer.directory.publish("run.b", b"long", ttl=LONG_TTL, urgent=True)
        await _until(reader, "run.a", bool)
        await asyncio.sleep(2 * SHORT_TTL)
        for member in (writer, reader):
            assert await member.directory.fetch("run.a") == []
            await _until(member, "run.b", bool)


async def publishing_again_keeps_a_record_alive(connect: Connect) -> None:
    async with connect(2) as (writer, reader):
        await writer.directory.publish("run.a", b"short", ttl=SHORT_TTL, urgent=True)
        await _until(reader, "run.a", bool)
        for _ in range(4):
            await writer.directory.publish("run.a", b"short", ttl=SHORT_TTL, urgent=True)
            await asyncio.sleep(SHORT_TTL / 2)
            assert [record.value for record in await reader.directory.fetch("run.a")] == [b"short"]


async def the_largest_topic_and_value_pass(connect: Connect) -> None:
    topic, value = "t" * MAX_TOPIC_BYTES, bytes(range(256)) * (MAX_VALUE_BYTES // 256)
    async with connect(2) as (writer, reader):
        await writer.directory.publish(topic, value, ttl=LONG_TTL, urgent=True)
        await writer.directory.publish("empty", b"", ttl=LONG_TTL, urgent=True)
        (record,) = await _until(reader, topic, bool)
        assert record.value == value
        (record,) = await _until(reader, "empty", bool)
        assert record.value == b""


async def bad_arguments_are_refused_by_name(connect: Connect) -> None:
    async with connect(1) as (member,):
        directory = member.directory
        for topic in ("", "t" * (MAX_TOPIC_BYTES + 1), "ä" * (MAX_TOPIC_BYTES // 2 + 1)):
            await _refused(directory.publish(topic, b"", ttl=1.0), "topic")
            await _refused(directory.fetch(topic), "topic")
        await _refused(directory.publish("t", b"x" * (MAX_VALUE_BYTES + 1), ttl=1.0), "value")
        for ttl in (0.0, -1.0, float("nan"), float("inf")):
            await _refused(directory.publish("t", b"", ttl=ttl), "ttl")
        assert await directory.fetch("t") == []


async def a_watch_shows_what_is_there_and_then_each_change(connect: Connect) -> None:
    async with connect(2) as (writer, reader):
        await writer.directory.publish("run.a", b"1", ttl=LONG_TTL, urgent=True)
        await _until(reader, "run.a", bool)
        async with reader.directory.watch("run.a") as changes:
            await _next_is(changes, writer.id, b"1")
            await writer.directory.publish("run.other", b"not watched", ttl=LONG_TTL, urgent=True)
            await writer.directory.publish("run.a", b"2", ttl=LONG_TTL, urgent=True)
            await _next_is(changes, writer.id, b"2")
            await reader.directory.publish("run.a", b"own", ttl=LONG_TTL)
            await _next_is(changes, reader.id, b"own")
            await writer.directory.withdraw("run.a")
            await _next_is(changes, writer.id, None)
            await writer.directory.publish("run.a", b"3", ttl=SHORT_TTL, urgent=True)
            await _next_is(changes, writer.id, b"3")
            await _next_is(changes, writer.id, None)  # expired


async def a_slow_reader_misses_no_latest_value(connect: Connect) -> None:
    async with connect(3) as (one, two, reader):
        await two.directory.publish("run.a", b"gone", ttl=LONG_TTL, urgent=True)
        await _until(reader, "run.a", bool)
        async with reader.directory.watch("run.a") as changes:
            await _next_is(changes, two.id, b"gone")
            for number in range(20):
                await one.directory.publish("run.a", b"%d" % number, ttl=LONG_TTL, urgent=True)
            await two.directory.withdraw("run.a")
            await _until(reader, "run.a", lambda records: [r.value for r in records] == [b"19"])
            seen: dict[PeerId, bytes | None] = {}
            while seen != {one.id: b"19", two.id: None}:
                change = await _next(changes)
                seen[change.owner] = change.record.value if change.record else None


async def watches_are_independent(connect: Connect) -> None:
    async with connect(1) as (member,):
        directory = member.directory
        async with directory.watch("run.a") as first, directory.watch("run.b") as other:
            await directory.publish("run.a", b"1", ttl=LONG_TTL)
            async with directory.watch("run.a") as second:
                await _next_is(second, member.id, b"1")
                await directory.publish("run.b", b"b", ttl=LONG_TTL)
                await _next_is(other, member.id, b"b")
            await directory.publish("run.a", b"2", ttl=LONG_TTL)
            await _next_is(first, member.id, b"2")


async def closing_withdraws_everything(connect: Connect) -> None:
    async with connect(3) as (leaver, *others):
        for topic in ("run.a", "run.b"):
            await leaver.directory.publish(topic, b"mine", ttl=LONG_TTL, urgent=True)
            for other in others:
                await _until(other, topic, bool)
        await leaver.directory.aclose()
        for topic in ("run.a", "run.b"):
            for other in others:
                await _until(other, topic, lambda records: not records)


async def a_closed_directory_says_so(connect: Connect) -> None:
    async with connect(1) as (member,):
        directory = member.directory
        async with directory.watch("run.a") as changes:
            waiting = asyncio.ensure_future(_next(changes))
            await asyncio.sleep(0.01)
            await directory.aclose()
            await _closed(waiting)
        await directory.aclose()
        await _closed(directory.publish("run.a", b"", ttl=1.0))
        await _closed(directory.withdraw("run.a"))
        await _closed(directory.fetch("run.a"))
        await _closed(_enter(directory))


DIRECTORY_CHECKS: Final[tuple[Check, ...]] = (
    own_record_is_there_at_once,
    every_member_sees_every_record,
    the_latest_publication_replaces_the_earlier_ones,
    withdrawing_removes_the_record_for_everybody,
    withdrawing_what_is_not_there_is_no_error,
    a_withdrawn_topic_can_be_published_again,
    a_record_is_gone_when_its_time_is_over,
    publishing_again_keeps_a_record_alive,
    the_largest_topic_and_value_pass,
    bad_arguments_are_refused_by_name,
    a_watch_shows_what_is_there_and_then_each_change,
    a_slow_reader_misses_no_latest_value,
    watches_are_independent,
    closing_withdraws_everything,
    a_closed_directory_says_so,
)


async def _until(member: Member, topic: str, holds: Callable[[list[Record]], bool]) -> list[Record]:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not holds(records := await member.directory.fetch(topic)):
        assert asyncio.get_running_loop().time() < deadline, f"{member.id.short} still sees {topic!r} as {records}"
        await asyncio.sleep(0.02)
    return records


def _holds_only(value: bytes, records: list[Record]) -> bool:
    return [record.value for record in records] == [value]


async def _version_of(member: Member, value: bytes) -> Version:
    await member.directory.publish("run.versions", value, ttl=LONG_TTL)
    (record,) = await member.directory.fetch("run.versions")
    return record.version


async def _next(changes: AsyncIterator[Change]) -> Change:
    async with asyncio.timeout(PATIENCE):
        return await anext(changes)


async def _next_is(changes: AsyncIterator[Change], owner: PeerId, value: bytes | None) -> None:
    change = await _next(changes)
    assert change.owner == owner, change
    assert (change.record.value if change.record else None) == value, change


async def _refused(call: Awaitable[object], argument: str) -> None:
    try:
        await call
    except ValueError as error:
        assert argument in str(error), f"the error does not name {argument!r}: {error}"  # noqa: PT017  (no test runner here)
    else:
        raise AssertionError(f"a bad {argument} was accepted")


async def _closed(call: Awaitable[object]) -> None:
    try:
        await call
    except ClosedError:
        return
    raise AssertionError("a closed directory did not raise ClosedError")


async def _enter(directory: Directory) -> None:
    async with directory.watch("run.a"):
        pass
