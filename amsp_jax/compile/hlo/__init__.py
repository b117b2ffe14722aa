"""What a compiled program's text says: its collectives, and what runs between their start and their end."""

from amsp_jax.compile.hlo.collectives import AxesOf as AxesOf
from amsp_jax.compile.hlo.collectives import Collective as Collective
from amsp_jax.compile.hlo.collectives import Groups as Groups
from amsp_jax.compile.hlo.collectives import axes_of as axes_of
from amsp_jax.compile.hlo.collectives import collectives as collectives
from amsp_jax.compile.hlo.collectives import joined as joined
from amsp_jax.compile.hlo.collectives import mesh_groups as mesh_groups
from amsp_jax.compile.hlo.schedule import Flops as Flops
from amsp_jax.compile.hlo.schedule import Span as Span
from amsp_jax.compile.hlo.schedule import analyse as analyse
from amsp_jax.compile.hlo.schedule import op_flops as op_flops
