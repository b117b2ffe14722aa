"""Measures the machines that will train: their collectives and a device's rates, as a cluster."""

from amsp_jax.predict.calibrate.collectives import Series as Series
from amsp_jax.predict.calibrate.collectives import disturbed_sizes as disturbed_sizes
from amsp_jax.predict.calibrate.collectives import message_seconds as message_seconds
from amsp_jax.predict.calibrate.measure import DEFAULT_BUDGET_S as DEFAULT_BUDGET_S
from amsp_jax.predict.calibrate.measure import calibrate as calibrate
from amsp_jax.predict.calibrate.measure import calibrated as calibrated
from amsp_jax.predict.calibrate.measure import running_cluster as running_cluster
from amsp_jax.predict.calibrate.plot import plot_network as plot_network
from amsp_jax.predict.calibrate.programs import Machine as Machine
from amsp_jax.predict.calibrate.progress import ProgressLine as ProgressLine
from amsp_jax.predict.calibrate.stopwatch import Stopwatch as Stopwatch
