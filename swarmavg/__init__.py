"""swarmavg: decentralised averaging of PyTorch training state between machines that come and go.

The async API: `Peer`, `Averager`, `TrainingStateAverager`. For plain loops, the same names in `swarmavg.sync`.
"""

from importlib.metadata import version as _version

from swarmavg import compression, sync
from swarmavg.averager import Averager, AveragerOptions
from swarmavg.control import AveragingStage, StepControl, StepResult
from swarmavg.errors import (
    AllreduceError,
    ClosedError,
    DialError,
    ListenError,
    MatchmakingError,
    OptimizerStepError,
    SwarmError,
    TokenError,
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
    "AllreduceError",
    "Averager",
    "AveragerOptions",
    "AveragingStage",
    "ClosedError",
    "DialError",
    "Exclusion",
    "ExclusionCode",
    "GroupId",
    "ListenError",
    "MatchmakingError",
    "OptimizerStepError",
    "Peer",
    "PeerId",
    "Span",
    "StepControl",
    "StepResult",
    "SwarmError",
    "TokenError",
    "TrainingStateAverager",
    "TrainingStepResult",
    "TransportLimits",
    "compression",
    "generate_token",
    "sync",
]
