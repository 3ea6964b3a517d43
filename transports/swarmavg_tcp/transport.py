"""Sockets for `StreamTransport`: how to bind, accept and connect, and what the system's errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Final, cast

from swarmavg.errors import ListenError, PeerUnreachableError, TransportError
from swarmavg.identifiers import Address
from swarmavg.telemetry.logs import get_logger
from swarmavg.transport.connection import Connection
from swarmavg.transport.endpoint import StreamTransport
from swarmavg.transport.listener import StreamListener, Unbind
from swarmavg_tcp.tls_wire import TlsWire

_BACKLOG: Final = 512
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OUT_OF_FILES_PAUSE: Final = 0.2
"""Seconds until the next try to accept when the process has no descriptors left."""

log = get_logger("swarmavg.transport.tcp")


class TcpTransport(StreamTransport):
    """The transport of ``tcp://`` addresses. Made by `swarmavg.transport.registry.create_transport`."""

    scheme = "tcp"

    async def _connect(self, address: Address, connection: Connection) -> None:
        context = self.context.security.client_context()
        protocol = self._protocol(connection, context, dials=True)
        with _system_errors(PeerUnreachableError, f"cannot reach {address}"):
            await asyncio.get_running_loop().create_connection(lambda: protocol, address.host, address.port)

    async def _bind(self, address: Address, listener: StreamListener) -> Unbind:
        with _system_errors(ListenError, f"cannot listen on {address}"):
            bound = await _bound_socket(address.host, address.port)
        listener.bound_to(Address(address.scheme, address.host, bound.getsockname()[1]))
        accepting = asyncio.get_running_loop().create_task(self._accept(bound, listener), name=f"accept {address}")

        async def unbind() -> None:
            accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([accepting])
            bound.close()

        return unbind

    async def _accept(self, bound: socket.socket, listener: StreamListener) -> None:
        """Accept for ever, no faster than handshakes finish: the rest waits in the system's backlog."""
        loop = asyncio.get_running_loop()
        while True:
            await listener.slot()
            try:
                stream, where = await loop.sock_accept(bound)
            except OSError as error:
                listener.unused_slot()
                await self._accept_failed(error)
            except BaseException:
                listener.unused_slot()
                raise
            else:
                await self._welcome(stream, _host_port(where), listener)

    async def _accept_failed(self, error: OSError) -> None:
        if error.errno in _OUT_OF_FILES:
            log.warning("cannot accept a connection", cause=error.strerror)
            await asyncio.sleep(_OUT_OF_FILES_PAUSE)
        else:  # the caller went away before it was accepted
            log.debug("accept failed", cause=str(error))
            await asyncio.sleep(0)

    async def _welcome(self, stream: socket.socket, where: str, listener: StreamListener) -> None:
        connection = listener.accept(where)
        try:
            protocol = self._protocol(connection, self.context.security.server_context(), dials=False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, stream)
        except BaseException as error:
            stream.close()
            listener.lost(connection)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
                log.debug("a connection died while it was accepted", address=where, cause=str(error))
            else:  # whatever goes wrong with one connection, such as a certificate that cannot be made, must not end listening
                log.exception("cannot serve a connection", address=where)

    def _protocol(self, connection: Connection, context: object | None, *, dials: bool) -> asyncio.BufferedProtocol:
        if context is None:
            return connection
        return TlsWire(connection, cast(ssl.SSLContext, context), security=self.context.security, dials=dials)


@contextlib.contextmanager
def _system_errors(kind: type[TransportError], what: str) -> Iterator[None]:
    """Turn what the operating system says into an error of ours."""
    try:
        yield
    except UnicodeError as error:  # a host name that cannot be encoded
        raise kind(f"{what}: {error}") from None
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "") if not isinstance(error, socket.gaierror) else "unknown host"
        raise kind(f"{what}: {error.strerror or error}{f' ({code})' if code else ''}") from error


async def _bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket, not blocking. A host name is bound at the first of its addresses."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        bound.bind(where)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _host_port(where: Any) -> str:
    host, port = where[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
