"""TCP backend: one connection per channel, pooled, with TLS 1.3 wherever the swarm has a token."""

from swarmavg_tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
