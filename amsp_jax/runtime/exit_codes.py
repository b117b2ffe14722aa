"""What the exit code of a process tells the batch script; docs/design/reliability.md has the table."""

USER_ERROR = 2
"""A mistake of the user's, said in one line on stderr."""

STOPPED = 85
"""Asked to stop by a signal: saved, or there was nothing to save. The job is to be requeued."""

PEER_LOST = 86
"""Another process of the run was lost or hangs; its name is on stderr. The job is to be requeued."""

BAD_NUMBERS = 87
"""The numbers went bad, beyond what the settings allow."""

INTERRUPTED = 130
"""Ctrl-C by someone who does not wait for the save."""
