"""What the member's and the coordinator's half of a round's machine share: the term, who is out, effects, the story."""

from __future__ import annotations

from typing import Final

from swarmavg.errors import LocalProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import ControlBeat, ControlMessage, Fence, LinkId, Severed, Term
from swarmavg.protocol.round_events import RoundEffect, RoundSetting, Send
from swarmavg.protocol.round_states import TRANSITIONS, RoundCause, RoundState
from swarmavg.protocol.round_words import in_words

STORY_LINES: Final = 500


class RoundCore:
    """One member's view of the round."""

    def __init__(self, setting: RoundSetting) -> None:
        self.setting = setting
        self.me = setting.me
        self.succession = setting.succession
        self.term = Term(0, 0)
        self.state = RoundState.RUNNING
        self.fence = Fence(out=(), severed=())
        self.out: dict[int, tuple[ExclusionCode, str]] = {}
        self.severed: dict[LinkId, Severed] = {}
        self.connected: set[int] = set()
        """Members with which a control channel stands."""
        self.told: set[int] = set()
        """Members to which the present fence was sent, on a channel that still stands."""
        self.effects: list[RoundEffect] = []
        self.story: list[str] = []

    @property
    def coordinator(self) -> int:
        return self.succession[self.term.rank]

    @property
    def live(self) -> frozenset[int]:
        return frozenset(range(len(self.setting.names))) - self.out.keys()

    @property
    def everything(self) -> int:
        """Bits of all parts."""
        return (1 << len(self.setting.owners)) - 1

    def move(self, cause: RoundCause, now: float) -> None:
        after = TRANSITIONS.get((self.state, cause))
        if after is None:
            raise LocalProtocolError(f"a round cannot go on from {self.state.value} by {cause.value!r}")
        if after is not self.state:
            self.tell(now, f"{self.state.value} -> {after.value}: {cause.value}")
        self.state = after

    def send(self, to: int, message: ControlMessage, now: float) -> None:
        self.effects.append(Send(to, self.term, message))
        if isinstance(message, Fence):
            self.told.add(to)
        if not isinstance(message, ControlBeat):
            self.tell(now, f"to {self.name(to)}: {in_words(message, self.setting)}")

    def repeat_fence(self, to: int, now: float) -> None:
        """Send the present fence to a member that seems to have missed it, once."""
        if to not in self.told:
            self.send(to, self.fence, now)

    def name(self, member: int) -> str:
        return self.setting.names[member]

    def names(self, members: object) -> str:
        listed = sorted(members) if isinstance(members, set | frozenset | dict) else []
        return ", ".join(self.name(member) for member in listed) or "nobody"

    def tell(self, now: float, line: str) -> None:
        self.story.append(f"{now:12.3f}  term {self.term}  {line}")
        if len(self.story) > STORY_LINES:
            del self.story[STORY_LINES // 5 : STORY_LINES // 5 * 2]  # the beginning and the end say most
