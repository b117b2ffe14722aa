"""How parameters (P), gradients (G) and optimizer states (OS) are spread over data ranks (AMSP, arXiv 2311.00257).

Each component chooses a sharding; on given data ranks it becomes a degree `intra x inter`: that many
ranks inside a node times that many nodes hold one copy together. The dependency rule binds the three,
inside a node and between nodes: s_params divides s_grads divides s_opt_state divides s_data. So no
rank keeps gradients or optimizer states of parameters that are not its own.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
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


@dataclasses.dataclass(frozen=True, init=False)
class Strategy:
    """A sharding for each of the three components.

    Attributes:
      params, grads, opt_state: a sharding, or its text as `over` takes it.
      rules: strategies, or their texts, of leaves that differ: pairs of a regular expression and a strategy, or a dict,
        as the setting `rules` is one. The first expression that matches the whole name of a leaf decides; a leaf that
        none matches has the three shardings above. The attribute holds pairs.
      text: what the person wrote, such as `mics(4)`, for messages; empty if there is no such text.

    Raises:
      UserError: a text is no sharding, an expression is not regular, or the strategy of a rule has rules itself.

    Example:
      >>> Strategy(params="replica", grads="4x1", opt_state="full")
      >>> parse("params=replica grads=4x1 opt_state=full")   # the same
      >>> Strategy(params="full", grads="full", opt_state="full", rules=[(r"embed\\..*", "zero1")])
    """

    params: Sharding
    grads: Sharding
    opt_state: Sharding
    rules: tuple[tuple[str, Strategy], ...] = ()
    text: str = dataclasses.field(default="", init=False, compare=False, repr=False)

    def __init__(
        self,
        *,
        params: Sharding | str | int,
        grads: Sharding | str | int,
        opt_state: Sharding | str | int,
        rules: Iterable[tuple[str, Strategy | str]] | Mapping[str, Strategy | str] = (),
    ) -> None:
        for name, value in (("params", params), ("grads", grads), ("opt_state", opt_state)):
            object.__setattr__(self, name, value if hasattr(value, "degree") else over(value))
        pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise UserError(f"rules={pairs!r}: they are pairs of a pattern and a strategy, [('embed.*', 'zero1')]")
        object.__setattr__(self, "rules", tuple(_rule(*pair) for pair in pairs))

    def __str__(self) -> str:
        rules = "".join(f", {pattern}: {strategy}" for pattern, strategy in self.rules)
        return f"params={self.params} grads={self.grads} opt_state={self.opt_state}{rules}"

    def resolve(self, ranks: DataRanks) -> Degrees:
        """The three degrees on `ranks`, of leaves that no rule matches.

        Raises:
          UserError: a degree does not fit the ranks, or the dependency rule is broken.
        """
        return self._resolve(ranks, f"strategy={self._as_written}")

    def _resolve(self, ranks: DataRanks, where: str) -> Degrees:
        try:
            degrees = Degrees(self.params.degree(ranks), self.grads.degree(ranks), self.opt_state.degree(ranks), ranks)
            _check_dependency(degrees)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return degrees

    @property
    def _as_written(self) -> str:
        """The text that the person wrote, and the three shardings that it means."""
        own = f"params={self.params} grads={self.grads} opt_state={self.opt_state}"
        return f"'{own}'" if self.text in ("", own) else f"{self.text!r} ({own})"

    def resolve_rules(self, ranks: DataRanks) -> tuple[Degrees, ...]:
        """The degrees of each rule on `ranks`.

        Raises:
          UserError: as `resolve`, with the pattern of the rule.
        """
        return tuple(
            strategy._resolve(ranks, f"rules: {pattern!r}: {strategy._as_written}") for pattern, strategy in self.rules
        )

    def rule_of(self, name: str) -> int | None:
        """The number of the first rule whose pattern matches the whole name of a leaf; None if no rule does."""
        return next((i for i, (pattern, _) in enumerate(self.rules) if re.fullmatch(pattern, name)), None)


def _rule(pattern: str, strategy: Strategy | str) -> tuple[str, Strategy]:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UserError(f"rules: {pattern!r} is no regular expression: {error}") from None
    try:
        strategy = parse(strategy)
    except UserError as error:
        # A strategy of a rule is no argument `strategy`.
        raise UserError(f"rules: {pattern!r}: {str(error).removeprefix('strategy=')}") from None
    if strategy.rules:
        raise UserError(f"rules: the strategy of {pattern!r} has rules itself; write them one after another")
    return pattern, strategy


def _check_dependency(degrees: Degrees) -> None:
    """Raises UserError unless s_params | s_grads | s_opt_state | s_data, inside a node and between nodes."""
    ranks = degrees.ranks
    chain = [
        ("params", degrees.params),
        ("grads", degrees.grads),
        ("opt_state", degrees.opt_state),
        ("data", Degree(ranks.per_node, ranks.num_nodes)),
    ]
    broken: list[str] = []
    below_name, below = "", Degree(1, 1)
    for (name, small), (big_name, big) in zip(chain, chain[1:], strict=False):
        problems, nearest = [], []
        for level, where in (("intra", "inside a node"), ("inter", "between nodes")):
            have, limit = getattr(small, level), getattr(big, level)
            if have >= 1 and limit % have == 0:
                continue
            what = f"{limit} ({ranks})" if big_name == "data" else f"the {limit} of {big_name}={big}"
            problems.append(f"{where}, {have} does not divide {what}")
            # What divides the data ranks, too, can be part of a strategy that works.
            divisors = _divisors(math.gcd(limit, getattr(chain[-1][1], level)))
            multiples = [d for d in divisors if d % getattr(below, level) == 0]
            also = "" if multiples else f", where {below_name} divides it"
            nearest.append(f"{where}: {_list(_nearest(multiples or divisors, have))}{also}")
        if problems:
            rule = "" if broken else " (params divides grads divides opt_state divides data)"
            other = "" if big_name == "data" else f"; or change {big_name}"
            broken.append(
                f"{name}={small} breaks the dependency rule{rule}: {'; '.join(problems)}. "
                f"Nearest {name} {'; '.join(nearest)}{other}"
            )
        below_name, below = name, small
    if broken:
        raise UserError(". And ".join(broken))


def over(ranks: str | int) -> Sharding:
    """A sharding from a word or a number.

    Args:
      ranks: `replica`; `node`, all ranks of a node; `all` or `full`, all data ranks; `AxB`, A ranks of a node times B
        nodes; or a count of ranks, which fill a node before the next is begun.

    Raises:
      UserError: anything else.

    Example:
      >>> Strategy(params=over(8), grads=over("node"), opt_state=over("all"))
    """
    if isinstance(ranks, bool) or not isinstance(ranks, str | int):
        raise UserError(f"over({ranks!r}): {_SHARDINGS}")
    return _parse_sharding(str(ranks), f"over({ranks!r})")


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


def _written(name: str, k: int | None, strategy: Strategy) -> Strategy:
    return _with_text(strategy, name if k is None else f"{name}({k})")


def _with_text(strategy: Strategy, text: str) -> Strategy:
    """The strategy with the text that messages name; the one given stays as it is."""
    result = copy.copy(strategy)
    object.__setattr__(result, "text", text)
    return result


def mics(k: int | None = None) -> Strategy:
    """MiCS, hybrid FSDP: everything over k ranks, replicated beyond; k = the node if left out."""
    return _written("mics", k, Strategy(params=_ranks(k), grads=_ranks(k), opt_state=_ranks(k)))


def hpz(k: int | None = None) -> Strategy:
    """ZeRO++'s secondary shard: parameters over k ranks, gradients and optimizer states over all."""
    return _written("hpz", k, Strategy(params=_ranks(k), grads=FullSharding(), opt_state=FullSharding()))


