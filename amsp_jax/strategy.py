"""How parameters (P), gradients (G) and optimizer states (OS) are spread over data ranks (AMSP, arXiv 2311.00257).

Each component chooses a sharding; on given data ranks it becomes a degree `intra x inter`: that many
ranks inside a node times that many nodes hold one copy together. The dependency rule binds the three,
inside a node and between nodes: s_params divides s_grads divides s_opt_state divides s_data. So no
rank keeps gradients or optimizer states of parameters that are not its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable
from typing import Protocol

from amsp_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class DataRanks:
    """The data-parallel ranks of a cluster: `per_node` on each of `num_nodes` nodes."""

    per_node: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        _check_positive(self)

    @property
    def total(self) -> int:
        """Number of data-parallel ranks."""
        return self.per_node * self.num_nodes

    def __str__(self) -> str:
        return f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} x {self.per_node} data ranks"


@dataclasses.dataclass(frozen=True)
class Degree:
    """A resolved sharding: one copy is spread over `intra` ranks in each of `inter` nodes."""

    intra: int
    inter: int

    @property
    def total(self) -> int:
        """Number of shards, s = intra x inter."""
        return self.intra * self.inter

    def __str__(self) -> str:
        return f"{self.intra}x{self.inter}"


class Sharding(Protocol):
    """One of the shardings below."""

    def degree(self, ranks: DataRanks) -> Degree:
        """The degree on these ranks; UserError where it has none."""


@dataclasses.dataclass(frozen=True)
class FullReplica:
    """Every rank holds everything. Text: `replica`."""

    def degree(self, ranks: DataRanks) -> Degree:
        """1x1."""
        del ranks
        return Degree(1, 1)

    def __str__(self) -> str:
        return "replica"


@dataclasses.dataclass(frozen=True)
class PartialSharding:
    """One copy over `intra` ranks of a node times `inter` nodes. Text: `4x1`."""

    intra: int
    inter: int = 1

    def __post_init__(self) -> None:
        _check_positive(self)

    def degree(self, ranks: DataRanks) -> Degree:
        """`intra x inter`."""
        del ranks
        return Degree(self.intra, self.inter)

    def __str__(self) -> str:
        return f"{self.intra}x{self.inter}"


@dataclasses.dataclass(frozen=True)
class NodeSharding:
    """One copy in each node, over all of its ranks. Text: `node`."""

    def degree(self, ranks: DataRanks) -> Degree:
        """per_node x 1."""
        return Degree(ranks.per_node, 1)

    def __str__(self) -> str:
        return "node"


@dataclasses.dataclass(frozen=True)
class RankSharding:
    """One copy over `count` ranks, a node filled before the next is begun. Text: `8`."""

    count: int

    def __post_init__(self) -> None:
        _check_positive(self)

    def degree(self, ranks: DataRanks) -> Degree:
        """count x 1 within a node, per_node x (count / per_node) beyond."""
        if ranks.per_node % self.count == 0:
            return Degree(self.count, 1)
        if self.count % ranks.per_node == 0 and ranks.num_nodes % (self.count // ranks.per_node) == 0:
            return Degree(ranks.per_node, self.count // ranks.per_node)
        raise UserError(
            f"a sharding over {self.count} ranks, nodes filled first, does not fit {ranks}: the count must divide "
            f"{ranks.per_node}, or be {ranks.per_node} times a divisor of {ranks.num_nodes}. "
            f"Nearest: {_list(_nearest(_rank_counts(ranks), self.count))}"
        )

    def __str__(self) -> str:
        return str(self.count)


@dataclasses.dataclass(frozen=True)
class FullSharding:
    """One copy over all data ranks. Text: `full`."""

    def degree(self, ranks: DataRanks) -> Degree:
        """per_node x num_nodes."""
        return Degree(ranks.per_node, ranks.num_nodes)

    def __str__(self) -> str:
        return "full"


@dataclasses.dataclass(frozen=True)
class Degrees:
    """A strategy resolved on data ranks; the dependency rule holds."""

    params: Degree
    grads: Degree
    opt_state: Degree
    ranks: DataRanks

    def __str__(self) -> str:
        return f"params={self.params} grads={self.grads} opt_state={self.opt_state}"

    @property
    def warnings(self) -> list[str]:
        """Degrees that reach other nodes before their own node is full: slower links for no memory gained."""
        return [
            f"{name}={degree} leaves ranks of a node unused while it spans nodes; "
            f"{self.ranks.per_node}x{degree.inter} fills the node first"
            for name, degree in (("params", self.params), ("grads", self.grads), ("opt_state", self.opt_state))
            if degree.inter > 1 and degree.intra < self.ranks.per_node
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A sharding for each of the three components.

    Example:
      >>> Strategy(params=FullReplica(), grads=PartialSharding(4), opt_state=FullSharding())
      >>> parse("params=replica grads=4x1 opt_state=full")   # the same
    """

    params: Sharding
    grads: Sharding
    opt_state: Sharding

    def __str__(self) -> str:
        return f"params={self.params} grads={self.grads} opt_state={self.opt_state}"

    def resolve(self, ranks: DataRanks) -> Degrees:
        """The three degrees on `ranks`.

        Raises:
          UserError: a degree does not fit the ranks, or the dependency rule is broken.
        """
        try:
            degrees = Degrees(self.params.degree(ranks), self.grads.degree(ranks), self.opt_state.degree(ranks), ranks)
        except UserError as error:
            raise UserError(f"strategy '{self}': {error}") from None
        _check_rule(self, degrees)
        return degrees


