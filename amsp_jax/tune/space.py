"""The points that are searched: the values of each setting, and which points cannot run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amsp_jax.config import did_you_mean
from amsp_jax.errors import UserError
from amsp_jax.parallel import ModelParallel
from amsp_jax.stack import Remat
from amsp_jax.strategy import DataRanks, parse

SCHEDULES = ("1f1b", "gpipe")
_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
_OF_SEVERAL_NODES = ("mics", "hpz", "hfsdp", "params=replica grads=node opt_state=full")
_MICROBATCHES = (1, 2, 4, 8)
_VIRTUAL_STAGES = (1, 2)
# All of them are looked at one after the other.
_MOST_POINTS = 200_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One value of each setting that is searched; each field is the setting of its name in lower case."""

    strategy: str
    tensor: int
    pipeline: int
    schedule: str
    virtual_stages: int
    context: int
    microbatch: int
    remat: str

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
            words.append(f"pipeline {self.pipeline} {self.schedule}")
            words += [f"virtual {self.virtual_stages}"] if self.virtual_stages > 1 else []
        return ", ".join([*words, f"microbatch {self.microbatch}", f"remat {self.remat}"])


DIMENSIONS = tuple(field.name for field in dataclasses.fields(Point))
"""The settings that can be searched."""
OF_PIPELINES = ("schedule", "virtual_stages")
"""Those that mean nothing without pipeline stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grounds:
    """What stays the same in all trials and decides which points can run.

    Attributes:
      num_nodes, devices_per_node: the devices.
      global_batch: sequences of a step.
      seq_len: tokens of a sequence.
      num_layers: blocks of the model.
    """

    num_nodes: int
    devices_per_node: int
    global_batch: int
    seq_len: int
    num_layers: int

    def ranks(self, point: Point) -> DataRanks:
        """The data ranks of a point; UserError where the devices do not divide."""
        return point.parallel.data_ranks(self.num_nodes, self.devices_per_node)

    def key(self, point: Point) -> str:
        """Equal for points that are the same run: by the strategy's degrees, whatever its name."""
        degrees = parse(point.strategy).resolve(self.ranks(point))
        return str(dataclasses.replace(point, strategy=str(degrees)))

    def why_invalid(self, point: Point) -> str | None:
        """Why the trainer would refuse a point; None for those that it may take."""
        try:
            self.key(point)
        except UserError as error:
            return str(error)
        unit = point.microbatch * self.ranks(point).total
        accumulation, rest = divmod(self.global_batch, unit)
        if rest:
            return f"GLOBAL_BATCH={self.global_batch} is no multiple of microbatch x data ranks = {unit}"
        return self._why_no_pipeline(point, accumulation) or self._why_no_sequence(point)

    def _why_no_pipeline(self, point: Point, accumulation: int) -> str | None:
        stages = point.pipeline * point.virtual_stages
        if stages > 1 and stages > self.num_layers:
            return f"{stages} stages, virtual ones included, are more than {self.num_layers} blocks"
        if accumulation < point.pipeline:
            return f"{accumulation} microbatches are fewer than {point.pipeline} stages"
        if point.virtual_stages > 1 and accumulation % point.pipeline:
            return f"{accumulation} microbatches do not divide by {point.pipeline} stages, as virtual stages need"
        return None

    def _why_no_sequence(self, point: Point) -> str | None:
        # In zigzag order each context rank has two chunks.
        parts = point.tensor * point.context * (2 if point.context > 1 else 1)
        return f"{self.seq_len} tokens do not divide by {parts}" if self.seq_len % parts else None


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The values of each dimension, in the order of `DIMENSIONS`."""

    values: Mapping[str, tuple[Any, ...]]

    @property
    def searched(self) -> tuple[str, ...]:
        """The dimensions with a choice."""
        return tuple(name for name, values in self.values.items() if len(values) > 1)

    def points(self) -> Iterator[Point]:
        """Every point once: without pipeline stages there is one schedule."""
        for values in itertools.product(*self.values.values()):
            point = Point(**dict(zip(self.values, values, strict=True)))
            if point.pipeline > 1 or all(getattr(point, name) == self.values[name][0] for name in OF_PIPELINES):
                yield self.canonical(point)

    @staticmethod
    def canonical(point: Point) -> Point:
        """The point with neutral values for what it does not use."""
        return point if point.pipeline > 1 else dataclasses.replace(point, schedule=SCHEDULES[0], virtual_stages=1)

    def __contains__(self, point: Point) -> bool:
        used = [name for name in DIMENSIONS if point.pipeline > 1 or name not in OF_PIPELINES]
        return all(getattr(point, name) in self.values[name] for name in used)


def search_space(texts: Sequence[str], grounds: Grounds) -> SearchSpace:
    """The space of `--search NAME=VALUE,VALUE` flags; dimensions without a flag have values that suit the devices.

    Raises:
      UserError: an unknown name or value; a name given twice; more points than can be looked at.
    """
    given: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, words = text.partition("=")
        if name not in DIMENSIONS:
            near = did_you_mean(name, DIMENSIONS)
            raise UserError(f"--search {text}: {name!r} is unknown{near}; there are {', '.join(DIMENSIONS)}")
        if not equals or not words or name in given:
            problem = "it is given twice" if name in given else "it has no values"
            raise UserError(f"--search {text}: {problem}; write each name once, as in --search {name}=1,2,4")
        given[name] = tuple(dict.fromkeys(_value(name, word.strip(), text) for word in words.split(",")))
    space = SearchSpace({**_defaults(grounds), **given})
    if (size := math.prod(map(len, space.values.values()))) > _MOST_POINTS:
        raise UserError(f"--search: {size:,} points are more than {_MOST_POINTS:,}; give fewer values of each")
    return space


def _defaults(grounds: Grounds) -> dict[str, tuple[Any, ...]]:
    devices = grounds.num_nodes * grounds.devices_per_node
    return {
        "strategy": _STRATEGIES + (_OF_SEVERAL_NODES if grounds.num_nodes > 1 else ()),
        "tensor": _divisors(grounds.devices_per_node),
        "pipeline": tuple(n for n in _divisors(devices) if n <= max(1, grounds.num_layers)),
        "schedule": SCHEDULES,
        "virtual_stages": _VIRTUAL_STAGES,
        "context": (1,),
        "microbatch": tuple(n for n in _MICROBATCHES if grounds.global_batch % n == 0),
        "remat": tuple(map(str, Remat)),
    }


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def _value(name: str, word: str, text: str) -> Any:
    if name == "strategy":
        parse(word)
        return word
    words = {"schedule": SCHEDULES, "remat": tuple(map(str, Remat))}.get(name)
    if words is not None:
        if word not in words:
            raise UserError(f"--search {text}: {word!r} is no {name}; there are {', '.join(words)}")
        return word
    if not word.isdecimal() or int(word) < 1:
        raise UserError(f"--search {text}: {word!r} is no {name}; it is an integer of at least 1")
    return int(word)
