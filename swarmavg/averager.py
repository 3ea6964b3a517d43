"""The averager: keeps a fixed list of tensors and, on request, averages them with the same-shaped tensors of other peers.

The public async API. It holds together matchmaking, the exchange and the tensors' lock; the work is done in `runtime`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, overload

import torch

from swarmavg.agreement import match_config, schema_hash
from swarmavg.averaging_round import AveragingRound, OwnFailureError, RoundPlanner
from swarmavg.compression import NoCompression
from swarmavg.compression.interface import Compression, TensorInfo, codec_per_tensor
from swarmavg.config import AveragerConfig, Nonfinite, check_group_bits, check_seconds
from swarmavg.control import (
    StepControl,
    StepResult,
    StepState,
    check_scheduled_time,
    check_weight_argument,
)
from swarmavg.errors import AllreduceError, ClosedError, MatchmakingError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.peer import Peer
from swarmavg.planning.partition import Layout, default_part_size
from swarmavg.protocol.group import Role
from swarmavg.runtime.gathering import check_gather
from swarmavg.runtime.matchmaker import Matchmaker
from swarmavg.runtime.round_desk import RoundDesk
from swarmavg.telemetry.logs import get_logger
from swarmavg.tensor_checks import check_infos, check_tensors

_log = get_logger("swarmavg.averager")

WINDOWS_WITHOUT_TIMEOUT = 3
"""With `timeout=None`, a step looks for a group for this many matchmaking windows."""

HURRIED_LINGER = 0.5
"""Seconds for which results are still served to slower members when an exception, such as Ctrl-C, ends the ``async with``
block: the program is to be out of the swarm within two seconds, and others hold the same results."""


class AveragerOptions(TypedDict, total=False):
    """The optional arguments of `Averager`, for code that passes them on."""

    target_group_size: int | None
    min_group_size: int
    initial_group_bits: str
    min_matchmaking_time: float
    request_timeout: float
    averaging_alpha: float
    part_size_bytes: int | None
    allreduce_timeout: float | None
    next_chunk_timeout: float | None
    sender_timeout: float | None
    reducer_timeout: float | None
    compression: Compression
    state_compression: Compression | None
    tensor_infos: Sequence[TensorInfo] | None
    bandwidth: float | None
    min_vector_size: int
    nonfinite: Nonfinite
    client_mode: bool | None
    auxiliary: bool
    allow_state_sharing: bool
    declare_state_period: float | None
    shutdown_timeout: float


class Averager:
    """Averages tensors with the peers that use the same `prefix`.

        async with swarmavg.Averager([tensor], peer=peer, prefix="run", target_group_size=4) as averager:
            result = await averager.step(weight=1.0, gather={"loss": 0.1})

    Arguments:
        tensors: CPU tensors of float16, bfloat16, float32 or float64, averaged in place. Leaf tensors only: one with a
            `grad_fn` is refused, as are integer and bool tensors.
        peer: the started `Peer` it lives on; many averagers can share one.
        prefix: name of the run, without dots. One averager per prefix and peer.
        target_group_size: form groups of up to this many; `None` = everyone who shows up.
        min_group_size: do not average with fewer, at least 2.
        initial_group_bits: bucket as a string of "0" and "1"; only peers with the same bits meet. After each round the bits
            move on, so that groups of 2^k and k*(d-1) bits bring 2^(k*d) peers to the global mean in d rounds
            (Moshpit All-Reduce, https://arxiv.org/abs/2103.03239).
        min_matchmaking_time: seconds a group stays open when it is not full and not everyone known has arrived.
        request_timeout: seconds to wait for one answer from a would-be leader.
        averaging_alpha: ``local += alpha * (average - local)``.
        part_size_bytes: upper bound of one part on the wire; by default 256 KiB, 1 MiB for vectors of 16 MiB or more.
        allreduce_timeout: bound in seconds on one all-reduce once the group stands.
        next_chunk_timeout: default of `sender_timeout`.
        sender_timeout: seconds after which a contributor is suspected from which nothing came. By default 10, or 4 times the
            longest gap between arrivals on its channel, up to 60: a slow line that moves is not silent.
        reducer_timeout: the same for a reducer and for the coordinator; must exceed `sender_timeout`. By default twice the
            `sender_timeout` given, or 20, stretched likewise up to 120.
        compression: codec for averaging, such as `NoCompression()` or `Float16Compression()`.
        tensor_infos: one `TensorInfo` per tensor; derived by default.
        bandwidth: of this peer, in any unit common to the run; `None` = the mean of the group, 0 = others do the reducing.
        min_vector_size: a peer that would reduce fewer elements than this reduces none.
        nonfinite: ``"reject"``: a step whose own tensors hold NaN or infinities fails before anything is sent (unless its
            weight is 0), and a member that sends some is dropped, alone: one NaN would be in everybody's weights after one
            round. ``"allow"``: they are averaged like other numbers. Must be the same for all peers of a run.
        client_mode: cannot accept connections: never a leader, never a reducer. By default as the peer is.
        auxiliary: reduces for others, contributes and receives no tensors.
        shutdown_timeout: seconds that closing may take.
        state_compression: of the state download, which is not there yet: anything but `None` raises `NotImplementedError`.
        allow_state_sharing: likewise for anything but False.
        declare_state_period: likewise for anything but `None`.

    Raises:
        ValueError, TypeError: for bad arguments, with name and value, at construction.
    """

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
        _refuse_state_options(state_compression, allow_state_sharing, declare_state_period)
        if not isinstance(peer, Peer):
            raise TypeError(f"peer must be a swarmavg.Peer, got {peer!r}")
        self.config = AveragerConfig(
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
            bandwidth=bandwidth,
            min_vector_size=min_vector_size,
            nonfinite=nonfinite,
            client_mode=peer.client_mode if client_mode is None else client_mode,
            auxiliary=auxiliary,
            shutdown_timeout=shutdown_timeout,
        )
        if peer.client_mode and not self.config.client_mode:
            raise ValueError("client_mode=False on a peer that accepts no connections: give the peer an address to listen on")
        if peer.client_mode and auxiliary:
            raise ValueError("auxiliary=True on a peer in client mode: an auxiliary peer must be reachable to reduce")
        self.peer = peer
        self._tensors = check_tensors(tensors)
        self._infos = check_infos(tensor_infos, self._tensors)
        codec = compression if compression is not None else NoCompression()
        self._layout = Layout.of(self._infos, codec_per_tensor(codec, self._infos))
        self._part_size = part_size_bytes if part_size_bytes is not None else default_part_size(self._layout)
        _check_part_size(min(self._part_size, self._layout.nbytes), peer.limits.message_bytes)
        self._planner = RoundPlanner(self._layout, self._part_size, min_vector_size)
        self._bits = initial_group_bits
        self._lock = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._steps: set[asyncio.Task[StepResult]] = set()
        self._matchmaker: Matchmaker | None = None
        self._desk: RoundDesk | None = None
        self._unserve: Callable[[], None] | None = None
        self._round: AveragingRound | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._linger = shutdown_timeout

    # Life

    async def start(self) -> Self:
        """Announce this averager. Returns at once if it runs already."""
        if self._closed:
            raise ClosedError(f"averager {self.prefix!r} is closed")
        self.peer.check_running()
        if self._matchmaker is not None:
            return self
        config = self.config
        matchmaker = Matchmaker(
            self.peer,
            prefix=config.prefix,
            role=self.role,
            config=match_config(
                self._layout,
                part_size_bytes=self._part_size,
                min_vector_size=config.min_vector_size,
                nonfinite=config.nonfinite,
                target_group_size=config.target_group_size,
            ),
            target_group_size=config.target_group_size,
            min_group_size=config.min_group_size,
            request_timeout=config.request_timeout,
            window=config.min_matchmaking_time,
            plan_hash=self._planner.hash_for,
            rng=random.Random(self.peer.rng.random()),  # noqa: S311  (spreads load, guards nothing)
            bits=self._bits,
            on_member_lost=self._on_member_lost,
        )
        self._desk = RoundDesk(matchmaker.adopt, patience=config.request_timeout)
        self._round = AveragingRound(
            self.peer,
            purpose=f"round:{config.prefix}",
            config=config,
            planner=self._planner,
            tensors=self._tensors,
            lock=self._lock,
            desk=self._desk,
        )
        try:
            self._unserve = self.peer.serve(f"round:{config.prefix}", self._desk.handle)
        except ValueError:
            raise ValueError(f"prefix={config.prefix!r} has an averager on this peer already") from None
        try:
            await matchmaker.start()
        except BaseException:
            self._unserve()
            raise
        self._matchmaker = matchmaker
        self.peer.closing_with(self)
        self.peer.round_counters(self.prefix)
        return self

    async def aclose(self) -> None:
        """Cancel pending steps, tell group mates, withdraw what was announced. Bounded by `shutdown_timeout`, never raises.

        A second call waits for the first. A call that is cancelled goes on in the background, to the same bound.
        """
        if self._closing is None:
            self._closed = True
            if self._matchmaker is None or not self.peer.in_its_loop():
                self.peer.no_longer_closing_with(self)
                return
            self._closing = asyncio.create_task(self._wind_down(), name=f"close-{self.prefix}")
        await asyncio.wait([self._closing], timeout=self.config.shutdown_timeout)

    async def _wind_down(self) -> None:
        """Ends by itself, within two seconds after `shutdown_timeout` at most."""
        steps = list(self._steps)
        try:
            for task in steps:
                task.cancel("the averager is closing")
            await asyncio.gather(*steps, return_exceptions=True)
            assert self._round is not None
            assert self._matchmaker is not None
            await asyncio.gather(self._round.aclose(self._linger), self._matchmaker.aclose())
        finally:
            if self._unserve is not None:
                self._unserve()
            self.peer.no_longer_closing_with(self)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._linger = min(self._linger, HURRIED_LINGER)
        await self.aclose()

    # What it is

    @property
    def prefix(self) -> str:
        return self.config.prefix

    @property
    def peer_id(self) -> PeerId:
        return self.peer.id

    @property
    def role(self) -> Role:
        if self.config.auxiliary:
            return Role.AUXILIARY
        return Role.CLIENT if self.config.client_mode else Role.NODE

    @property
    def mode(self) -> str:
        """``"node"``, ``"client"`` or ``"auxiliary"``."""
        return self.role.value

    @property
    def total_size(self) -> int:
        """Elements of all tensors together."""
        return self._layout.total

    @property
    def schema_hash(self) -> str:
        """Hash of the tensors' shapes and dtypes: peers with another one are not averaged with."""
        return schema_hash(self._infos)

    @property
    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        return self._infos

    def get_group_bits(self) -> str:
        """The bits under which the next group is looked for."""
        return self._bits

    def set_group_bits(self, bits: str) -> None:
        """Set them, for the next attempt. Raises `TypeError` or `ValueError`."""
        self._bits = check_group_bits("bits", bits)
        if self._matchmaker is not None and not self._closed:
            self._matchmaker.round_state(bits=self._bits)

    def story(self, round_id: GroupId | str | None = None) -> str:
        """What happened in one of the latest 32 rounds, in plain words: who was suspected of what, who was left out and why,
        who took over which parts. A line each, with seconds of the event loop's clock and the term.

        `round_id` is that of a `StepResult`, or the text in an error's message; by default the last round.
        Raises `ValueError` for a round that is not among them.
        """
        self._check_started()
        assert self._round is not None
        return self._round.story(round_id)

    @asynccontextmanager
    async def get_tensors(self) -> AsyncIterator[Sequence[torch.Tensor]]:
        """The tensors, under a lock: inside the block the averager neither reads nor changes them.

        Do not await `step` inside: it could not finish.
        """
        async with self._lock:
            yield self._tensors

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._matchmaker is not None else "not started"
        return f"<Averager {self.prefix!r}, {self.mode}, {self.total_size} elements, {state}>"

    # Averaging

    @overload
    async def step(
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
    async def step(
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
    async def step(
        self,
        gather: Any = None,
        weight: float | None = None,
        timeout: float | None = None,
        scheduled_time: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> StepResult | StepControl: ...

    async def step(
        self,
        gather: Any = None,
        weight: float | None = None,
        timeout: float | None = None,
        scheduled_time: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> StepResult | StepControl:
        """Find a group, average with it, and update the tensors in place. Steps called at once queue up, in order.

        Arguments:
            gather: any msgpack-able value of up to 64 KiB; every member receives those of all.
            weight: of this peer's tensors in the average: 0, or from 1e-18 to 1e18; 1 by default. 0 receives the average and
                contributes nothing.
            timeout: seconds for the whole call. `None` = look for a group for at most three matchmaking windows;
                `math.inf` = for ever.
            scheduled_time: moment of the event loop's clock (`time.monotonic()`) before which the round does not begin;
                `None` = as soon as the group may.
            allow_retries: try again within `timeout` after a group that failed.
            require_trigger: with ``wait=False``: matchmaking runs at once, the all-reduce waits for
                `StepControl.allow_allreduce`.
            wait: with False, returns a `StepControl` at once.

        Raises:
            MatchmakingError: no group in time; the message says who was seen.
            AllreduceError: a group stood, but the average could not be had.
            ClosedError: the averager is not running, or was closed during the step.
            ValueError, TypeError: bad arguments.
        After any exception the tensors hold what they held before. The one exception: a cancellation that arrives while the
        averages are being written lets that end, and is raised then.
        """
        self._check_running()
        now = asyncio.get_running_loop().time()
        check_seconds("timeout", timeout, optional=True, infinite=True)
        deadline = now + (timeout if timeout is not None else float("inf"))
        if require_trigger and wait:
            raise ValueError("require_trigger=True needs wait=False: nobody could trigger a call that waits")
        state = StepState(
            weight=self._weight(weight),
            scheduled_time=check_scheduled_time(scheduled_time, deadline, now),
            deadline=deadline,
            triggered=not require_trigger,
        )
        packed = check_gather(gather)
        task = asyncio.create_task(self._run(state, packed, allow_retries, timeout), name=f"step-{self.prefix}")
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        if not wait:
            task.add_done_callback(_retrieve)
            return StepControl(state, task)
        return await self._join(task)

    async def load_state(self, timeout: float | None = None) -> Any:
        """Not there yet: raises `NotImplementedError`."""
        raise NotImplementedError("the state download is not there yet")

    load_state_from_peers = load_state

    # Inside

    def _check_started(self) -> None:
        if self._matchmaker is None:
            raise ClosedError(f"averager {self.prefix!r} has not been started: use `async with` or await start()")

    def _check_running(self) -> None:
        if self._closed:
            raise ClosedError(f"averager {self.prefix!r} is closed")
        self._check_started()
        self.peer.check_running()

    def _on_member_lost(self, group_id: GroupId, peer: PeerId, reason: str) -> None:
        if self._desk is not None:
            self._desk.member_left(group_id, peer, reason)

    def _weight(self, weight: float | None) -> float:
        if self.config.auxiliary:
            if weight is not None:
                _log.warning("an auxiliary peer contributes nothing: its weight is not used", weight=weight)
            return 0.0
        return 1.0 if weight is None else check_weight_argument(weight)

    async def _run(self, state: StepState, gather: bytes, allow_retries: bool, timeout: float | None) -> StepResult:
        try:
            async with asyncio.timeout_at(None if state.deadline == float("inf") else state.deadline):
                await self._turn.acquire()
        except TimeoutError:
            raise MatchmakingError(f"the timeout of {timeout} s passed while an earlier step was still running") from None
        try:
            return await self._attempts(state, gather, allow_retries, bounded=timeout is not None)
        finally:
            self._turn.release()

    async def _join(self, task: asyncio.Task[StepResult]) -> StepResult:
        """Await a step that this call owns: cancelling the call cancels the step.

        A cancellation that arrives during the commit, which cannot be undone, lets the step finish and is then passed on.
        """
        caller = asyncio.current_task()
        assert caller is not None
        before = caller.cancelling()
        try:
            result = await task
        except asyncio.CancelledError:
            if self._closed and caller.cancelling() <= before:  # nobody has cancelled the caller
                raise ClosedError(f"averager {self.prefix!r} was closed during the step") from None
            raise
        if caller.cancelling() > before:
            raise asyncio.CancelledError
        return result

    async def _attempts(self, state: StepState, gather: bytes, allow_retries: bool, *, bounded: bool) -> StepResult:
        assert self._matchmaker is not None
        assert self._round is not None
        loop = asyncio.get_running_loop()
        if bounded:
            search_until = state.deadline
        else:
            earliest = max(loop.time(), state.scheduled_time or 0.0)
            search_until = earliest + WINDOWS_WITHOUT_TIMEOUT * self.config.min_matchmaking_time
        counters = self.peer.round_counters(self.prefix)
        attempts = 0
        failure: AllreduceError | None = None
        while True:
            attempts += 1
            self._check_running()
            bits = self._bits
            try:
                result, next_bits = await self._round.attempt(
                    state, self._matchmaker, bits=bits, gather=gather, search_until=search_until, attempts=attempts
                )
            except MatchmakingError as error:
                raise self._with_bootstrap_failures(error) from failure  # what happened to the group before says more
            except AllreduceError as error:
                counters.note_failed()
                if not allow_retries or isinstance(error, OwnFailureError) or loop.time() >= search_until:
                    raise
                failure = error
                _log.info("round failed, looking for another group", prefix=self.prefix, attempt=attempts, error=str(error))
                continue
            counters.note_finished(
                group_size=result.group_size,
                fraction=result.fraction,
                seconds=result.allreduce_seconds,
                sent=result.bytes_sent,
                received=result.bytes_received,
            )
            if self._bits == bits:  # unless the user has set others meanwhile
                self._bits = next_bits
            return result

    def _with_bootstrap_failures(self, error: MatchmakingError) -> MatchmakingError:
        """The same error, naming also the bootstrap addresses behind which others may be."""
        failures = self.peer.bootstrap_failures()
        if not failures:
            return error
        reasons = "; ".join(f"bootstrap address {address}: {reason}" for address, reason in failures.items())
        return MatchmakingError(f"{error.message}; {reasons}", error.seen)


def _retrieve(task: asyncio.Task[StepResult]) -> None:
    """The failure of a step in the background that nobody awaits is logged, instead of being reported as forgotten."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.info("step failed", step=task.get_name(), error=str(error))


def _check_part_size(size: int, limit: float) -> None:
    if size > limit:
        raise ValueError(
            f"parts of {size} bytes exceed the peer's limit message_bytes={limit:g}: give a smaller part_size_bytes (the same "
            "to all peers), or raise the limit"
        )


def _refuse_state_options(compression: object, sharing: object, period: object) -> None:
    """The state download is not there yet: its options are refused instead of being ignored."""
    for name, given in (
        ("state_compression", compression is not None),
        ("allow_state_sharing", sharing is not False),
        ("declare_state_period", period is not None),
    ):
        if given:
            raise NotImplementedError(f"{name}: the state download is not there yet")
