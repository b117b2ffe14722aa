"""What an installation and a cluster lack for training, and the next step for each thing."""

from amsp_jax.cli.doctor.devices import axes_to_check as axes_to_check
from amsp_jax.cli.doctor.devices import check_devices as check_devices
from amsp_jax.cli.doctor.devices import check_memory as check_memory
from amsp_jax.cli.doctor.devices import check_psum as check_psum
from amsp_jax.cli.doctor.exchange import Exchange as Exchange
from amsp_jax.cli.doctor.files import check_folder as check_folder
from amsp_jax.cli.doctor.files import check_run_folder as check_run_folder
from amsp_jax.cli.doctor.findings import Finding as Finding
from amsp_jax.cli.doctor.findings import Report as Report
from amsp_jax.cli.doctor.findings import Status as Status
from amsp_jax.cli.doctor.findings import count as count
from amsp_jax.cli.doctor.findings import examine as examine
from amsp_jax.cli.doctor.findings import fail as fail
from amsp_jax.cli.doctor.findings import is_stuck as is_stuck
from amsp_jax.cli.doctor.findings import merge as merge
from amsp_jax.cli.doctor.findings import one_line as one_line
from amsp_jax.cli.doctor.findings import ranges as ranges
from amsp_jax.cli.doctor.findings import summary as summary
from amsp_jax.cli.doctor.machine import check_machine as check_machine
from amsp_jax.cli.doctor.packages import check_packages as check_packages
from amsp_jax.cli.doctor.shared import check_shared_between as check_shared_between
