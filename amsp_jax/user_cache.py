"""Where things are kept between runs, for the person and not for one run."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from amsp_jax.errors import UserError


def user_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/amsp_jax`, or `~/.cache/amsp_jax`; it need not exist.

    Raises:
      UserError: neither variable is set and the system knows no home of this user, as in some containers.
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "amsp_jax"
    try:
        return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "amsp_jax"
    except KeyError:
        # A fixed folder below /tmp could be another user's, and compiled programs are run as they are found.
        raise UserError(
            f"HOME is not set and user {os.getuid()} has no home folder: there is no place for caches. Set HOME or "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from None