def _check_rule(strategy: Strategy, degrees: Degrees) -> None:
    """s_params | s_grads | s_opt_state | s_data, inside a node and between nodes."""
    ranks = degrees.ranks
    chain = [
        ("params", degrees.params),
        ("grads", degrees.grads),
        ("opt_state", degrees.opt_state),
        ("data", Degree(ranks.per_node, ranks.num_nodes)),
    ]
    below_name, below = "", Degree(1, 1)
    for (small_name, small), (big_name, big) in zip(chain, chain[1:], strict=False):
        for level, where in (("intra", "inside a node"), ("inter", "between nodes")):
            have, limit = getattr(small, level), getattr(big, level)
            if have < 1 or limit % have:
                what = f"{limit} ({ranks})" if big_name == "data" else f"the {limit} of {big_name}={big}"
                other = "" if big_name == "data" else f"; or change {big_name}"
                # What divides the data ranks, too, can be part of a strategy that works.
                divisors = _divisors(math.gcd(limit, getattr(chain[-1][1], level)))
                multiples = [d for d in divisors if d % getattr(below, level) == 0]
                also = "" if multiples else f", where {below_name} divides it"
                raise UserError(
                    f"strategy '{strategy}': {small_name}={small} breaks the dependency rule (params divides grads "
                    f"divides opt_state divides data): {where}, {have} does not divide {what}. "
                    f"Nearest {small_name} {where}: {_list(_nearest(multiples or divisors, have))}{also}{other}"
                )
        below_name, below = small_name, small


def ddp() -> Strategy:
    """Plain data parallelism: everything replicated."""
    return Strategy(params=FullReplica(), grads=FullReplica(), opt_state=FullReplica())


def zero1() -> Strategy:
    """ZeRO-1: optimizer states over all ranks."""
    return Strategy(params=FullReplica(), grads=FullReplica(), opt_state=FullSharding())


def zero2() -> Strategy:
    """ZeRO-2: gradients and optimizer states over all ranks."""
    return Strategy(params=FullReplica(), grads=FullSharding(), opt_state=FullSharding())


def zero3() -> Strategy:
    """ZeRO-3, FSDP: everything over all ranks."""
    return Strategy(params=FullSharding(), grads=FullSharding(), opt_state=FullSharding())


def _ranks(k: int | None) -> Sharding:
    return NodeSharding() if k is None else RankSharding(k)


def mics(k: int | None = None) -> Strategy:
    """MiCS, hybrid FSDP: everything over k ranks, replicated beyond; k = the node if left out."""
    return Strategy(params=_ranks(k), grads=_ranks(k), opt_state=_ranks(k))


def hpz(k: int | None = None) -> Strategy:
    """ZeRO++'s secondary shard: parameters over k ranks, gradients and optimizer states over all."""
    return Strategy(params=_ranks(k), grads=FullSharding(), opt_state=FullSharding())


def hfsdp(k: int | None = None) -> Strategy:
    """Hybrid FSDP with ZeRO-1 across: parameters and gradients over k ranks, optimizer states over all."""
    return Strategy(params=_ranks(k), grads=_ranks(k), opt_state=FullSharding())


PRESETS: dict[str, Callable[..., Strategy]] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "fsdp": zero3,
    "mics": mics,
    "hsdp": mics,
    "hpz": hpz,
    "hfsdp": hfsdp,
}
"""Presets by name; those of the second half take an optional number of ranks, `mics(4)`."""
PRESETS_WITH_RANKS = frozenset({"mics", "hsdp", "hpz", "hfsdp"})

