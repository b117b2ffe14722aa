"""The two ends of the watch: process 0 hears all, decides and tells all; each other process has a link to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from amsp_jax.runtime.exit_codes import INTERRUPTED, PEER_LOST, STOPPED, USER_ERROR
from amsp_jax.runtime.watchdog.members import AwakeClock, Limits, Member, end, hang, hello
from amsp_jax.runtime.watchdog.messages import Line, Message, encode

# After a mistake that all processes find, each says so itself and needs a moment for it.
_SAY_SO_S = 5.0
_POLL_S = 0.02


def say(line: str) -> None:
    """Prints to stderr past Python's buffers, whose lock a main thread that hangs may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


@dataclasses.dataclass
class _Stop:
    """A stop that is being agreed on: who was asked, by which signal."""

    member: Member
    signal: str


class Hub:
    """Process 0's end. A lone process has one as well, with itself as the only member.

    Args:
      hosts: of the processes, in order.
      limits: see there.
      clock: which the owner advances.
      deliver: called with each message for process 0 itself.
    """

    def __init__(
        self, hosts: Sequence[str], limits: Limits, clock: AwakeClock, deliver: Callable[[Message], None]
    ) -> None:
        self._members = [Member(index, host, clock.now) for index, host in enumerate(hosts)]
        self._members[0].has_joined = True
        self._limits, self._clock, self._deliver = limits, clock, deliver
        self._open_lines: set[Line] = set()
        self._lines: dict[Line, Member] = {}
        self._selector: selectors.BaseSelector | None = None
        self._stop: _Stop | None = None
        self._end: Message | None = None
        self._late_since: float | None = None

    def open(self, selector: selectors.BaseSelector, listener: socket.socket, key: str) -> None:
        """Lets the others in, who know `key`."""
        listener.setblocking(False)
        # One of its own inside the owner's, as `drain` serves the others alone.
        self._selector = own = selectors.DefaultSelector()
        own.register(listener, selectors.EVENT_READ, functools.partial(self._accept, own, listener, key))
        selector.register(own, selectors.EVENT_READ, lambda: self._serve(own, 0.0))

    def post(self, message: Message) -> None:
        """Takes in what process 0 says itself."""
        self._hear(self._members[0], message)

    def beat(self, status: Message) -> None:
        """To be called every `heartbeat_s`, with process 0's own status."""
        self.post(status)
        self._broadcast(status)
        if self._end is None:
            self._judge()

    def drain(self) -> None:
        """Waits until the others have closed their ends: what they have not read is lost when this process ends."""
        deadline = time.monotonic() + self._limits.farewell_s
        while self._selector and time.monotonic() < deadline:
            if not self._lines and all(member.has_joined for member in self._members):
                return
            for line in list(self._lines):
                line.flush()
            self._serve(self._selector, _POLL_S)

    def _serve(self, selector: selectors.BaseSelector, timeout_s: float) -> None:
        for key, _ in selector.select(timeout_s):
            key.data()

    def _accept(self, selector: selectors.BaseSelector, listener: socket.socket, key: str) -> None:
        # A connection may be gone again, and descriptors may run out for a moment.
        with contextlib.suppress(OSError):
            line = Line(listener.accept()[0])
            selector.register(line, selectors.EVENT_READ, functools.partial(self._read, selector, line, key))
            self._open_lines.add(line)

    def _read(self, selector: selectors.BaseSelector, line: Line, key: str) -> None:
        if line not in self._open_lines:
            return
        try:
            for message in line.receive():
                if line in self._lines:
                    self._hear(self._lines[line], message)
                else:
                    self._greet(line, message, key)
        except ValueError:
            # A port scanner or a health check.
            line.is_closed = True
        # What is heard may end in `drain`, which reads on, and may have closed this line.
        if line.is_closed and line in self._open_lines:
            self._open_lines.remove(line)
            selector.unregister(line)
            line.close()
            self._closed(self._lines.pop(line, None))

    def _greet(self, line: Line, message: Message, key: str) -> None:
        index = message.get("index")
        if not isinstance(index, int) or message != hello(index, key) or not 0 < index < len(self._members):
            raise ValueError("a stranger")
        member = self._lines[line] = self._members[index]
        member.has_joined, member.heard_at = True, self._clock.now
        if self._stop:
            line.send(encode({"kind": "stop", "signal": self._stop.signal}))
        if self._end:
            line.send(encode(self._end))

    def _closed(self, member: Member | None) -> None:
        if member is not None and member.left_at is None:
            self._finish(end(PEER_LOST, member.lost("its connection closed (killed, or its node is down)")))

    def _hear(self, member: Member, message: Message) -> None:
        match message["kind"]:
            case "status":
                member.hears(message, self._clock.now)
            case "signal":
                self._ask_all(member, message["signal"])
            case "passed":
                self._take_answer(member, message["boundaries"], message["stage"], message["nothing"])
            case "bye":
                self._take_leave(member, message["code"], message["words"])

    def _ask_all(self, member: Member, signal: str) -> None:
        if self._stop is None and self._end is None:
            self._stop = _Stop(member, signal)
            self._tell({"kind": "stop", "signal": signal})

    def _take_answer(self, member: Member, boundaries: int, stage: str, nothing: str | None) -> None:
        """No process is past the boundary after the last that one of them has passed: there all can stop."""
        assert self._stop
        who = f", {self._stop.member}" if len(self._members) > 1 else ""
        asked = f"asked to stop ({self._stop.signal}{who})"
        member.passed = boundaries
        if nothing is not None:
            self._finish(end(STOPPED, f"{asked} while {stage}: {nothing}"))
            return
        passed = [member.passed for member in self._members]
        known = [count for count in passed if count is not None]
        if self._end is None and len(known) == len(passed):
            say(f"{asked} while {self._members[0].status}")
            self._tell({"kind": "stop_at", "boundary": max(known) + 1})

    def _take_leave(self, member: Member, code: int, words: str) -> None:
        if self._end is not None:
            self._tell_one(member, {"kind": "bye"})
        elif code == 0:
            member.left_at = self._clock.now
            if member.index > 0:
                self._tell_one(member, {"kind": "bye"})
            if all(other.left_at is not None for other in self._members):
                # Until now the others needed process 0.
                self._deliver({"kind": "bye"})
        elif code in (USER_ERROR, STOPPED) or code > STOPPED:
            # The whole run ends for this reason, and whoever has not found it yet is given the time to.
            grace_s = self._limits.leave_s if code == STOPPED else 0.0 if code == INTERRUPTED else _SAY_SO_S
            line = f"{member} ended with exit code {code} while {member.status}; its own message says why."
            self._finish(end(code, line, grace_s))
        else:
            self._finish(end(PEER_LOST, f"{member} failed: {words} ({member.status})"))

    def _judge(self) -> None:
        working = [member for member in self._members if member.left_at is None]
        for member in working:
            if line := member.silent(self._clock.now, self._limits):
                self._finish(end(PEER_LOST, line))
                return
        line = self._left_alone(working) or self._hang(working)
        if line:
            self._finish(end(PEER_LOST, line))

    def _left_alone(self, working: Sequence[Member]) -> str | None:
        left = [member for member in self._members if member.left_at is not None]
        if not left or not working:
            return None
        first = min(left, key=lambda member: member.left_at or 0.0)
        if self._clock.now - (first.left_at or 0.0) <= self._limits.leave_s:
            return None
        return f"{first} ended with exit code 0 while {working[0]} was still {working[0].status}."

    def _hang(self, working: Sequence[Member]) -> str | None:
        """Judges only once every process has reported after the first was late."""
        if not any(member.status.is_late for member in working):
            self._late_since = None
        elif self._late_since is None:
            self._late_since = self._clock.now
        elif all(member.heard_at > self._late_since for member in working):
            return hang(working)
        return None

    def _finish(self, message: Message) -> None:
        if self._end is None:
            self._end = message
            self._tell(message)

    def _tell(self, message: Message) -> None:
        self._broadcast(message)
        self._deliver(message)

    def _tell_one(self, member: Member, message: Message) -> None:
        if member.index == 0:
            self._deliver(message)
        for line, other in self._lines.items():
            if other is member:
                line.send(encode(message))

    def _broadcast(self, message: Message) -> None:
        encoded = encode(message)
        for line in self._lines:
            line.send(encoded)


