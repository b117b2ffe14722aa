"""Where things are kept between runs, for the person and not for one run."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/amsp_jax`, or `~/.cache/amsp_jax`; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amsp_jax"
