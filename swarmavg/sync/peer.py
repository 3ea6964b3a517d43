"""The peer for plain loops: `swarmavg.Peer`, blocking, without the hub through which averagers open channels."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

from swarmavg import peer as core
from swarmavg.identifiers import Address, PeerId
from swarmavg.peer import DirectoryFactory, TransportFactory
from swarmavg.security.identity import Identity
from swarmavg.sync.resident import Resident, mirrors
from swarmavg.transport.interface import TransportLimits


@mirrors(core.Peer)
class Peer(Resident[core.Peer]):
    __doc__ = None

    def __init__(
        self,
        *,
        listen: Sequence[str | Address] = ("tcp://0.0.0.0:0",),
        announce: Sequence[str | Address] | None = None,
        bootstrap: Sequence[str | Address] = (),
        token: str | Sequence[str] | None = None,
        identity: str | os.PathLike[str] | Identity | None = None,
        directory: DirectoryFactory | None = None,
        client_mode: bool | None = None,
        limits: TransportLimits | None = None,
        insecure: bool = False,
        transports: Mapping[str, TransportFactory] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(
            core.Peer(
                listen=listen,
                announce=announce,
                bootstrap=bootstrap,
                token=token,
                identity=identity,
                directory=directory,
                client_mode=client_mode,
                limits=limits,
                insecure=insecure,
                transports=transports,
                rng=rng,
            ),
            leaves_last=True,
        )

    @property
    def running(self) -> bool:
        return self._core.running

    @property
    def limits(self) -> TransportLimits:
        return self._core.limits

    @property
    def client_mode(self) -> bool:
        return self._core.client_mode

    @property
    def id(self) -> PeerId:
        return self._core.id

    @property
    def public_key(self) -> bytes:
        return self._core.public_key

    @property
    def swarm_id(self) -> bytes:
        return self._core.swarm_id

    @property
    def accepted_swarm_ids(self) -> tuple[bytes, ...]:
        return self._core.accepted_swarm_ids

    @property
    def addresses(self) -> list[Address]:
        return self._peek(lambda: self._core.addresses)

    @property
    def join_line(self) -> str:
        return self._peek(lambda: self._core.join_line)

    def status(self) -> dict[str, Any]:
        return self._peek(self._core.status)

    def __str__(self) -> str:
        return str(self._core)


def core_of(peer: Peer) -> core.Peer:
    """The async peer behind it, for the averagers that live on it. Raises `TypeError` for anything else."""
    if not isinstance(peer, Peer):
        raise TypeError(f"peer must be a swarmavg.sync.Peer, got {peer!r}")
    return peer._core  # noqa: SLF001  (one package)
