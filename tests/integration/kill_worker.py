"""One peer of `test_kill`: averages once, may kill itself in mid-round, and prints what it saw as one JSON line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import torch

import swarmavg

ELEMENTS = 4_000_000


async def main(index: int, token: str, bootstrap: str, *, dies: bool) -> None:
    tensor = torch.full((ELEMENTS,), float(index))
    async with (
        swarmavg.Peer(listen=["tcp://127.0.0.1:0"], bootstrap=[bootstrap] if bootstrap else [], token=token) as peer,
        swarmavg.Averager([tensor], peer=peer, prefix="kill", target_group_size=4, min_group_size=4) as averager,
    ):
        print(peer.join_line, flush=True)
        control = await averager.step(gather=index, timeout=60, allow_retries=False, wait=False)
        if dies:
            await _die_in_mid_round(control)
        print(json.dumps(await _outcome(control, tensor)), flush=True)
        tensor.fill_(float(index))
        async with swarmavg.Averager([tensor], peer=peer, prefix="again", target_group_size=3, min_group_size=3) as survivors:
            again = await survivors.step(gather=index, timeout=60)
        print(
            json.dumps({"group": sorted(again.values()), "value": tensor[0].item(), "even": bool(tensor.eq(tensor[0]).all())})
        )


async def _die_in_mid_round(control: swarmavg.StepControl) -> None:
    while control.progress < 0.3:
        await asyncio.sleep(0)
    assert control.stage is swarmavg.AveragingStage.RUNNING_ALLREDUCE
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


async def _outcome(control: swarmavg.StepControl, tensor: torch.Tensor) -> dict[str, Any]:
    before = float(tensor[0])
    try:
        result = await control
    except swarmavg.SwarmError as error:
        return {"error": type(error).__name__, "unchanged": bool(tensor.eq(before).all())}
    wrong = 0
    for span, members in result.contributors:
        expected = sum(result[member] for member in members) / len(members)
        wrong += int(tensor[span.start : span.stop].ne(expected).sum())
    for span in result.missing:
        wrong += int(tensor[span.start : span.stop].ne(before).sum())
    return {
        "fraction": result.fraction,
        "wrong": wrong,
        "excluded": {str(result[peer]): exclusion.code.value for peer, exclusion in result.excluded.items()},
    }


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], dies=sys.argv[4] == "dies"))
