"""From a command line to devices in order: platform, processes, XLA flags, nodes."""

from amsp_jax.runtime.launch.environment import environment as environment
from amsp_jax.runtime.launch.layout import Layout as Layout
from amsp_jax.runtime.launch.layout import setup as setup
from amsp_jax.runtime.launch.process_0 import from_process_0 as from_process_0
from amsp_jax.runtime.launch.process_0 import process_0_first as process_0_first
from amsp_jax.runtime.launch.process_0 import say as say
from amsp_jax.runtime.launch.processes import end_process as end_process
from amsp_jax.runtime.watchdog.watch import Watch as Watch
from amsp_jax.runtime.watchdog.watch import own_watch as own_watch
