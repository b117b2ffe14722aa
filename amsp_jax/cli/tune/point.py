"""What a trial runs with: one value of each setting that can be searched."""

from __future__ import annotations

import dataclasses
from typing import Any

from amsp_jax.engine.parallel import ModelParallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One value of each setting that is searched; each field is the setting of its name in lower case."""

    strategy: str
    tensor: int
    pipeline: int
    pipeline_schedule: str
    virtual_stages: int
    context: int
    microbatch: int
    remat: str
    microbatch_group: int = 1

    def settings(self) -> dict[str, Any]:
        """The values by the names of gin files."""
        return {name.upper(): value for name, value in dataclasses.asdict(self).items()}

    @property
    def parallel(self) -> ModelParallel:
        """Into how many parts one copy of the model is cut."""
        return ModelParallel(pipeline=self.pipeline, context=self.context, tensor=self.tensor)

    def __str__(self) -> str:
        """In a line, without what is 1."""
        words = [self.strategy]
        words += [f"{name} {getattr(self, name)}" for name in ("tensor", "context") if getattr(self, name) > 1]
        if self.pipeline > 1:
            words.append(f"pipeline {self.pipeline} {self.pipeline_schedule}")
            words += [f"virtual {self.virtual_stages}"] if self.virtual_stages > 1 else []
        group = f" in groups of {self.microbatch_group}" if self.microbatch_group > 1 else ""
        return ", ".join([*words, f"microbatch {self.microbatch}{group}", f"remat {self.remat}"])


DIMENSIONS = tuple(field.name for field in dataclasses.fields(Point))
"""The settings that can be searched."""
OF_PIPELINES = ("pipeline_schedule", "virtual_stages")
"""Those that mean nothing without pipeline stages."""