_COMPONENTS = ("params", "grads", "opt_state")
_WORDS: dict[str, Sharding] = {"replica": FullReplica(), "node": NodeSharding(), "full": FullSharding()}
_MOST_DIGITS = 9
_SYNTAX = (
    "a preset such as 'zero3' or 'mics(4)', or 'params=... grads=... opt_state=...' "
    "with replica, node, full, AxB or a count"
)


def parse(text: str | Strategy) -> Strategy:
    """A strategy from its text: a preset (`zero3`, `mics(4)`) or `params=replica grads=4x1 opt_state=full`.

    Raises:
      UserError: an unknown preset, component or sharding.
    """
    if isinstance(text, Strategy):
        return text
    stripped = text.strip()
    if "=" in stripped:
        return _parse_components(stripped)
    match = re.fullmatch(r"(\w+)\s*(?:\(\s*(\d*)\s*\))?", stripped)
    name = match.group(1).lower() if match else stripped
    if not match or name not in PRESETS:
        hint = difflib.get_close_matches(name, PRESETS, 1)
        raise UserError(
            f"strategy '{text}': unknown preset{f'; did you mean {hint[0]!r}?' if hint else '.'} "
            f"Presets: {', '.join(PRESETS)}. Write {_SYNTAX}"
        )
    if match.group(2):
        if name not in PRESETS_WITH_RANKS:
            raise UserError(f"strategy '{text}': {name} takes no number of ranks; write '{name}'")
        return PRESETS[name](_positive(match.group(2), text))
    return PRESETS[name]()


def _parse_components(text: str) -> Strategy:
    found: dict[str, Sharding] = {}
    for word in re.split(r"[\s,]+", text):
        name, _, value = word.partition("=")
        if name not in _COMPONENTS or name in found or not value:
            problem = "given twice" if name in found else "not a component with a value"
            raise UserError(f"strategy '{text}': '{word}' is {problem}; each of {', '.join(_COMPONENTS)} once")
        found[name] = _parse_sharding(value, text)
    missing = [name for name in _COMPONENTS if name not in found]
    if missing:
        raise UserError(f"strategy '{text}': {', '.join(missing)} missing; each of {', '.join(_COMPONENTS)} once")
    return Strategy(**found)


def _parse_sharding(value: str, text: str) -> Sharding:
    if value in _WORDS:
        return _WORDS[value]
    if match := re.fullmatch(r"(\d+)x(\d+)", value):
        return PartialSharding(_positive(match.group(1), text), _positive(match.group(2), text))
    if value.isdecimal():
        return RankSharding(_positive(value, text))
    raise UserError(
        f"strategy '{text}': '{value}' is no sharding; write replica, node, full, "
        "AxB (A ranks of a node times B nodes) or a count of ranks"
    )


def _positive(digits: str, text: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise UserError(f"strategy '{text}': a degree has at most {_MOST_DIGITS} digits, not {len(digits)}")
    if (number := int(digits)) < 1:
        raise UserError(f"strategy '{text}': a degree is at least 1, not {number}")
    return number


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _rank_counts(ranks: DataRanks) -> list[int]:
    return _divisors(ranks.per_node) + [ranks.per_node * d for d in _divisors(ranks.num_nodes)[1:]]


def _nearest(choices: list[int], wanted: int) -> list[int]:
    """The two below and the one above."""
    return [c for c in choices if c <= wanted][-2:] + [c for c in choices if c > wanted][:1]


def _check_positive(sizes: DataRanks | PartialSharding | RankSharding) -> None:
    for field in dataclasses.fields(sizes):
        value = getattr(sizes, field.name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{type(sizes).__name__}: {field.name}={value!r} must be an integer of at least 1")


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def all_degrees(ranks: DataRanks) -> list[Degrees]:
    """Every (P, G, OS) triple that keeps the dependency rule, nodes filled first or not."""

    def chains(size: int) -> list[tuple[int, int, int]]:
        return [(p, g, o) for o in _divisors(size) for g in _divisors(o) for p in _divisors(g)]

    return [
        Degrees(Degree(p, p_nodes), Degree(g, g_nodes), Degree(o, o_nodes), ranks)
        for p_nodes, g_nodes, o_nodes in chains(ranks.num_nodes)
        for p, g, o in chains(ranks.per_node)
    ]
