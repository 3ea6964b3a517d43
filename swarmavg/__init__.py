"""swarmavg: decentralised averaging of PyTorch training state between machines that come and go.

The async API: `Peer`, `Averager`, `TrainingStateAverager`. For plain loops, the same names in `swarmavg.sync`.
"""

from importlib.metadata import version as _version

from swarmavg import compression, sync
from swarmavg.averager import Averager, AveragerOptions
from swarmavg.control import AveragingStage, StepControl, StepResult
from swarmavg.errors import (
    AddressError,
    AllreduceError,
    AuthenticationError,
    BlockingCallError,
    ChannelCancelledError,
    ChannelClosedError,
    ChannelError,
    ChannelLostError,
    ChannelRefusedError,
    ChannelViolationError,
    ClosedError,
    DialError,
    DirectoryError,
    FencedError,
    ForkedError,
    IdentityError,
    ListenError,
    LocalProtocolError,
    MatchmakingError,
    OptimizerStepError,
    PeerUnreachableError,
    RemoteProtocolError,
    SecurityError,
    StateError,
    SwarmError,
    TokenError,
    TransportError,
)
from swarmavg.identifiers import Address, GroupId, PeerId
from swarmavg.peer import Peer
from swarmavg.planning.partition import Span
from swarmavg.protocol.outcome import Exclusion, ExclusionCode
from swarmavg.security.tokens import generate_token
from swarmavg.training.results import TrainingStepResult
from swarmavg.training.state_averager import TrainingStateAverager
from swarmavg.transport.interface import TransportLimits

__version__ = _version("swarmavg")

__all__ = [
    "Address",
    "AddressError",
    "AllreduceError",
    "AuthenticationError",
    "Averager",
    "AveragerOptions",
    "AveragingStage",
    "BlockingCallError",
    "ChannelCancelledError",
    "ChannelClosedError",
    "ChannelError",
    "ChannelLostError",
    "ChannelRefusedError",
    "ChannelViolationError",
    "ClosedError",
    "DialError",
    "DirectoryError",
    "Exclusion",
    "ExclusionCode",
    "FencedError",
    "ForkedError",
    "GroupId",
    "IdentityError",
    "ListenError",
    "LocalProtocolError",
    "MatchmakingError",
    "OptimizerStepError",
    "Peer",
    "PeerId",
    "PeerUnreachableError",
    "RemoteProtocolError",
    "SecurityError",
    "Span",
    "StateError",
    "StepControl",
    "StepResult",
    "SwarmError",
    "TokenError",
    "TrainingStateAverager",
    "TrainingStepResult",
    "TransportError",
    "TransportLimits",
    "compression",
    "generate_token",
    "sync",
]
