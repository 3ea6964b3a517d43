"""TLS between a socket and a `Connection`: a protocol to the socket below, a transport to the connection above.

Done here with `ssl.SSLObject`, not by asyncio's own TLS, because both ends must learn precisely why a handshake failed:
asyncio drops the alert that says so, and cannot tell that the other end does not speak TLS at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, Final, cast

from swarmavg.errors import AuthenticationError, PeerUnreachableError, SwarmError
from swarmavg.security.tls_errors import explain_tls_error
from swarmavg.transport.connection import LINGER_SECONDS, Connection, say_eof
from swarmavg.transport.framing import TLS_FIRST_BYTES, encode_error
from swarmavg.transport.greeting import NOT_WELCOME, TLS_REQUIRED
from swarmavg.transport.interface import ChannelSecurity

_CIPHERTEXT_BYTES: Final = 128 * 1024


class TlsWire(asyncio.Transport, asyncio.BufferedProtocol):
    """One TLS connection. Tells `inner` that it is connected once the handshake is done and the peer's id is known."""

    def __init__(self, inner: Connection, context: ssl.SSLContext, *, security: ChannelSecurity, dials: bool) -> None:
        super().__init__()
        self._inner = inner
        self._security = security
        self._dials = dials
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = str(inner.expect) if dials and inner.expect is not None else None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not dials, server_hostname=name)
        self._below: asyncio.Transport | None = None
        self._ciphertext = memoryview(bytearray(_CIPHERTEXT_BYTES))
        self._heard = False
        self._ready = False
        self._reading = True
        self._pumping = False
        self._closing = False
        self._failure: SwarmError | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- protocol of the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._below.set_write_buffer_limits(high=0)
        self._inner.attach(self)
        if not self._closing:
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (asyncio passes it by position)
        return self._ciphertext

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        if not self._heard:
            self._heard = True
            if self._ciphertext[0] not in TLS_FIRST_BYTES:
                self._meets_plaintext()
                return
        self._incoming.write(self._ciphertext[:nbytes])
        if not self._ready:
            self._shake_hands()
        if self._ready:
            self._pump()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._below = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._ready and self._failure is None:
            if self._heard:
                self._failure = AuthenticationError(self._about(explain_tls_error(exc or EOFError())))
            else:
                self._failure = PeerUnreachableError(f"{self._inner.where} closed the connection before the TLS handshake")
        self._inner.connection_lost(self._failure or exc)

    def pause_writing(self) -> None:
        if self._ready:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._ready:
            self._inner.resume_writing()

    # --- transport of the connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "swarmavg_peer":
            return self._proven
        return self._below.get_extra_info(name, default) if self._below is not None else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._below is None:
            return
        view = memoryview(data)
        try:
            while view.nbytes:
                view = view[self._tls.write(view) :]
        except ssl.SSLError as error:
            self._fail(AuthenticationError(self._about(explain_tls_error(error))))
            return
        self._flush()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size() if self._below is not None else 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._below is not None:
            self._below.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._reading = False
        if self._below is not None:
            self._below.pause_reading()

    def resume_reading(self) -> None:
        self._reading = True
        if self._below is not None:
            self._below.resume_reading()
            asyncio.get_running_loop().call_soon(self._pump)  # what was decrypted or buffered before the pause

    def is_reading(self) -> bool:
        return self._reading

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._below is None:
            return
        if self._ready:
            with contextlib.suppress(ssl.SSLError):  # it wants the other side's close_notify, for which nobody waits
                self._tls.unwrap()
            self._flush()
        self._below.close()

    def abort(self) -> None:
        self._closing = True
        if self._below is not None:
            self._below.abort()

    # --- handshake

    _proven: Any = None

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._fail(AuthenticationError(self._about(explain_tls_error(error))))
            return
        self._flush()
        certificate = self._tls.getpeercert(binary_form=True)
        try:
            if certificate is None:
                raise AuthenticationError("it showed no certificate")
            self._proven = self._security.peer_of(certificate)
        except AuthenticationError as error:
            self.write(encode_error(NOT_WELCOME, str(error)))
            self._fail(AuthenticationError(self._about(str(error))))
            return
        self._ready = True
        self._inner.connection_made(self)

    def _meets_plaintext(self) -> None:
        if self._dials:
            self._fail(AuthenticationError(self._about("it does not speak TLS: the peer there has no token, or it is no peer")))
            return
        if self._below is not None:
            reason = "this swarm has a token, and you spoke plaintext: give the same token to both sides"
            self._below.write(encode_error(TLS_REQUIRED, reason))
        self._fail(AuthenticationError(self._about("it spoke plaintext, and this swarm has a token: give it the token")))

    def _fail(self, error: SwarmError) -> None:
        """Let OpenSSL's alert, or our word, go out, and give the other side time to read it."""
        if self._closing:
            return
        self._closing = True
        self._failure = error
        self._flush()
        if self._below is not None:
            say_eof(self._below)
            self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._below.abort)
        self._inner.fail_greeting(error)

    def _about(self, what: str) -> str:
        return f"TLS with {self._inner.where}: {what}"

    # --- bytes

    def _flush(self) -> None:
        if self._outgoing.pending and self._below is not None:
            self._below.write(self._outgoing.read())

    def _pump(self) -> None:
        """Decrypt into the connection's buffers until there is nothing left or it has enough."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._reading and not self._closing and self._ready:
                buffer = self._inner.get_buffer(-1)
                count, more = self._decrypt(buffer)
                if count:
                    self._inner.buffer_updated(count)
                if not more:
                    break
        finally:
            self._pumping = False
        self._flush()

    def _decrypt(self, buffer: memoryview) -> tuple[int, bool]:
        """Fill `buffer` as far as possible; whether there may be more."""
        count = 0
        try:
            while count < buffer.nbytes:
                got = self._tls.read(buffer.nbytes - count, cast(Any, buffer[count:]))
                if not got:
                    self._ended()
                    return count, False
                count += cast(int, got)
        except ssl.SSLWantReadError:
            return count, False
        except ssl.SSLZeroReturnError:
            self._ended()
            return count, False
        except ssl.SSLError as error:
            self._read_failed(error)
            return 0, False
        return count, True

    def _ended(self) -> None:
        """The other side said that nothing follows."""
        asyncio.get_running_loop().call_soon(self.close)

    def _read_failed(self, error: ssl.SSLError) -> None:
        """An alert or a broken record. On a new connection it is the other side's answer to our certificate."""
        self._fail(AuthenticationError(self._about(explain_tls_error(error))))
