"""The rules of the first exchange on a connection: who may talk to whom, and how a refusal is worded. No I/O."""

from __future__ import annotations

from typing import Final

from swarmavg.errors import AuthenticationError, ChannelRefusedError, SwarmError
from swarmavg.identifiers import PeerId
from swarmavg.transport.framing import VERSIONS, Hello, encode_error, negotiate
from swarmavg.transport.interface import ChannelSecurity

WRONG_SWARM: Final = "wrong-swarm"
WRONG_PEER: Final = "wrong-peer"
NO_COMMON_VERSION: Final = "no-common-version"
NOT_A_PEER: Final = "not-a-peer"
NOT_WELCOME: Final = "not-welcome"
TLS_REQUIRED: Final = "tls-required"
_ABOUT_IDENTITY: Final = frozenset({WRONG_SWARM, WRONG_PEER, NO_COMMON_VERSION, NOT_A_PEER, NOT_WELCOME, TLS_REQUIRED})


class GreetingError(AuthenticationError):
    """The other side cannot be talked to. `farewell` is the frame that tells it why, in words for its side."""

    def __init__(self, message: str, code: str, reason_there: str = "") -> None:
        super().__init__(message)
        self.farewell: bytes = encode_error(code, reason_there or message)


def check_hello(hello: Hello, *, where: str, security: ChannelSecurity, expect: PeerId | None, proven: PeerId | None) -> int:
    """The protocol version to speak with who sent `hello` from `where`.

    `expect` is who was asked for and `proven` the owner of the certificate, if there are such. Raises `GreetingError`.
    """
    if hello.swarm not in security.accepted_swarm_ids:
        ours, theirs = security.swarm_id.hex()[:8], hello.swarm.hex()[:8]
        raise GreetingError(
            f"{where}: wrong swarm: the other side belongs to swarm {theirs}, this peer to {ours}; are the tokens the same?",
            WRONG_SWARM,
            f"wrong swarm: this peer belongs to swarm {ours}, you to {theirs}; are the tokens the same?",
        )
    if proven is not None and hello.peer != proven:
        message = f"hello claims to come from {hello.peer.short}, but the certificate belongs to {proven.short}"
        raise GreetingError(f"{where}: {message}", WRONG_PEER, message)
    check_peer(hello.peer, expect, where)
    version = negotiate(VERSIONS, hello.versions)
    if version is None:
        ours_range, theirs_range = f"{VERSIONS[0]} to {VERSIONS[1]}", f"{hello.versions[0]} to {hello.versions[1]}"
        raise GreetingError(
            f"{where}: no common protocol version: the other side speaks {theirs_range}, this peer {ours_range}",
            NO_COMMON_VERSION,
            f"no common protocol version: this peer speaks {ours_range}, you {theirs_range}",
        )
    return version


def check_peer(peer: PeerId, expect: PeerId | None, where: str) -> None:
    """Raises `GreetingError` if somebody else was asked for."""
    if expect is not None and peer != expect:
        message = f"another peer answers: {peer.short} was found where {expect.short} was asked for"
        raise GreetingError(f"{where}: {message}", WRONG_PEER, message)


def not_a_peer(violation: Exception, where: str) -> GreetingError:
    """For a stream that does not begin as ours do."""
    return GreetingError(f"{where}: not a swarmavg peer: {violation}", NOT_A_PEER, f"not a swarmavg peer: {violation}")


def refused(code: str, reason: str, where: str) -> SwarmError:
    """What a dial raises when the other side answers with an error frame."""
    if code in _ABOUT_IDENTITY:
        return AuthenticationError(f"{where}: refused by the other side: {reason}")
    return ChannelRefusedError(code, reason)
