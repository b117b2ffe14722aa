"""What a pass over large files found, kept for as long as the files stay as they are."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amsp_jax.run.data.cache import cached
from amsp_jax.run.data.paths import stamps

# A file that is written twice within one tick of its disk's clock keeps its times.
_SETTLED_NS = 2_000_000_000


def remembered(cache: Path, key: str, files: Sequence[Path], scan: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `scan` gave, JSON values, at the first call with this key and these files in this state.

    Files that were written a moment ago are scanned again at the next call.

    Raises:
      UserError: a file is gone, or the cache cannot be written.
    """
    before = stamps(files)
    name = f"scan-{hashlib.blake2b(json.dumps([key, before]).encode(), digest_size=12).hexdigest()}"
    if (found := _read(cache / name / "scan.json")) is not None:
        return found
    newest_ns = max((max(stamp[3:]) for stamp in before), default=0)
    settled = newest_ns < time.time_ns() - _SETTLED_NS
    found = scan()
    if settled and stamps(files) == before:
        text = json.dumps(found)
        cached(cache, name, lambda folder: (folder / "scan.json").write_text(text, encoding="utf-8"))
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