def hfsdp(k: int | None = None) -> Strategy:
    """Hybrid FSDP with ZeRO-1 across: parameters and gradients over k ranks, optimizer states over all."""
    return _written("hfsdp", k, Strategy(params=_ranks(k), grads=_ranks(k), opt_state=FullSharding()))


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
"""Strategies by name; `register_strategy` adds to them."""


def numbers_of(name: str) -> tuple[str, ...]:
    """The numbers that a preset takes, `("k",)` of `mics(4)`: the parameters of its function."""
    return tuple(inspect.signature(PRESETS[name]).parameters)


def register_strategy(name: str) -> Callable[[Callable[..., Strategy]], Callable[..., Strategy]]:
    """Gives a function that makes a strategy a name, which is then understood wherever a strategy is a text.

    Args:
      name: a Python identifier, read without regard to case.

    Returns:
      A decorator. The parameters of the decorated function have integers as defaults, and become numbers of the text:
      `mine`, `mine(8)`, `mine(k=8)`.

    Raises:
      UserError: the name is taken or no identifier, or a parameter has no integer as its default.

    Example:
      >>> @register_strategy("mine")
      ... def mine(k: int = 8):
      ...     return Strategy(params=over(k), grads=over("node"), opt_state=over("all"))
    """
    key = name.lower() if isinstance(name, str) else name
    if not isinstance(key, str) or not key.isidentifier():
        raise UserError(f"register_strategy({name!r}): a name is letters, digits and underscores, as 'my_strategy'")
    if key in PRESETS or key == "auto":
        raise UserError(f"register_strategy({name!r}): there is a strategy of this name; choose another")

    def register(make: Callable[..., Strategy]) -> Callable[..., Strategy]:
        for parameter in inspect.signature(make).parameters.values():
            if type(parameter.default) is not int:
                raise UserError(
                    f"register_strategy({name!r}): parameter {parameter.name} of {make.__name__} needs an integer as "
                    f"its default, as in '{parameter.name}: int = 8'"
                )
        PRESETS[key] = make
        return make

    return register


