"""Whose bytes are whose, when one read brings the end of a greeting, an open frame and the messages behind it."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.security.identity import Identity
from swarmavg.security.swarm import open_swarm_security
from swarmavg.security.tokens import generate_token
from swarmavg.transport.channel import FramedChannel
from swarmavg.transport.connection import Connection
from swarmavg.transport.framing import Hello, Kind, encode, encode_open
from swarmavg.transport.interface import TransportContext, TransportLimits

TOKEN = generate_token()
OURS = open_swarm_security(Identity.generate(), TOKEN)
THEIRS = open_swarm_security(Identity.generate(), TOKEN)


class Owner:
    """Accepts everything, and remembers the channels."""

    def __init__(self) -> None:
        self.context = TransportContext(security=OURS, limits=TransportLimits())
        self.channels: list[FramedChannel] = []

    def refusal(self, connection: Connection) -> None:
        return None

    def opened(self, connection: Connection, channel: FramedChannel) -> None:
        self.channels.append(channel)

    def greeted(self, connection: Connection, error: Exception | None) -> None:
        assert error is None

    def idle(self, connection: Connection) -> None:
        pass

    def lost(self, connection: Connection) -> None:
        pass


class Wire(asyncio.Transport):
    """Swallows what is written."""

    def write(self, data: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def feed(connection: Connection, stream: bytes, cuts: list[int]) -> None:
    position = turn = 0
    while position < len(stream):
        buffer = connection.get_buffer(-1)
        count = min(buffer.nbytes, cuts[turn % len(cuts)], len(stream) - position)
        buffer[:count] = stream[position : position + count]
        connection.buffer_updated(count)
        position, turn = position + count, turn + 1


@settings(max_examples=50, deadline=None)
@given(
    cuts=st.lists(st.one_of(st.integers(1, 200), st.just(100_000)), min_size=1, max_size=5),
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), max_size=4),
)
def test_a_channel_counts_what_follows_its_open_frame_however_the_stream_is_cut(
    cuts: list[int], sizes: list[tuple[int, int]]
) -> None:
    async def program() -> None:
        owner = Owner()
        connection = Connection(owner, dials=False, where="test")
        connection.connection_made(Wire())
        messages = b"".join(encode(Kind.MESSAGE, bytes(header), payload) + bytes(payload) for header, payload in sizes)
        partial = encode(Kind.MESSAGE, b"unfinished", 1000) + bytes(10)
        channel_bytes = messages + encode(Kind.END)
        hello = Hello(THEIRS.peer_id, THEIRS.swarm_id, 1 << 20).encode()
        feed(connection, hello + encode_open("first") + channel_bytes, cuts)
        first = owner.channels[0]
        assert first.bytes_received == len(channel_bytes)
        await first.end()
        feed(connection, encode_open("second") + messages + partial, cuts)
        assert owner.channels[1].bytes_received == len(messages + partial)
        assert first.bytes_received == len(channel_bytes)
        connection.connection_lost(None)
        assert owner.channels[1].bytes_received == len(messages + partial), "the count outlives the connection"

    asyncio.run(program())
