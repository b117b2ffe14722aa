"""What the tests of the doctor share."""

import time

from amsp_jax.cli.doctor import findings
from amsp_jax.runtime.launch import DeviceLayout


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


def wait_for_the_stuck():
    """A command that finds a thread of a check ends the process without further ado."""
    deadline = time.monotonic() + 60
    while findings.is_stuck():
        assert time.monotonic() < deadline


SHEET = 80 * 2**30


def layout(**changes):
    values = {
        "platform": "cuda",
        "num_nodes": 2,
        "devices_per_node": 4,
        "devices": tuple(range(8)),
        "device_kind": "NVIDIA H100 80GB HBM3",
        "memory_bytes": int(0.9 * SHEET),
        "process_index": 0,
        "process_count": 2,
        "hosts": ("n1", "n2"),
        "notes": (),
    }
    return DeviceLayout(**{**values, **changes})
