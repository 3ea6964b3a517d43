"""What happens to a round's machine (events) and what it wants done (effects). Positions are those of the group's members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import ControlMessage, Fencing, LinkId, Term
from swarmavg.protocol.round_jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSetting:
    """What a member knows as its round begins."""

    me: int
    names: Sequence[str]
    """Of the members, for people."""
    salt: bytes
    """The group id's bytes."""
    leader: int
    serves: frozenset[int]
    """Members that accept channels: they may coordinate and reduce."""
    receives: frozenset[int]
    """Members that contribute inputs and receive results."""
    owners: Sequence[int]
    """The reducer of each part, in the plan's order."""
    request_timeout: float
    """Seconds for one answer."""
    patience: float
    """Seconds after which members notice that somebody is silent."""
    holdings: Callable[[], int]
    """Bit p set = this member holds the result of part p."""
    heard: Callable[[int], bool]
    """Whether anything came from a member lately, on any channel."""

    @property
    def succession(self) -> tuple[int, ...]:
        """Who coordinates, and who takes over from whom."""
        return (self.leader, *(member for member in sorted(self.serves) if member != self.leader))


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A data channel is gone before its work was done, or never came."""

    link: LinkId
    accused: int
    code: ExclusionCode
    detail: str


@dataclass(frozen=True, slots=True)
class ControlUp:
    """A control channel with a member stands."""

    member: int


@dataclass(frozen=True, slots=True)
class ControlLost:
    """The last control channel with a member is gone, or could not be opened."""

    member: int
    code: ExclusionCode
    detail: str
    fenced_by: Fencing | None = None
    """The other side closed it because this member is out."""
    closed: bool = False
    """The other side knows that everybody has everything."""


@dataclass(frozen=True, slots=True)
class ControlMissing:
    """A member should have opened its control channel by now."""

    member: int
    detail: str


@dataclass(frozen=True, slots=True)
class MessageCame:
    """A control message."""

    sender: int
    term: Term
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class TermSeen:
    """A data channel mentioned a term."""

    sender: int
    term: Term


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A member has said that it takes no part."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Somebody has fetched all results of the own range (`job` is `None`) or of a job of the present term."""

    job: int | None


@dataclass(frozen=True, slots=True)
class CommitBegun:
    """The averages are being written. Only while `Round.may_commit`."""


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """The averages are written."""


@dataclass(frozen=True, slots=True)
class LeaveRound:
    """The own member gives up."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeldUp:
    """The own process stood still for so many seconds: what arrived meanwhile has yet to be read."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `Round.next_deadline` has come."""


RoundEvent = (
    LinkFailed
    | ControlUp
    | ControlLost
    | ControlMissing
    | MessageCame
    | TermSeen
    | MemberLeft
    | Acknowledged
    | CommitBegun
    | CommitEnded
    | LeaveRound
    | HeldUp
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message; where there is no channel, open one if the member accepts channels, else wait for it."""

    to: int
    term: Term
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Open:
    """Have a control channel with this member: `ControlUp` or `ControlLost` follows, unless there is one already."""

    member: int


@dataclass(frozen=True, slots=True)
class Drop:
    """A member is out: end its data channels, take nothing more from it."""

    member: int
    code: ExclusionCode
    detail: str


@dataclass(frozen=True, slots=True)
class Sever:
    """Both ends live, but this data channel is over."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Jobs:
    """Do these, and none of an earlier term."""

    term: Term
    jobs: tuple[Job, ...]


RoundEffect = Send | Open | Drop | Sever | Jobs
