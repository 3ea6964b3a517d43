"""All-reduce of one float32 vector between processes on loopback: `await averager.step()` beside Gloo's `all_reduce`.

Every process does both in turn, on the same data, with a barrier before each measurement; a run's figure is the slowest
process's. Medians over the runs, with their range.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import swarmavg
from swarmavg.compression import Float16Compression, NoCompression
from swarmavg.compression.interface import Compression
from swarmavg_bench.loopwatch import Blocking, watch_callbacks

CODECS: dict[str, Callable[[], Compression]] = {"none": NoCompression, "float16": Float16Compression}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("allreduce", help="all-reduce beside Gloo", description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--size", type=float, default=64.0, help="megabytes (2^20 bytes) of float32 per process")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one for warming up")
    parser.add_argument("--compression", choices=sorted(CODECS), default="none")
    parser.add_argument("--part-size", type=int, help="bytes; by default what the averager chooses")
    parser.add_argument("--tls", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--json", type=Path, help="write machine, versions and every sample there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.worker:
        return _worker(json.loads(arguments.worker))
    samples = _run_workers(arguments)
    rows = [_row(name, [max(per_round) for per_round in zip(*by_worker, strict=True)]) for name, by_worker in samples.items()]
    baseline = next(row["median"] for row in rows if row["name"] == "gloo all_reduce")
    print(
        f"{arguments.peers} processes x {arguments.size:g} MiB float32, n={arguments.rounds}, codec {arguments.compression}, ",
        end="",
    )
    print(f"{'TLS' if arguments.tls else 'plaintext'}, {'uvloop' if arguments.uvloop else 'asyncio'}")
    for row in rows:
        unit = f"{row['median']:9.4f} s   ({row['least']:.4f} - {row['most']:.4f})"
        ratio = "" if row["name"].startswith(("loop", "CPU")) else f"   {row['median'] / baseline:5.2f} x gloo"
        print(f"  {row['name']:28s} {unit}{ratio}")
    if arguments.json:
        report = {"machine": _machine(), "arguments": _plain(arguments), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _row(name: str, values: list[float]) -> dict[str, Any]:
    return {"name": name, "median": statistics.median(values), "least": min(values), "most": max(values), "samples": values}


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if isinstance(value, int | float | str | bool)}


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _run_workers(arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Per measurement, the samples of each worker."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**_plain(arguments), "folder": folder, "token": swarmavg.generate_token() if arguments.tls else None}
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "swarmavg_bench.main", "allreduce", "--worker", json.dumps({**settings, "rank": rank})],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(arguments.peers)
        ]
        try:
            outputs = [worker.communicate(timeout=600)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"a worker failed: exit codes {[worker.returncode for worker in workers]}")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {name: [result[name] for result in results] for name in results[0]}


def _worker(settings: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    store = Path(settings["folder"]) / "store"
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=settings["rank"], world_size=settings["peers"])
    if settings["uvloop"]:
        import uvloop  # noqa: PLC0415  (an extra)

        samples = uvloop.run(_measure(settings))
    else:
        samples = asyncio.run(_measure(settings))
    print(json.dumps(samples))
    dist.destroy_process_group()
    return 0


async def _measure(settings: dict[str, Any]) -> dict[str, list[float]]:
    rank, peers = settings["rank"], settings["peers"]
    elements = int(settings["size"] * 2**20 / 4)
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
    mine = torch.empty_like(tensor)
    samples: dict[str, list[float]] = {}
    bootstrap = await _bootstrap(settings)
    async with (
        swarmavg.Peer(listen=["tcp://127.0.0.1:0"], bootstrap=bootstrap, token=settings["token"]) as peer,
        swarmavg.Averager(
            [mine],
            peer=peer,
            prefix="bench",
            target_group_size=peers,
            compression=CODECS[settings["compression"]](),
            part_size_bytes=settings.get("part_size"),
        ) as averager,
    ):
        if rank == 0:
            (Path(settings["folder"]) / "address").write_text(peer.join_line)
        for number in range(settings["rounds"] + 1):
            mine.copy_(tensor)
            cpu = time.process_time()
            seconds = await _timed(lambda: asyncio.to_thread(dist.all_reduce, mine))
            _keep(samples, "gloo all_reduce", seconds, number)
            _keep(samples, "CPU of gloo, all threads", time.process_time() - cpu, number)
            expected = mine / peers
            mine.copy_(tensor)
            results: list[swarmavg.StepResult] = []
            cpu = time.process_time()
            seconds = await _timed(partial(_step, averager, results))
            _keep(samples, "await averager.step()", seconds, number)
            _keep(samples, "CPU of step(), all threads", time.process_time() - cpu, number)
            _keep(samples, "of it, the all-reduce", results[0].allreduce_seconds, number)
            _check(mine, expected, settings["compression"])
            if not settings["uvloop"]:  # whose callbacks cannot be watched
                with watch_callbacks() as blocking:  # in a round of its own: watching costs time
                    await _timed(partial(_step, averager, results))
                _keep_blocking(samples, blocking, number)
        await asyncio.to_thread(dist.barrier)
    return samples


async def _step(averager: swarmavg.Averager, results: list[swarmavg.StepResult]) -> None:
    results.append(await averager.step(timeout=120))


async def _bootstrap(settings: dict[str, Any]) -> list[str]:
    address = Path(settings["folder"]) / "address"
    if settings["rank"] == 0:
        return []
    while not (address.exists() and address.read_text()):
        await asyncio.sleep(0.01)
    return [address.read_text()]


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    await asyncio.to_thread(dist.barrier)
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def _keep(samples: dict[str, list[float]], name: str, value: float, number: int) -> None:
    if number:  # the first round warms up
        samples.setdefault(name, []).append(value)


def _keep_blocking(samples: dict[str, list[float]], blocking: Blocking, number: int) -> None:
    _keep(samples, "loop blocked, longest CPU", blocking.cpu, number)
    _keep(samples, "loop blocked, longest wall", blocking.wall, number)


def _check(got: torch.Tensor, expected: torch.Tensor, compression: str) -> None:
    error = (got - expected).abs().max().item()
    if error > {"none": 1e-5, "float16": 1e-2}[compression]:
        raise SystemExit(f"wrong average: off by {error}")
