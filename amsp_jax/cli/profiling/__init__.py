"""A few steps under the profiler: where their time goes, from the trace alone."""

from amsp_jax.cli.profiling.capture import Captured as Captured
from amsp_jax.cli.profiling.capture import capture as capture
from amsp_jax.cli.profiling.picture import plot_step as plot_step
from amsp_jax.cli.profiling.program import StepProgram as StepProgram
from amsp_jax.cli.profiling.program import read_program as read_program
from amsp_jax.cli.profiling.trace import Trace as Trace
from amsp_jax.cli.profiling.trace import read_trace as read_trace
