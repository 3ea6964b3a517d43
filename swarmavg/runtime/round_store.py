"""Where the numbers of one member's round are: inputs in the snapshot, until results take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from swarmavg.compression.buffers import bytes_of
from swarmavg.errors import LocalProtocolError, RemoteProtocolError
from swarmavg.planning.partition import Layout, Part
from swarmavg.protocol.outcome import Ledger
from swarmavg.reduction.memory import plain_memory
from swarmavg.reduction.snapshot import Snapshot


class RoundStore:
    """Inputs and results by the number of their part. An auxiliary peer, which has no snapshot, keeps what it passes on."""

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        snapshot: Snapshot | None,
        *,
        contributors: Iterable[int],
        on_held: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._snapshot = snapshot
        self._contributors = sum(1 << position for position in contributors)
        self._on_held = on_held
        self._kept: dict[int, tuple[int, memoryview]] = {}
        self.largest_payload = max((self._payload_bytes(part) for part in ledger.parts), default=0)
        self.largest_values = max((self._values_bytes(part) for part in ledger.parts), default=0)

    def encoded(self, number: int) -> memoryview:
        """The own input of a part, as it travels. Raises `LocalProtocolError` where the part's result has replaced it."""
        if self._ledger.holds(number):
            raise LocalProtocolError(f"the input of part {number}, whose result is held, is needed again")
        part = self._ledger.parts[number]
        return self._layout.runs[part.run].codec.encode(self._values(part))

    def new_scratch(self) -> memoryview:
        """Memory for one received payload, aligned for every dtype."""
        return plain_memory(self.largest_payload, torch.uint8).numpy().data

    def check_contributors(self, contributors: int) -> None:
        """Raise `RemoteProtocolError` if a result names members that contribute nothing."""
        if contributors & ~self._contributors:
            raise RemoteProtocolError("a result names contributors that the group does not have")

    def accept_result(self, number: int, contributors: int, payload: memoryview) -> None:
        """Decode a result into the snapshot, unless it is there. Raises `RemoteProtocolError`."""
        if self._ledger.holds(number):
            return
        part = self._ledger.parts[number]
        if contributors:
            self._layout.runs[part.run].codec.decode(payload, self._values(part))
        self._record(number, contributors)

    def accept_values(self, number: int, contributors: int, values: memoryview) -> None:
        """Take bare values that another member passed on, unless they are there. Raises `RemoteProtocolError`."""
        part = self._ledger.parts[number]
        if values.nbytes != (self._values_bytes(part) if contributors else 0):
            raise RemoteProtocolError(f"{values.nbytes} bytes of values where {self._values_bytes(part)} make the part")
        if self._snapshot is None:
            self._kept[number] = (contributors, values)
            self._on_held()
        elif not self._ledger.holds(number):
            if contributors:
                bytes_of(self._values(part))[:] = values
            self._record(number, contributors)

    def result_of(self, number: int) -> tuple[int, memoryview] | None:
        """Who is in a result, and its bare values; `None` while it is not here."""
        if self._snapshot is None:
            return self._kept.get(number)
        if not self._ledger.holds(number):
            return None
        return self._ledger.contributors_of(number), bytes_of(self._values(self._ledger.parts[number]))

    def _record(self, number: int, contributors: int) -> None:
        self._ledger.record(number, contributors)
        self._on_held()

    def _values(self, part: Part) -> torch.Tensor:
        assert self._snapshot is not None
        return self._snapshot.values(part)

    def _payload_bytes(self, part: Part) -> int:
        run = self._layout.runs[part.run]
        return run.codec.encoded_bytes(len(part), run.dtype)

    def _values_bytes(self, part: Part) -> int:
        return len(part) * self._layout.runs[part.run].dtype.itemsize
