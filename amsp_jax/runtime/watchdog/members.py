"""What is known of each process of a run, and who of them is lost or hangs. No sockets, no threads."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

from amsp_jax.runtime.watchdog.messages import Message

_MOST_NAMES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds, and how they are counted.

    Attributes:
      heartbeat_s: between two reports of a process.
      silence_s: without a report after which a process is taken for stopped, its node or its network for lost.
      join_s: for all processes to connect to process 0.
      leave_s: that the others may work on after one has ended in good order.
      farewell_s: that a process which ends waits for process 0 to hear of it.
      step_at_least_s, step_factor: the limit of a step is the first, or this many times the longest of the last steps.
      first_step_s: the limit of a step before any was measured; it sets up the communication.
    """

    heartbeat_s: float = 2.0
    silence_s: float = 15.0
    join_s: float = 60.0
    leave_s: float = 30.0
    farewell_s: float = 2.0
    step_at_least_s: float = 20.0
    step_factor: float = 5.0
    first_step_s: float = 600.0


class AwakeClock:
    """Seconds in which this process ran: while it, or the whole job, is suspended nobody is late.

    Attributes:
      now: seconds since the clock was made.
    """

    def __init__(self, longest_step_s: float) -> None:
        self.now = 0.0
        self._longest_step_s = longest_step_s
        self._last = time.monotonic()

    def advance(self) -> None:
        """To be called often; of a longer pause only `longest_step_s` count."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, self._longest_step_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """What the main thread of a process does: `stage`, since `age_s`, in or after training step `step`."""

    stage: str = "starting"
    step: int | None = None
    age_s: float = 0.0
    limit_s: float | None = None

    @property
    def is_late(self) -> bool:
        """Past the limit of its stage."""
        return self.limit_s is not None and self.age_s > self.limit_s

    def __str__(self) -> str:
        return self.stage if self.step is None else f"{self.stage} at step {self.step}"

    def message(self) -> Message:
        """As it travels."""
        return {"kind": "status", **dataclasses.asdict(self)}

    @classmethod
    def of(cls, message: Message) -> Status:
        """The inverse of `message`."""
        return cls(**{name: value for name, value in message.items() if name != "kind"})


@dataclasses.dataclass
class Member:
    """One process, as another sees it.

    Attributes:
      index, host: which one.
      heard_at: on the clock of who sees it, when it last reported.
      has_joined: it has connected.
      left_at: when it said that it ends in good order; None while it works.
      status: its last report.
      passed: how many boundaries it has passed when it was asked to stop; None before it answers.
    """

    index: int
    host: str
    heard_at: float = 0.0
    has_joined: bool = False
    left_at: float | None = None
    status: Status = Status()
    passed: int | None = None

    def __str__(self) -> str:
        return f"process {self.index} on {self.host}"

    def hears(self, message: Message, now: float) -> None:
        """Takes a report in."""
        self.heard_at, self.status = now, Status.of(message)

    def lost(self, why: str) -> str:
        """The line that says so."""
        return f"{self} is lost: {why}. Its last report: {self.status}."

    def silent(self, now: float, limits: Limits) -> str | None:
        """The line that says it has not come, or has been silent for too long; None if neither."""
        silence = now - self.heard_at
        if self.left_at is not None or silence <= (limits.silence_s if self.has_joined else limits.join_s):
            return None
        if not self.has_joined:
            return (
                f"{self} did not connect to process 0 within {limits.join_s:g} s. See its messages, and check that the "
                "nodes reach one another at all ports."
            )
        return self.lost(f"nothing was heard of it for {silence:.0f} s (stopped, or its node or network is down)")


def hang(members: Sequence[Member]) -> str | None:
    """The line that says who hangs, None if nobody does.

    Those hold up the others that are at the least step or, where all are at one step, in another stage than most. They
    hang once all of them are past their limits: in a stage without a limit a process may be waited for for ever.
    """
    late = [member for member in members if member.status.is_late]
    if not late:
        return None
    behind = _behind(members)
    if not all(member.status.is_late for member in behind):
        return None
    slowest = max(behind, key=lambda member: member.status.age_s)
    what = f"{slowest.status} for {slowest.status.age_s:.0f} s, limit {slowest.status.limit_s:g} s"
    if len(behind) == len(members) > 1:
        return f"all {len(members)} processes hang: {what}. A device or the network between the nodes hangs."
    others = [member.status for member in members if member not in behind]
    most = f"; the others are {collections.Counter(map(str, others)).most_common(1)[0][0]}" if others else ""
    return f"{_names(behind)} {'hangs' if len(behind) == 1 else 'hang'}: {what}{most}."


def _behind(members: Sequence[Member]) -> list[Member]:
    """Those whom the others wait for; all, if nothing sets them apart."""
    least = min(_step(member) for member in members)
    behind = [member for member in members if _step(member) == least]
    if len(behind) < len(members):
        return behind
    stages = collections.Counter(member.status.stage for member in members)
    if len(stages) == 1:
        return behind
    (most, count), (_, second) = stages.most_common(2)
    if count > second:
        return [member for member in members if member.status.stage != most]
    # Who came into its stage first is the one that did not get on.
    oldest = max(members, key=lambda member: member.status.age_s)
    return [member for member in members if member.status.stage == oldest.status.stage]


def _step(member: Member) -> int:
    return -1 if member.status.step is None else member.status.step


def _names(members: Sequence[Member]) -> str:
    if len(members) == 1:
        return str(members[0])
    indices = ", ".join(str(member.index) for member in members[:_MOST_NAMES])
    hosts = ", ".join(list(dict.fromkeys(member.host for member in members))[:_MOST_NAMES])
    return f"processes {indices}{', ...' if len(members) > _MOST_NAMES else ''} on {hosts}"


def hello(index: int, key: str) -> Message:
    """The first message of a process to process 0."""
    return {"kind": "hello", "index": index, "key": key}


def end(code: int, line: str, grace_s: float = 0.0) -> Message:
    """The message that ends every process with `code`; after `grace_s` if it has not done so by itself."""
    return {"kind": "end", "code": code, "line": line, "grace_s": grace_s}
