"""Control messages in plain words, for the story of a round."""

from __future__ import annotations

from swarmavg.protocol.round_control import (
    Alive,
    Ask,
    Assign,
    Closed,
    ControlBeat,
    ControlMessage,
    Done,
    Fence,
    Heard,
    Leave,
    Probe,
    Report,
    Suspect,
)
from swarmavg.protocol.round_events import RoundSetting
from swarmavg.protocol.round_jobs import Job


def in_words(message: ControlMessage, setting: RoundSetting) -> str:
    """What a message says, in the first person of its sender."""
    names = setting.names
    match message:
        case Suspect():
            if message.left:
                return f"{names[message.accused]} has left: {message.detail}"
            return f"I suspect {names[message.accused]}: {message.code.value}, {message.detail}"
        case Probe():
            return "are you there?"
        case Alive():
            return "I am here"
        case Ask():
            return f"have you heard from {names[message.about]}?"
        case Heard():
            return f"I hear {names[message.about]}"
        case Fence():
            return _fence(message, setting)
        case Report():
            held = f"I hold {message.held.bit_count()} of {len(setting.owners)} parts"
            return held + (", and have committed" if message.committed else "")
        case Assign():
            return "; ".join(job_in_words(job, setting) for job in message.jobs) or "go on as before"
        case Done():
            return "I have everything and have committed"
        case Closed():
            return "everybody has everything: the round is over"
        case Leave():
            return f"I leave: {message.reason}"
        case ControlBeat():
            return f"I am alive and lack {message.missing} parts"


def job_in_words(job: Job, setting: RoundSetting) -> str:
    server, parts = setting.names[job.server], f"{len(job.parts)} part{'s' * (len(job.parts) != 1)}"
    if job.holder is None:
        return f"{server} reduces {parts} anew from {job.contributors.bit_count()} inputs"
    if job.holder == job.server:
        return f"{server} passes on {parts}"
    return f"{server} passes on {parts} that {setting.names[job.holder]} holds or gets"


def _fence(message: Fence, setting: RoundSetting) -> str:
    names = setting.names
    out = "; ".join(f"{names[position]} ({code.value}: {detail})" for position, code, detail in message.out)
    severed = ", ".join(
        f"{names[s.link.contributor]} to {names[s.link.reducer]} ({s.code.value}: {s.detail})" for s in message.severed
    )
    return f"a new term, without {out or 'nobody'}" + (f"; channels that failed: {severed}" if severed else "")
