"""The papers' own formulas, so that their tables can be reproduced; nothing of the engine is computed with them.

`zero` (ZeRO), `hybrid` (ZeRO++, MiCS, PyTorch FSDP), `amsp` (AMSP), `megatron` and `frontier`. Where a paper counts
otherwise than this engine does, the docstring says so. What the engine itself needs is in `cost.memory`,
`cost.communication` and `cost.compute`, which read it off the model and the plan.
"""
