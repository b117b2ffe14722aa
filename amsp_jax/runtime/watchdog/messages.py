"""Messages between processes: JSON objects, one a line, over sockets that never block."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from typing import Any

from amsp_jax.errors import UserError

Message = dict[str, Any]

# No message of ours is longer; a stranger's may be.
_LONGEST_LINE_BYTES = 1 << 20
# Of Python, the data and the drivers.
_OTHER_FILES = 512


def listen(port: int) -> socket.socket:
    """A listener at `port` of every address of this host; 0 leaves the choice to the kernel."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def allow_connections(count: int) -> None:
    """Lets this process hold `count` connections at once, and as many again of jax's.

    Raises:
      UserError: the system's limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"process 0 needs {needed} open files for {count} processes, but may have {hard}. Raise the hard limit "
            "(ulimit -Hn)."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def encode(message: Message) -> bytes:
    """The message as it travels."""
    return json.dumps(message).encode() + b"\n"


class Line:
    """One end of a connection.

    Attributes:
      is_closed: the other end has closed it, or broke it; nothing more comes and nothing is sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # Messages are rare and each is waited for.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_closed = False
        self._connection = connection
        self._incoming = b""
        self._outgoing = b""
        self._is_deaf = False

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, encoded: bytes) -> None:
        """Sends what fits into the socket now; `flush` sends the rest."""
        self._outgoing += encoded
        self.flush()

    def flush(self) -> None:
        """Sends what is left of earlier messages, as far as it fits."""
        try:
            while self._outgoing and not self._is_deaf:
                self._outgoing = self._outgoing[self._connection.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            # What the other end sent before is still to be read.
            self._is_deaf, self._outgoing = True, b""

    def receive(self) -> list[Message]:
        """The messages that have come; those before a closing are still returned.

        Raises:
          ValueError: this is not one of our processes.
        """
        try:
            while not self.is_closed and len(self._incoming) < _LONGEST_LINE_BYTES:
                data = self._connection.recv(1 << 16)
                self.is_closed = not data
                self._incoming += data
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._incoming = self._incoming.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("not a message") from error
        if len(self._incoming) >= _LONGEST_LINE_BYTES or not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

    def close(self) -> None:
        """Gives the socket back."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._connection.close()
