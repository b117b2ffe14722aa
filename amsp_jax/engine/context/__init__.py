"""Context parallelism: a sequence over the ranks of the mesh axis `context`, and attention around their ring."""

from amsp_jax.engine.context.ring import RING_ATTENTION as RING_ATTENTION
from amsp_jax.engine.context.ring import ring_attention as ring_attention
from amsp_jax.engine.context.sequence import check_sequence as check_sequence
from amsp_jax.engine.context.sequence import local_sequence as local_sequence
from amsp_jax.engine.context.sequence import positions as positions
from amsp_jax.engine.context.sequence import rank as rank
from amsp_jax.engine.context.sequence import size as size
from amsp_jax.engine.context.sequence import zigzag as zigzag
from amsp_jax.engine.context.sequence import zigzag_inverse as zigzag_inverse
