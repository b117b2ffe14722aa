"""The XLA flags and environment variables of a run, and what is set for one compilation.

A table has our choice for each platform and generation of GPUs, a site file changes it, the user's own values win.
Flags come and go with versions, so a child process tries the final list once, and what it refuses is left out with a
note. XLA reads flags once a process; what depends on the strategy goes with the compilation, as `combine_thresholds`.
"""

from amsp_jax.compile.xla_flags.combining import combine_thresholds as combine_thresholds
from amsp_jax.compile.xla_flags.rules import flags as flags
from amsp_jax.compile.xla_flags.rules import variables as variables
from amsp_jax.compile.xla_flags.site import Site as Site
from amsp_jax.compile.xla_flags.site import read_site as read_site
from amsp_jax.compile.xla_flags.text import as_options as as_options
from amsp_jax.compile.xla_flags.text import flag_name as flag_name
from amsp_jax.compile.xla_flags.text import merge as merge
from amsp_jax.compile.xla_flags.text import without as without
from amsp_jax.compile.xla_flags.trial import checked as checked
