"""The averager for plain loops: the methods of `swarmavg.Averager`, blocking."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, overload

import torch

from swarmavg import averager as core
from swarmavg.compression.interface import Compression, TensorInfo
from swarmavg.config import AveragerConfig, Nonfinite
from swarmavg.control import StepControl as AsyncStepControl
from swarmavg.control import StepResult
from swarmavg.errors import BlockingCallError, ClosedError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.group import Role
from swarmavg.sync.call import Call
from swarmavg.sync.control import StepControl
from swarmavg.sync.holding import held
from swarmavg.sync.peer import Peer, core_of
from swarmavg.sync.resident import Resident, mirrors
from swarmavg.sync.worker import Worker
from swarmavg.training.settings import RoundOptions


@mirrors(core.Averager)
class Averager(Resident[core.Averager]):
    __doc__ = None

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        peer: Peer,
        prefix: str,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        initial_group_bits: str = "",
        min_matchmaking_time: float = 5.0,
        request_timeout: float = 3.0,
        averaging_alpha: float = 1.0,
        part_size_bytes: int | None = None,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        compression: Compression | None = None,
        state_compression: Compression | None = None,
        tensor_infos: Sequence[TensorInfo] | None = None,
        bandwidth: float | None = None,
        min_vector_size: int = 0,
        nonfinite: Nonfinite = "reject",
        client_mode: bool | None = None,
        auxiliary: bool = False,
        allow_state_sharing: bool = False,
        declare_state_period: float | None = None,
        shutdown_timeout: float = 5.0,
    ) -> None:
        self._peer = peer
        self._holders: set[int] = set()
        super().__init__(
            core.Averager(
                tensors,
                peer=core_of(peer),
                prefix=prefix,
                target_group_size=target_group_size,
                min_group_size=min_group_size,
                initial_group_bits=initial_group_bits,
                min_matchmaking_time=min_matchmaking_time,
                request_timeout=request_timeout,
                averaging_alpha=averaging_alpha,
                part_size_bytes=part_size_bytes,
                allreduce_timeout=allreduce_timeout,
                next_chunk_timeout=next_chunk_timeout,
                sender_timeout=sender_timeout,
                reducer_timeout=reducer_timeout,
                compression=compression,
                state_compression=state_compression,
                tensor_infos=tensor_infos,
                bandwidth=bandwidth,
                min_vector_size=min_vector_size,
                nonfinite=nonfinite,
                client_mode=client_mode,
                auxiliary=auxiliary,
                allow_state_sharing=allow_state_sharing,
                declare_state_period=declare_state_period,
                shutdown_timeout=shutdown_timeout,
            )
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        worker = self._move_out()
        if worker is not None:  # the core knows when haste is due
            self._leave(worker, functools.partial(self._core.__aexit__, kind, error, traceback))

    @property
    def config(self) -> AveragerConfig:
        return self._core.config

    @property
    def peer(self) -> Peer:
        return self._peer

    @property
    def prefix(self) -> str:
        return self._core.prefix

    @property
    def peer_id(self) -> PeerId:
        return self._core.peer_id

    @property
    def role(self) -> Role:
        return self._core.role

    @property
    def mode(self) -> str:
        return self._core.mode

    @property
    def total_size(self) -> int:
        return self._core.total_size

    @property
    def schema_hash(self) -> str:
        return self._core.schema_hash

    @property
    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        return self._core.tensor_infos

    def get_group_bits(self) -> str:
        return self._peek(self._core.get_group_bits)

    def set_group_bits(self, bits: str) -> None:
        self._peek(lambda: self._core.set_group_bits(bits))

    def story(self, round_id: GroupId | str | None = None) -> str:
        return self._peek(lambda: self._core.story(round_id))

    @contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """The tensors, under a lock: inside the block the averager neither reads nor changes them.

        Other threads, and the loop behind this facade, go on meanwhile. Do not call `step` inside: it could not finish, and
        raises `BlockingCallError`.
        """
        worker = self._unlocked_home()
        with held(worker, self._core.get_tensors()) as tensors:
            self._holders.add(threading.get_ident())
            try:
                yield tensors
            finally:
                self._holders.discard(threading.get_ident())

    @overload
    def step(
        self,
        gather: Any = None,
        weight: float | None = None,
        timeout: float | None = None,
        scheduled_time: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: Literal[True] = True,
    ) -> StepResult: ...

    @overload
    def step(
        self,
        gather: Any = None,
        weight: float | None = None,
        timeout: float | None = None,
        scheduled_time: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        *,
        wait: Literal[False],
    ) -> StepControl: ...

    @overload
    def step(
        self,
        gather: Any = None,
        weight: float | None = None,
        timeout: float | None = None,
        scheduled_time: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> StepResult | StepControl: ...

    def step(
        self,
        gather: Any = None,
        weight: float | None = None,
        timeout: float | None = None,
        scheduled_time: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> StepResult | StepControl:
        worker = self._unlocked_home() if wait else self._home()
        answer: StepResult | AsyncStepControl = worker.run(
            self._core.step, gather, weight, timeout, scheduled_time, allow_retries, require_trigger, wait
        )
        return StepControl(worker, answer) if isinstance(answer, AsyncStepControl) else answer

    @overload
    def load_state(self, timeout: float | None = None, wait: Literal[True] = True) -> Any: ...

    @overload
    def load_state(self, timeout: float | None = None, *, wait: Literal[False]) -> concurrent.futures.Future[Any]: ...

    def load_state(self, timeout: float | None = None, wait: bool = True) -> Any:
        worker = self._home()
        return worker.run(self._core.load_state, timeout) if wait else worker.submit_future(self._core.load_state, timeout)

    load_state_from_peers = load_state

    def _unlocked_home(self) -> Worker:
        """The worker, for a call that takes the tensors' lock. Raises `BlockingCallError` where this thread holds it."""
        if threading.get_ident() in self._holders:
            raise BlockingCallError("inside get_tensors() of the same averager this call would wait for the end of the block")
        return self._home()


def background_step(averager: Averager, options: RoundOptions) -> Call[StepResult]:
    """Begin a step; for the training averager's delayed rounds."""
    return averager._home().submit(functools.partial(averager._core.step, **options))  # noqa: SLF001  (one package)


def check_usable(averager: Averager) -> None:
    """Raises what any blocking method raises before the start, after the close, in a forked child and inside a loop, and
    `ClosedError` where the peer underneath was closed.
    """
    averager._home().check_caller()  # noqa: SLF001
    if not averager.peer.running:
        raise ClosedError("the peer of this averager is closed")