_COMPONENTS = ("params", "grads", "opt_state")
_WORDS: dict[str, Sharding] = {
    "replica": FullReplica(),
    "node": NodeSharding(),
    "full": FullSharding(),
    "all": FullSharding(),
}
_MOST_DIGITS = 9
_SHARDINGS = "write replica, node, full, AxB (A ranks of a node times B nodes) or a count of ranks"
_SYNTAX = (
    "a preset such as 'zero3' or 'mics(4)', or 'params=... grads=... opt_state=...' "
    "with replica, node, full, AxB or a count"
)


def parse(
    text: str | Strategy,
    rules: Iterable[tuple[str, Strategy | str]] | Mapping[str, Strategy | str] | None = None,
) -> Strategy:
    """A strategy from its text: a preset (`zero3`, `mics(4)`) or `params=replica grads=4x1 opt_state=full`.

    Args:
      text: or a strategy.
      rules: strategies of leaves that differ, pairs or a dict; see `Strategy`.

    Raises:
      UserError: an unknown preset, component or sharding; or rules beside a strategy that has its own.
    """
    strategy = text if isinstance(text, Strategy) else _with_text(_parse(text), text.strip())
    if not rules:
        return strategy
    if strategy.rules:
        raise UserError(f"strategy='{text}' has rules of its own; give rules in one place")
    ruled = Strategy(params=strategy.params, grads=strategy.grads, opt_state=strategy.opt_state, rules=rules)
    return _with_text(ruled, strategy.text)


def _parse(text: str) -> Strategy:
    if not isinstance(text, str):
        raise UserError(f"strategy={text!r}: it is a text or a Strategy. Write {_SYNTAX}")
    stripped = text.strip()
    match = re.fullmatch(r"(\w+)\s*(?:\((.*)\))?", stripped)
    if "=" in stripped and not match:
        return _parse_components(stripped)
    name = match.group(1).lower() if match else stripped
    if not match or name not in PRESETS:
        hint = difflib.get_close_matches(name, PRESETS, 1)
        raise UserError(
            f"strategy={text!r}: unknown preset{f'; did you mean {hint[0]!r}?' if hint else '.'} "
            f"Presets: {', '.join(PRESETS)}. Write {_SYNTAX}"
        )
    made = PRESETS[name](**_numbers(name, match.group(2) or "", text))
    if not isinstance(made, Strategy):
        raise UserError(f"strategy={text!r}: the function of {name} returned {made!r}, which is no Strategy")
    return made


def _numbers(name: str, inside: str, text: str) -> dict[str, int]:
    """The numbers inside a preset's parentheses, by the names of its parameters."""
    names, found = numbers_of(name), dict[str, int]()
    words = [word.strip() for word in inside.split(",")] if inside.strip() else []
    if words and not names:
        raise UserError(f"strategy={text!r}: {name} takes no number of ranks; write '{name}'")
    for place, word in enumerate(words):
        key, is_named, value = word.rpartition("=")
        key = key.strip() if is_named else names[place] if place < len(names) else ""
        if key not in names or key in found or not value.strip().isdecimal():
            example = ", ".join(f"{one}=8" for one in names)
            raise UserError(
                f"strategy={text!r}: '{word}' is no number of {name}; write '{name}' or '{name}({example})'"
            )
        found[key] = _positive(value.strip(), f"strategy={text!r}")
    return found


def _parse_components(text: str) -> Strategy:
    found: dict[str, Sharding] = {}
    for word in re.split(r"[\s,]+", text):
        name, _, value = word.partition("=")
        if name not in _COMPONENTS or name in found or not value:
            problem = "given twice" if name in found else "not a component with a value"
            raise UserError(f"strategy={text!r}: '{word}' is {problem}; each of {', '.join(_COMPONENTS)} once")
        found[name] = _parse_sharding(value, f"strategy={text!r}")
    missing = [name for name in _COMPONENTS if name not in found]
    if missing:
        raise UserError(f"strategy={text!r}: {', '.join(missing)} missing; each of {', '.join(_COMPONENTS)} once")
    return Strategy(params=found["params"], grads=found["grads"], opt_state=found["opt_state"])


def _parse_sharding(value: str, where: str) -> Sharding:
    word = value.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    if match := re.fullmatch(r"(\d+)[x×](\d+)", word):
        return PartialSharding(_positive(match.group(1), where), _positive(match.group(2), where))
    if word.isdecimal():
        return RankSharding(_positive(word, where))
    raise UserError(f"{where}: '{value}' is no sharding; {_SHARDINGS}")


def _positive(digits: str, where: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise UserError(f"{where}: a degree has at most {_MOST_DIGITS} digits, not {len(digits)}")
    if (number := int(digits)) < 1:
        raise UserError(f"{where}: a degree is at least 1, not {number}")
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
