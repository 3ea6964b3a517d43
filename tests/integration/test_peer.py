"""Peers on real loopback sockets: arguments, start, status, names, and averaging over TCP with TLS and without."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

import swarmavg
from swarmavg import Averager, ClosedError, ListenError, Peer, TokenError
from swarmavg.compression import Float16Compression
from swarmavg.discovery.memory import SharedDirectory
from swarmavg.errors import AddressError, ChannelRefusedError, PeerUnreachableError, SwarmError
from swarmavg.identifiers import Address
from swarmavg.runtime.addresses import announced_addresses, default_route_host

LOOPBACK = ["tcp://127.0.0.1:0"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TokenError, r"listen='tcp://0.0.0.0:0'.*swarmavg token"),
        ({"listen": LOOPBACK, "bootstrap": ["tcp://192.0.2.1:5"]}, TokenError, "bootstrap='tcp://192.0.2.1:5'.*swarmavg token"),
        ({"listen": "tcp://127.0.0.1:0"}, TypeError, "listen must be a sequence"),
        ({"listen": ["127.0.0.1:0"]}, AddressError, "no scheme"),
        ({"listen": ["tcp://127.0.0.1:99999"]}, AddressError, "99999"),
        ({"listen": LOOPBACK, "bootstrap": ["tcp://127.0.0.1"]}, ValueError, "bootstrap=.*port"),
        ({"listen": LOOPBACK, "announce": ["tcp://127.0.0.1:0"]}, ValueError, "announce=.*port"),
        ({"listen": LOOPBACK, "client_mode": True}, ValueError, "client_mode=True excludes listen"),
        ({"listen": [], "client_mode": False}, ValueError, "client_mode=False"),
        ({"listen": [], "client_mode": "yes"}, TypeError, "client_mode.*'yes'"),
        ({"listen": [], "limits": 5}, TypeError, "limits.*5"),
        ({"listen": [], "directory": 5}, TypeError, "directory.*5"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_construction(arguments, error, words):
    with pytest.raises(error, match=words):
        Peer(**arguments)


def test_a_bad_token_never_shows_in_the_error():
    async def main():
        with pytest.raises(TokenError) as caught:
            await Peer(listen=LOOPBACK, token="swarm1-secretbutwrong").start()
        assert "secretbutwrong" not in str(caught.value)

    asyncio.run(main())


def test_a_bind_that_fails_names_address_and_cause_and_leaves_nothing_open():
    async def main():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            peer = Peer(listen=["tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}"])
            with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}"):
                await peer.start()
            await peer.aclose()

    asyncio.run(main())


def test_unknown_schemes_list_those_that_there_are():
    async def main():
        with pytest.raises(SwarmError, match=r"carrier.*tcp"):
            await Peer(listen=["carrier://127.0.0.1:0"]).start()

    asyncio.run(main())


def test_addresses_status_and_the_line_to_join_by():
    async def main():
        peer = Peer(listen=[*LOOPBACK, *LOOPBACK])
        with pytest.raises(ClosedError, match="start"):
            _ = peer.id
        assert not peer.running
        async with peer:
            assert await peer.start() is peer
            assert len(peer.addresses) == 2
            assert all(address.port > 0 and address.peer_id == peer.id for address in peer.addresses)
            assert Address.parse(peer.join_line) == peer.addresses[0]
            assert str(peer) == peer.join_line
            status = peer.status()
            assert status["id"] == str(peer.id)
            assert status["running"] is True
            assert status["peers"] == []
            async with Peer(listen=[], bootstrap=[peer.join_line]) as client:
                assert client.client_mode
                assert client.addresses == []
                assert client.join_line == ""
                while not peer.status()["peers"]:
                    await asyncio.sleep(0.01)
                assert peer.status()["peers"] == [str(client.id)]
        await peer.aclose()
        assert peer.status()["running"] is False
        with pytest.raises(ClosedError):
            await peer.start()

    asyncio.run(main())


def test_channels_to_clients_strangers_and_unserved_purposes_fail_with_the_reason():
    async def main():
        async with Peer(listen=LOOPBACK) as peer, Peer(listen=[], bootstrap=[peer.join_line]) as client:
            while not (peer.status()["peers"] and client.status()["peers"]):
                await asyncio.sleep(0.01)
            with pytest.raises(PeerUnreachableError, match="announces no address"):
                await peer.open_channel(client.id, "chat", timeout=1.0)
            channel = await client.open_channel(peer.id, "chat", timeout=5.0)
            with pytest.raises(ChannelRefusedError, match="no-such-purpose"):
                await channel.receive()
            channel.abort()
            with pytest.raises(ValueError, match="already served"):
                peer.serve("gossip", lambda _channel: asyncio.sleep(0))

    asyncio.run(main())


def test_the_key_file_keeps_the_id_between_runs(tmp_path):
    async def main():
        path = tmp_path / "key.pem"
        async with Peer(listen=LOOPBACK, identity=path) as peer:
            first = peer.id
        async with Peer(listen=LOOPBACK, identity=path) as peer:
            assert peer.id == first

    asyncio.run(main())


def test_wildcard_hosts_are_announced_as_the_interface_of_the_default_route():
    bound = [Address.parse("tcp://0.0.0.0:7"), Address.parse("tcp://127.0.0.1:8")]
    peer_id = swarmavg.PeerId(bytes(32))
    hosts = [address.host for address in announced_addresses(bound, None, peer_id)]
    assert hosts == [default_route_host(socket.AF_INET), "127.0.0.1"]
    given = [Address.parse("tcp://203.0.113.9:7")]
    assert announced_addresses(bound, given, peer_id) == [given[0].with_peer(peer_id)]


@pytest.mark.parametrize("with_token", [False, True], ids=["plaintext", "tls"])
@pytest.mark.parametrize("directory", ["gossip", "shared"])
def test_four_peers_average_over_tcp(with_token, directory):
    token = swarmavg.generate_token() if with_token else None
    shared = SharedDirectory() if directory == "shared" else None

    async def member(index, bootstrap, ready, tensor):
        client = index == 3
        async with (
            Peer(
                listen=[] if client else LOOPBACK,
                bootstrap=bootstrap,
                token=token,
                directory=None if shared is None else shared.directory,
            ) as peer,
            Averager([tensor], peer=peer, prefix="run", target_group_size=4, compression=Float16Compression()) as averager,
        ):
            ready.append(peer.join_line)
            result = await averager.step(gather=index, timeout=60)
            assert sorted(result.values()) == [0, 1, 2, 3]
            assert result.fraction == 1.0

    async def main():
        tensors = [torch.full((300_000,), float(index)) for index in range(4)]
        ready: list[str] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(member(0, [], ready, tensors[0]))
            while not ready:
                await asyncio.sleep(0.01)
            for index in range(1, 4):
                group.create_task(member(index, ready[:1], ready, tensors[index]))
        assert all(tensor.eq(1.5).all() for tensor in tensors)

    asyncio.run(main())


def test_importing_and_starting_are_quiet_and_quick_to_import():
    code = (
        "import sys, asyncio, logging, swarmavg\n"
        "assert logging.getLogger().handlers == [] and logging.getLogger('swarmavg').level == 0\n"
        "async def main():\n"
        "    async with swarmavg.Peer(listen=['tcp://127.0.0.1:0']): pass\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_swarm_that_changes_its_token_averages_across_the_change():
    old, new = swarmavg.generate_token(), swarmavg.generate_token()

    async def main():
        tensors = [torch.full((1000,), float(index)) for index in range(2)]
        options: dict[str, Any] = {"prefix": "run", "target_group_size": 2}
        async with (
            Peer(listen=LOOPBACK, token=[old, new]) as first,
            Peer(listen=LOOPBACK, token=[new, old], bootstrap=[first.join_line]) as second,
            Averager([tensors[0]], peer=first, **options) as one,
            Averager([tensors[1]], peer=second, **options) as two,
        ):
            results = await asyncio.gather(one.step(timeout=30), two.step(timeout=30))
            assert [result.group_size for result in results] == [2, 2]
        assert all(tensor.eq(0.5).all() for tensor in tensors)

    asyncio.run(main())


def test_a_step_that_finds_nobody_names_the_bootstrap_addresses_that_failed(caplog):
    async def main():
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            dead = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        async with (
            Peer(listen=LOOPBACK, token=swarmavg.generate_token()) as other,
            Peer(listen=LOOPBACK, token=swarmavg.generate_token(), bootstrap=[dead, other.join_line]) as peer,
            Averager([torch.zeros(3)], peer=peer, prefix="run") as averager,
        ):
            while len(peer.bootstrap_failures()) < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(swarmavg.MatchmakingError) as caught:
                await averager.step(timeout=0.5)
            assert f"bootstrap address {dead}" in str(caught.value)
            assert "token" in str(caught.value)
            assert set(peer.status()["bootstrap_failures"]) == {dead, other.join_line}

    with caplog.at_level(logging.WARNING, logger="swarmavg.discovery"):
        asyncio.run(main())
    told = [record.message for record in caplog.records if "cannot reach the swarm through this address" in record.message]
    assert len(told) == 2  # once each, however often they are dialled
