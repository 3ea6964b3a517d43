"""Every exception the package raises on purpose.

    SwarmError
    ├── AddressError (ValueError)        an address or peer id that cannot be read
    ├── ClosedError                      used after close, or closed while waiting
    ├── ForkedError                      used in a process forked after start
    ├── BlockingCallError (RuntimeError) a blocking call where waiting would stop the very thing it waits for
    ├── SecurityError
    │   ├── TokenError (ValueError)      a token that is malformed, weak or missing
    │   └── IdentityError                a key file that is unreadable, open to others, or in use
    ├── TransportError
    │   ├── ListenError                  the address cannot be bound
    │   ├── DialError                    no channel could be opened
    │   │   ├── PeerUnreachableError     nobody answers at any known address
    │   │   └── AuthenticationError      somebody answers who cannot be, or is not, who was asked for
    │   └── ChannelError                 an open channel ended otherwise than by a clean end
    │       ├── ChannelLostError         the connection died
    │       ├── ChannelCancelledError    the other side gave up (cancel frame)
    │       ├── ChannelRefusedError      the other side sent an error frame: `code`, `reason`
    │       ├── ChannelViolationError    the other side broke the protocol
    │       └── ChannelClosedError       this side closed or aborted it
    ├── LocalProtocolError               this side called something it may not call in this state (a bug here)
    ├── RemoteProtocolError              a message from a peer breaks the protocol; only this may exclude a peer
    ├── DirectoryError                   a discovery back end failed or refused a record
    ├── MatchmakingError                 no group was found in time
    ├── AllreduceError                   a group stood but the average could not be had; tensors unchanged
    │   └── FencedError                  the others went on without this peer
    ├── StateError                       a state could not be downloaded, or does not fit
    └── OptimizerStepError               the optimizer's own step failed in the background

Bad arguments raise plain `ValueError` or `TypeError` with the argument's name and value.
Errors caused by the other side and by this side are different types (as in h11), so that a caller can tell whom to blame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmavg.identifiers import PeerId


class SwarmError(Exception):
    """Base of everything swarmavg raises on purpose."""


class AddressError(SwarmError, ValueError):
    """An address or a peer id that cannot be read."""


class ClosedError(SwarmError):
    """The object was closed, before or during the call."""


class ForkedError(SwarmError):
    """The object belongs to a process from which this one was forked; make a new one after the fork."""


class BlockingCallError(SwarmError, RuntimeError):
    """A blocking call from inside an event loop, or from another place where it would wait for itself."""


class SecurityError(SwarmError):
    """Tokens, keys and certificates."""


class TokenError(SecurityError, ValueError):
    """A swarm token that is malformed, weak or missing."""


class IdentityError(SecurityError):
    """A key file that cannot be used: unreadable, readable by others, damaged, or locked by another process."""


class TransportError(SwarmError):
    """Connections and channels."""


class ListenError(TransportError):
    """An address that cannot be listened on; the message names address and cause."""


class DialError(TransportError):
    """No channel could be opened."""


class PeerUnreachableError(DialError):
    """Nobody answers at any known address of the peer."""


class AuthenticationError(DialError):
    """Somebody answers who cannot prove, or does not have, the identity or swarm that was asked for."""


class ChannelError(TransportError):
    """An open channel ended otherwise than by a clean end."""


class ChannelLostError(ChannelError):
    """The connection under the channel died."""


class ChannelCancelledError(ChannelError):
    """The other side gave the channel up."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the other side cancelled")
        self.reason = reason


class ChannelRefusedError(ChannelError):
    """The other side answered with an error: a `code` for programs and a `reason` for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}" if reason else code)
        self.code = code
        self.reason = reason


class ChannelViolationError(ChannelError):
    """The other side sent bytes that no correct peer sends."""


class ChannelClosedError(ChannelError):
    """Closed or aborted by this side."""


class LocalProtocolError(SwarmError):
    """A bug here: this side asked a protocol machine for something its state does not allow."""


class RemoteProtocolError(SwarmError):
    """A peer's message breaks the protocol. The only kind of error that may exclude a peer."""


class DirectoryError(SwarmError):
    """Discovery failed: a back end is unreachable, or a record was refused (quota, size, signature)."""


class MatchmakingError(SwarmError):
    """No group was found in time. The message lists everyone seen and why they did not join."""

    def __init__(self, message: str, seen: Mapping[PeerId, str] | None = None) -> None:
        lines = [message, *(f"  {peer.short}: {why}" for peer, why in sorted((seen or {}).items()))]
        super().__init__("\n".join(lines))
        self.message = message
        self.seen: dict[PeerId, str] = dict(seen or {})


class AllreduceError(SwarmError):
    """A group stood, but the average could not be had. The tensors hold what they held before."""

    def __init__(self, message: str, reasons: Mapping[PeerId, str] | None = None) -> None:
        lines = [message, *(f"  {peer.short}: {why}" for peer, why in sorted((reasons or {}).items()))]
        super().__init__("\n".join(lines))
        self.reasons: dict[PeerId, str] = dict(reasons or {})


class FencedError(AllreduceError):
    """The rest of the group went on without this peer."""


class StateError(SwarmError):
    """A training state that could not be downloaded, or does not fit; the local state is untouched."""


class OptimizerStepError(SwarmError):
    """The optimizer step that ran in the background failed; the cause is chained."""
