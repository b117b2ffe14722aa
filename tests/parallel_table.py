"""Layouts to compare with one device: a table in which every two values that can meet do meet in some row.

The table is made by choosing again and again the row that has the most pairs that no row before it has. What must meet
is `FACTORS`; everything else about a row follows from them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.errors import UserError
from amsp_jax.strategy import DataRanks, parse

ROWS = 48
"""Sequences of a step: of every number of microbatches below, a rank of most layouts gets an equal part."""

FACTORS: dict[str, tuple] = {
    "strategy": (
        "ddp", "zero1", "zero2", "zero3", "mics(2)", "hpz(2)", "hfsdp(2)", "params=replica grads=node opt_state=full",
    ),
    "microbatches": (1, 2, 3, 4, 6, 8),
    # (schedule, virtual stages), none where there is one stage.
    "schedule": (("", 1), ("gpipe", 1), ("1f1b", 1), ("gpipe", 2), ("1f1b", 2)),
    "cluster": ((1, 8), (2, 4), (2, 8), (4, 4)),
    "tensor": (1, 2, 4),
    "pipeline": (1, 2, 4),
    "context": (1, 2),
    "tied": (False, True),
    "model": ("llama", "gpt"),
}  # fmt: skip
Pair = tuple[tuple[str, object], tuple[str, object]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One layout; fields are those of `FACTORS`, `cluster` is (nodes, devices of a node)."""

    strategy: str
    microbatches: int
    schedule: tuple[str, int]
    cluster: tuple[int, int]
    tensor: int
    pipeline: int
    context: int
    tied: bool
    model: str

    @property
    def parallel(self) -> ModelParallel:
        return ModelParallel(pipeline=self.pipeline, context=self.context, tensor=self.tensor)

    @property
    def ranks(self) -> DataRanks:
        return self.parallel.data_ranks(*self.cluster)

    @property
    def num_devices(self) -> int:
        return self.cluster[0] * self.cluster[1]

    @property
    def num_layers(self) -> int:
        """A block for each virtual stage, and one more in half of the models, where it does not divide."""
        virtual = self.pipeline * self.schedule[1]
        return virtual + ((self.model == "gpt") != self.tied) if virtual > 1 else 2

    @property
    def is_feasible(self) -> bool:
        """Whether the layout exists. Data ranks are two at least, or the strategy would mean nothing; only tensor 4 x
        pipeline 4 leaves one of 16 devices."""
        name, virtual_stages = self.schedule
        if (self.pipeline > 1) != bool(name):
            return False
        if self.microbatches < self.pipeline or (virtual_stages > 1 and self.microbatches % self.pipeline):
            return False
        if (ranks := _ranks(self.strategy, self.parallel, self.cluster)) is None:
            return False
        return ROWS % (self.microbatches * ranks.total) == 0 and ranks.total >= (1 if self.is_smallest else 2)

    @property
    def is_smallest(self) -> bool:
        """Whether 16 devices have one data rank, for no strategy in particular."""
        return self.tensor == self.pipeline == 4 and self.strategy == "ddp"

    def pairs(self) -> list[Pair]:
        """What meets here."""
        values = [(name, getattr(self, name)) for name in FACTORS]
        with_strategy = self.ranks.total > 1
        return [pair for pair in itertools.combinations(values, 2) if with_strategy or pair[0][0] != "strategy"]

    def __str__(self) -> str:
        nodes, per_node = self.cluster
        name, virtual_stages = self.schedule
        order = f"-{name}{virtual_stages}" if name else ""
        strategy = self.strategy.replace("params=replica grads=node opt_state=full", "quickstart")
        return (
            f"{self.model}{'-tied' if self.tied else ''}-{strategy}-t{self.tensor}-c{self.context}-p{self.pipeline}"
            f"{order}-m{self.microbatches}-{nodes}x{per_node}"
        )


@functools.cache
def _ranks(strategy: str, parallel: ModelParallel, cluster: tuple[int, int]) -> DataRanks | None:
    """The data ranks; None where the devices do not divide so, or the strategy does not fit."""
    try:
        ranks = parallel.data_ranks(*cluster)
        parse(strategy).resolve(ranks)
    except UserError:
        return None
    return ranks


@functools.cache
def feasible() -> list[Row]:
    """Every layout that exists."""
    rows = (Row(**dict(zip(FACTORS, values, strict=True))) for values in itertools.product(*FACTORS.values()))
    return [row for row in rows if row.is_feasible]


@functools.cache
def table() -> list[Row]:
    """A row for each pair of values; the first ones have the most pairs. Rare pairs count for more.

    The order of candidates is a fixed disorder, so that what a late row may choose freely is not the same in all.
    """
    rows = [feasible()[i] for i in np.random.default_rng(0).permutation(len(feasible()))]
    numbers: dict[Pair, int] = {}
    has = np.zeros(
        (len(rows), sum(len(a) * len(b) for a, b in itertools.combinations(FACTORS.values(), 2))), np.float32
    )
    for i, row in enumerate(rows):
        for pair in row.pairs():
            has[i, numbers.setdefault(pair, len(numbers))] = 1
    has = has[:, : len(numbers)]
    weight = has.sum(0) ** -0.5
    chosen = []
    while weight.any():
        best = int(np.argmax(has @ weight))
        weight = np.where(has[best] > 0, 0, weight)
        chosen.append(rows[best])
    return chosen
