"""Whether all processes see the run folder of process 0."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from amsp_jax.cli.doctor.files import nearest_folder
from amsp_jax.cli.doctor.findings import Finding, fail, ok
from amsp_jax.cli.doctor.key_value_store import KeyValueStore

# A network file system may keep a folder's old listing for this long.
_VISIBLE_WITHIN_S = 15.0
_WAIT_S = 20.0


def check_shared_between(store: KeyValueStore, run_dir: Path) -> Iterator[Finding]:
    """Process 0 writes a file, and every other process looks for it; call it in all of them at once.

    Raises:
      TimeoutError: another process did not come.
    """
    if store.index == 0:
        yield from _show_a_file(store, nearest_folder(run_dir))
    else:
        place = store.get("file", 0, _WAIT_S)
        yield check_shared(Path(place["path"]), place["token"], _VISIBLE_WITHIN_S)
        store.wait_for_all("looked", _VISIBLE_WITHIN_S + _WAIT_S)


def _show_a_file(store: KeyValueStore, folder: Path) -> Iterator[Finding]:
    """Keeps a file in the folder until all the others have looked."""
    token = os.urandom(8).hex()
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".doctor-") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
        store.put("file", {"path": file.name, "token": token})
        store.wait_for_all("looked", _VISIBLE_WITHIN_S + _WAIT_S)
    yield ok("shared run folder", f"a file of process 0 in {folder} is seen by every process")


def check_shared(path: Path, token: str, timeout_s: float) -> Finding:
    """Whether this process sees process 0's file and its content."""
    check, deadline = "shared run folder", time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        # Opening a folder makes NFS ask its server again.
        if path.parent.is_dir():
            os.listdir(path.parent)
        time.sleep(0.2)
    if not path.exists():
        fix = "put the run folder on a file system that all nodes share, and name it with --run-dir"
        return fail(check, f"does not see process 0's file in {path.parent} within {timeout_s:g} s", fix)
    if path.read_text() != token:
        return fail(check, f"sees process 0's file in {path.parent} with another content", "mount it with caching off")
    return ok(check, "sees process 0's file")
