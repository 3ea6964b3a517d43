"""The blocking API, for training loops without an event loop of their own.

The classes have the names, arguments and meaning of those of `swarmavg`, without `await`. They run on one thread that starts
with the first object and ends with the last.
"""

from swarmavg.sync.averager import Averager
from swarmavg.sync.control import StepControl
from swarmavg.sync.peer import Peer
from swarmavg.sync.training import TrainingStateAverager

__all__ = ["Averager", "Peer", "StepControl", "TrainingStateAverager"]
