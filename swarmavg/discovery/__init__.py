"""Small signed records that members publish and look up."""

from swarmavg.discovery.gossip import GossipDirectory, GossipSettings
from swarmavg.discovery.interface import Change, Directory, Record, Version
from swarmavg.discovery.memory import MemoryDirectory, SharedDirectory

__all__ = [
    "Change",
    "Directory",
    "GossipDirectory",
    "GossipSettings",
    "MemoryDirectory",
    "Record",
    "SharedDirectory",
    "Version",
]
