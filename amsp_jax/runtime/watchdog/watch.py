"""The watch of this process: who else is lost or hangs, and when to stop. docs/design/reliability.md has the design.

The main thread says what it does; a daemon thread tells process 0, hears from it, and ends the process where the main
thread cannot, because it waits inside XLA for someone who is gone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from amsp_jax.errors import UserError
from amsp_jax.runtime.exit_codes import INTERRUPTED, STOPPED
from amsp_jax.runtime.watchdog.coordinator import Hub, Link, say
from amsp_jax.runtime.watchdog.members import AwakeClock, Limits, Status, hello
from amsp_jax.runtime.watchdog.messages import Line, Message, encode
from amsp_jax.runtime.watchdog.signals import signals_to

_TRAINING = "training"
_NUM_STEPS_KEPT = 16


@dataclasses.dataclass(frozen=True)
class _Stage:
    """What the main thread does since `begun`, by `time.monotonic`."""

    what: str
    limit_s: float | None
    step: int | None
    begun: float


class Watch:
    """The watch; `own_watch` gives this process's. A lone process has the same interface, and no sockets.

    Attributes:
      stop_signal: the name of the signal that asked some process of the run to stop, or the text of `ask_to_stop`;
        None while none has.
      has_stopped: `stops_here` has been True.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.stop_signal: str | None = None
        self.has_stopped = False
        self._limits = limits or Limits()
        self._index, self._count = 0, 1
        # What the main thread writes and the other one reads.
        self._stage = _Stage("starting", None, None, time.monotonic())
        self._step_times: collections.deque[float] = collections.deque(maxlen=_NUM_STEPS_KEPT)
        self._nothing: str | None = "nothing to save"
        self._num_passed = 0
        self._is_leaving = False
        self._lock = threading.Lock()
        # What the other thread writes.
        self._stop_at: int | None = None
        self._agreed, self._heard = threading.Event(), threading.Event()
        self._num_interrupts, self._is_asked = 0, False
        self._ends_at: tuple[float, Message] | None = None
        self._seen, self._seen_at = self._stage, 0.0
        # Between the two.
        self._thread: threading.Thread | None = None
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._clock = AwakeClock(2 * self._limits.heartbeat_s)
        self._side: Hub | Link = Hub([socket.gethostname()], self._limits, self._clock, self._deliver)

    # What the main thread says.

    def doing(self, what: str, limit_s: float | None = None) -> None:
        """The main thread begins something, as in "compiling"; None: it may take as long as it likes.

        In a run of several processes all end when one of them is past the limit and holds up the others.
        """
        self._enter(what, limit_s if self._count > 1 else None, self._stage.step)

    def step(self, number: int, limit_s: float | None = None) -> None:
        """Training step `number` begins. None: the limit follows the last steps, and a lone process has none."""
        if limit_s is None and self._count > 1:
            limit_s = self._step_limit_s()
        self._enter(_TRAINING, limit_s, number)

    def can_save(self) -> None:
        """From now on a stop waits for `stops_here`, so that the state there can be saved."""
        with self._lock:
            self._nothing = None

    def nothing_to_save(self, why: str = "nothing to save") -> None:
        """From now on a stop ends all processes at once; it is so at the start. `why` is for the message."""
        with self._lock:
            self._nothing = why

    def stops_here(self) -> bool:
        """Whether the run stops at this boundary; all processes agree, and from then on it is True everywhere.

        Every process must call it at the same places, between steps, or batches of a validation.
        """
        with self._lock:
            self._num_passed += 1
            number, is_asked = self._num_passed, self.stop_signal is not None
        if is_asked:
            self._agreed.wait()
        self.has_stopped = self._stop_at is not None and number >= self._stop_at
        return self.has_stopped

    def ask_to_stop(self, why: str) -> None:
        """Stops a run of several processes as a signal would; `why` takes the place of the signal's name."""
        self._call(lambda: self._ask(why))

    @contextlib.contextmanager
    def catch_signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGUSR1 stop the run in order; for the main thread of a program, not of a library."""
        self._start()
        with signals_to(self._wake_end, lambda: self.stop_signal is not None):
            yield

    def leave(self, code: int, words: str = "") -> None:
        """Tells process 0 that this process ends, and why; returns when it knows, or after a moment.

        Process 0 itself, when it ends in good order, is kept until the others have, too.
        """
        # Where the run ends already, process 0 may be gone.
        if self._thread is None or self._ends_at is not None:
            return
        self._is_leaving = code != 0
        self._heard.clear()
        self._call(lambda: self._side.post({"kind": "bye", "code": code, "words": words}))
        waits_for_all = self._index == 0 and code == 0
        self._heard.wait(2 * (self._limits.leave_s if waits_for_all else self._limits.farewell_s))

    # How processes come together.

    def lead(self, hosts: Sequence[str], listener: socket.socket, key: str) -> None:
        """Begins the watch as process 0; the others, on `hosts`, connect to `listener` and know `key`."""
        hub = Hub(hosts, self._limits, self._clock, self._deliver)

        def begin() -> None:
            hub.open(self._selector, listener, key)
            self._side = hub

        self._join(0, len(hosts), begin)

    def follow(self, index: int, hosts: Sequence[str], address: tuple[str, int], key: str) -> None:
        """Begins the watch as process `index`; `address` is process 0's listener.

        Raises:
          UserError: nobody answers there.
        """
        try:
            connection = socket.create_connection(address, timeout=self._limits.join_s)
        except OSError as error:
            raise UserError(
                f"process {index} on {hosts[index]} cannot reach process 0 on {hosts[0]} at port {address[1]} "
                f"({error.strerror or error}). Let the nodes reach one another at all ports."
            ) from error
        line = Line(connection)
        line.send(encode(hello(index, key)))
        link = Link(hosts[0], line, self._limits, self._clock, self._deliver)

        def begin() -> None:
            link.open(self._selector)
            self._side = link

        self._join(index, len(hosts), begin)

    def _join(self, index: int, count: int, begin: Callable[[], None]) -> None:
        self._index, self._count = index, count
        self._start()
        self._call(begin)

    def _enter(self, what: str, limit_s: float | None, step: int | None) -> None:
        now, last = time.monotonic(), self._stage
        if last.what == _TRAINING:
            self._step_times.append(now - last.begun)
        self._stage = _Stage(what, limit_s, step, now)
        if what != last.what and self._thread is not None:
            self._call(lambda: self._side.post(self._status().message()))

    def _step_limit_s(self) -> float:
        if not self._step_times:
            return self._limits.first_step_s
        return max(self._limits.step_at_least_s, self._limits.step_factor * max(self._step_times))

    # The thread.

    def _start(self) -> None:
        if self._thread is None:
            self._selector = selectors.DefaultSelector()
            self._wake_end, wakes = socket.socketpair()
            self._wake_end.setblocking(False)
            wakes.setblocking(False)
            self._selector.register(wakes, selectors.EVENT_READ, lambda: self._wake(wakes))
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        # A full pipe wakes it as well.
        with contextlib.suppress(BlockingIOError):
            self._wake_end.send(b"\0")

    def _run(self) -> None:
        try:
            beat_at = 0.0
            while True:
                for key, _ in self._selector.select(max(beat_at - time.monotonic(), 0.0)):
                    self._clock.advance()
                    key.data()
                self._clock.advance()
                if time.monotonic() >= beat_at:
                    self._beat()
                    beat_at = time.monotonic() + self._limits.heartbeat_s
        except BaseException:
            # Without its watch a process must not go on: the others would take it for lost.
            traceback.print_exc()
            os._exit(1)

    def _wake(self, wakes: socket.socket) -> None:
        for number in wakes.recv(4096):
            if number:
                self._take_signal(signal.Signals(number))
        while self._calls:
            self._calls.popleft()()

    def _beat(self) -> None:
        self._side.beat(self._status().message())
        if self._ends_at and self._clock.now >= self._ends_at[0]:
            self._exit(self._ends_at[1])

    def _status(self) -> Status:
        stage = self._stage
        if stage is not self._seen:
            self._seen, self._seen_at = stage, self._clock.now
        age_s = self._clock.now - self._seen_at
        return Status(stage=stage.what, step=stage.step, age_s=age_s, limit_s=stage.limit_s)

    def _take_signal(self, number: signal.Signals) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts == 2:
            self._is_leaving = True
            self._side.post({"kind": "bye", "code": INTERRUPTED, "words": ""})
            self._exit({"code": INTERRUPTED, "line": "interrupted twice: ended without saving"})
        self._ask(number.name)

    def _ask(self, why: str) -> None:
        # SLURM repeats itself.
        if not self._is_asked:
            self._is_asked = True
            self._side.post({"kind": "signal", "signal": why})

    def _deliver(self, message: Message) -> None:
        match message["kind"]:
            case "stop":
                self._answer(message["signal"])
            case "stop_at":
                self._stop_at = message["boundary"]
                self._agreed.set()
            case "end":
                self._end(message)
            case "bye":
                self._heard.set()

    def _answer(self, signal_name: str) -> None:
        """How far the main thread is. At its next boundary it waits for what is agreed."""
        with self._lock:
            self.stop_signal = signal_name
            nothing, boundaries = self._nothing, self._num_passed
        stage = str(self._status())
        self._side.post({"kind": "passed", "boundaries": boundaries, "stage": stage, "nothing": nothing})

    def _end(self, message: Message) -> None:
        if self._is_leaving:
            # The main thread ends the process itself, and waits for this.
            self._side.drain()
            self._heard.set()
        elif self._ends_at is None and message["grace_s"]:
            self._ends_at = (self._clock.now + message["grace_s"], message)
        elif self._ends_at is None:
            self._exit(message)

    def _exit(self, message: Message) -> None:
        if message["code"] != STOPPED or self._index == 0:
            say(message["line"])
        self._side.drain()
        os._exit(message["code"])


_OWN = Watch()


def own_watch() -> Watch:
    """The watch of this process. It has a thread once its signals are caught or other processes are known."""
    return _OWN
