"""From a command line to devices in order: platform, processes, XLA flags, nodes.

A name is imported at its first use: the parts that find this process's place need no jax, so that the doctor can use
them where jax is missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amsp_jax.runtime.launch.device_layout import DeviceLayout as DeviceLayout
    from amsp_jax.runtime.launch.device_layout import setup as setup
    from amsp_jax.runtime.launch.process_0 import from_process_0 as from_process_0
    from amsp_jax.runtime.launch.process_0 import process_0_first as process_0_first
    from amsp_jax.runtime.launch.process_0 import say as say
    from amsp_jax.runtime.launch.processes import end_process as end_process
    from amsp_jax.runtime.launch.provenance import environment as environment
    from amsp_jax.runtime.watchdog.watch import Watch as Watch
    from amsp_jax.runtime.watchdog.watch import own_watch as own_watch

_HOME = {
    "environment": "amsp_jax.runtime.launch.provenance",
    "DeviceLayout": "amsp_jax.runtime.launch.device_layout",
    "setup": "amsp_jax.runtime.launch.device_layout",
    "from_process_0": "amsp_jax.runtime.launch.process_0",
    "process_0_first": "amsp_jax.runtime.launch.process_0",
    "say": "amsp_jax.runtime.launch.process_0",
    "end_process": "amsp_jax.runtime.launch.processes",
    "Watch": "amsp_jax.runtime.watchdog.watch",
    "own_watch": "amsp_jax.runtime.watchdog.watch",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
