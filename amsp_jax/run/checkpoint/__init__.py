"""Checkpoints: any pytree of global arrays saved under one mesh and restored under any other."""

from amsp_jax.run.checkpoint.checkpointer import Checkpointer, Damaged, Intact
from amsp_jax.run.checkpoint.leaves import Shapes, leaf_paths

__all__ = ["Checkpointer", "Damaged", "Intact", "Shapes", "leaf_paths"]
