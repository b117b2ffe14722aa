"""Signals reach a thread even while the main thread is inside XLA, where Python's own handlers have to wait."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def signals_to(end: socket.socket, is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Writes the number of each signal that asks to stop to `end`, as one byte, the moment it arrives.

    Main thread only. Handlers and the wake-up descriptor of before come back at the end; where the program is stopping,
    the signals are ignored from then on, as whoever sends them may repeat them.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        """Runs late, when the main thread is back in Python; a library's event loop may hold the descriptor by then."""
        other = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
        if other != end.fileno():
            signal.set_wakeup_fd(other, warn_on_full_buffer=False)
            with contextlib.suppress(BlockingIOError):
                end.send(bytes([number]))

    handlers = {number: signal.signal(number, handle) for number in _CAUGHT}
    before = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_IGN if is_stopping() else handler)