class Link:
    """The end of a process other than 0.

    Args:
      host: of process 0.
      line: to it.
      limits, clock, deliver: as for the hub.
    """

    def __init__(
        self, host: str, line: Line, limits: Limits, clock: AwakeClock, deliver: Callable[[Message], None]
    ) -> None:
        self._process_0 = Member(0, host, clock.now, has_joined=True)
        self._line, self._limits, self._clock, self._deliver = line, limits, clock, deliver

    def open(self, selector: selectors.BaseSelector) -> None:
        """Begins to listen."""
        selector.register(self._line, selectors.EVENT_READ, functools.partial(self._read, selector))

    def post(self, message: Message) -> None:
        """Sends a message to process 0."""
        if message["kind"] == "bye" and message["code"] == 0:
            self._process_0.left_at = self._clock.now
        if self._line.is_closed and message["kind"] == "bye":
            self._deliver({"kind": "bye"})
        self._line.send(encode(message))

    def beat(self, status: Message) -> None:
        """To be called every `heartbeat_s`, with this process's status."""
        if self._line.is_closed:
            return
        self.post(status)
        if line := self._process_0.silent(self._clock.now, self._limits):
            self._deliver(end(PEER_LOST, line))

    def drain(self) -> None:
        """Nobody depends on this process."""

    def _read(self, selector: selectors.BaseSelector) -> None:
        for message in self._line.receive():
            if message["kind"] == "status":
                self._process_0.hears(message, self._clock.now)
            else:
                self._deliver(message)
        if self._line.is_closed:
            selector.unregister(self._line)
            self._line.close()
            if self._process_0.left_at is None:
                why = "its connection closed (killed, or its node is down)"
                self._deliver(end(PEER_LOST, self._process_0.lost(why)))
            self._deliver({"kind": "bye"})
