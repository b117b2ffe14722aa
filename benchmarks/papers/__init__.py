"""Formulas that papers print, so that their tables can be reproduced; the package computes nothing with them.

`zero` (ZeRO), `hybrid` (ZeRO++, MiCS, PyTorch FSDP), `megatron` and `frontier`. Where a paper counts otherwise than the
engine does, the docstring says so. AMSP's formulas are an objective of the planner: `amsp_jax.predict.cost.amsp`.
"""
