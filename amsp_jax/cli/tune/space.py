"""The values of each setting that are searched."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amsp_jax.cli.tune.point import DIMENSIONS, OF_PIPELINES, Point
from amsp_jax.cli.tune.trial_setup import TrialSetup
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.run.config import did_you_mean
from amsp_jax.strategy import parse

SCHEDULES = ("1f1b", "gpipe")
"""The first is that of a point without stages, where it means nothing."""
_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
_OF_SEVERAL_NODES = ("mics", "hpz", "hfsdp", "params=replica grads=node opt_state=full")
_MICROBATCHES = (1, 2, 4, 8)
_VIRTUAL_STAGES = (1, 2)
# The planner takes some ten milliseconds for each.
_MOST_POINTS = 20_000


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
        return (
            point
            if point.pipeline > 1
            else dataclasses.replace(point, pipeline_schedule=SCHEDULES[0], virtual_stages=1)
        )

    def __contains__(self, point: Point) -> bool:
        used = [name for name in DIMENSIONS if point.pipeline > 1 or name not in OF_PIPELINES]
        return all(getattr(point, name) in self.values[name] for name in used)


def search_space(
    texts: Sequence[str], setup: TrialSetup, *, context: int = 1, microbatch_group: int = 1
) -> SearchSpace:
    """The space of `--search NAME=VALUE,VALUE` flags; dimensions without a flag have values that suit the devices.

    Args:
      texts: the flags' values.
      setup: what all trials share.
      context, microbatch_group: of the run; without a flag they stay as they are.

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
    space = SearchSpace({**_defaults(setup, context, microbatch_group), **given})
    if (size := math.prod(map(len, space.values.values()))) > _MOST_POINTS:
        raise UserError(f"--search: {size:,} points are more than {_MOST_POINTS:,}; give fewer values of each")
    return space


def _defaults(setup: TrialSetup, context: int, microbatch_group: int) -> dict[str, tuple[Any, ...]]:
    return {
        "strategy": _STRATEGIES + (_OF_SEVERAL_NODES if setup.num_nodes > 1 else ()),
        "tensor": _divisors(setup.devices_per_node),
        "pipeline": tuple(n for n in _divisors(setup.num_devices) if n <= max(1, len(setup.model.blocks))),
        "pipeline_schedule": SCHEDULES,
        "virtual_stages": _VIRTUAL_STAGES,
        "context": (context,),
        "microbatch": tuple(n for n in _MICROBATCHES if setup.global_batch % n == 0),
        "remat": tuple(map(str, Remat)),
        "microbatch_group": (microbatch_group,),
    }


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def _value(name: str, word: str, text: str) -> Any:
    if name == "strategy":
        parse(word)
        return word
    words = {"pipeline_schedule": SCHEDULES, "remat": tuple(map(str, Remat))}.get(name)
    if words is not None:
        if word not in words:
            raise UserError(f"--search {text}: {word!r} is no {name}; there are {', '.join(words)}")
        return word
    if not word.isdecimal() or int(word) < 1:
        raise UserError(f"--search {text}: {word!r} is no {name}; it is an integer of at least 1")
    return int(word)
