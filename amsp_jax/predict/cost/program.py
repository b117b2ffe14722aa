"""A traced function as one flat list of operations, and what XLA is expected to keep of it in memory.

XLA fuses elementwise operations: a value is written to memory only if it enters or leaves an operation that is a
kernel of its own (a matrix product, attention, a scatter), is the result of a reduction, or leaves the function.
Everything else is computed again where it is read. This is a model of the compiler, not the compiler.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core

_VIEWS = frozenset(
    {"reshape", "name", "reduce_precision", "squeeze", "expand_dims", "transpose", "copy", "optimization_barrier"}
)
"""Their results are their operands seen otherwise: no bytes of their own."""
_KERNELS = re.compile(
    r"dot_general|conv_general|dot_product_attention|gather|scatter|sort|top_k|cum(sum|prod|max|min|logsumexp)|fft|"
    r"ffi_call|pallas_call|cholesky|triangular_solve|while|cond|psum|all_to_all|ppermute|ragged_dot"
)
_ATTENTION = {
    "forward": re.compile("dot_product_attention_fwd|mha_forward"),
    "backward": re.compile("dot_product_attention_bwd|mha_backward"),
}
"""cuDNN's primitives and Pallas's kernels."""
_REDUCTIONS = re.compile(r"reduce_(?!precision)|argmax|argmin")


@dataclasses.dataclass(frozen=True)
class Value:
    """An array of the program; views of one array are equal, whatever their shapes."""

    number: int
    shape: tuple[int, ...] = dataclasses.field(compare=False)
    num_bytes: int = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One primitive.

    Attributes:
      name, params: of the jaxpr's equation.
      inputs, outputs: literals left out.
      repeats: trips of the loops around it.
    """

    name: str
    params: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    repeats: int

    @property
    def is_kernel(self) -> bool:
        """Whether it fuses with nothing, so that its operands and results are in memory."""
        return bool(_KERNELS.match(self.name))

    @property
    def attention(self) -> str | None:
        """Which pass of fused attention it is, "forward" or "backward"; None if neither."""
        kernel = self.params["name"] or "" if self.name == "pallas_call" else self.name
        return next((way for way, names in _ATTENTION.items() if names.match(kernel)), None)

    @property
    def is_reduction(self) -> bool:
        """Whether its result is in memory, though not its operands."""
        return bool(_REDUCTIONS.match(self.name))


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in order, those without effect on the outputs left out; views are the values they show.

    Attributes:
      inputs, outputs, operations: as traced.
      barred: values that went through an `optimization_barrier`: they are in memory before what follows it.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    barred: frozenset[Value] = frozenset()


def flatten(closed: core.ClosedJaxpr) -> Program:
    """Calls inlined; a scan's body is there once, with its trips as `repeats`.

    A product that is added to a barred array is added in place: the array is an operand of the product and its result.
    """
    flattener = _Flattener()
    jaxpr = closed.jaxpr
    environment = {v: flattener.fresh(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
    flattener.walk(jaxpr, environment, 1)
    outputs = tuple(flattener.read(v, environment) for v in jaxpr.outvars)
    inputs, operations = tuple(environment[v] for v in jaxpr.invars), tuple(flattener.operations)
    return pruned(Program(inputs, outputs, operations, frozenset(flattener.barred)))


def pruned(program: Program) -> Program:
    """Without operations that have no effect on the outputs."""
    needed, kept = set(program.outputs), []
    for operation in reversed(program.operations):
        # A loop's body is not connected to its results, so all of it counts.
        if operation.repeats > 1 or needed.intersection(operation.outputs):
            needed.update(operation.inputs)
            kept.append(operation)
    return dataclasses.replace(program, operations=tuple(kept[::-1]))


class _Flattener:
    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.barred: set[Value] = set()
        # The place of each in `operations`.
        self._products: dict[Value, int] = {}
        self._count = 0

    def fresh(self, aval: Any) -> Value:
        self._count += 1
        shape = tuple(getattr(aval, "shape", ()))
        # A PRNG key has a dtype without an item size; keys are a few bytes.
        return Value(self._count, shape, math.prod(shape) * getattr(getattr(aval, "dtype", None), "itemsize", 0))

    def read(self, variable: Any, environment: dict[Any, Value]) -> Value:
        """Its value; that of a literal takes no memory."""
        if isinstance(variable, core.Literal):
            return dataclasses.replace(self.fresh(variable.aval), num_bytes=0)
        return environment[variable]

    def walk(self, jaxpr: Any, environment: dict[Any, Value], repeats: int) -> None:
        """Appends the operations of `jaxpr` and enters the values of its variables in `environment`."""
        for eqn in jaxpr.eqns:
            inputs = [None if isinstance(v, core.Literal) else environment[v] for v in eqn.invars]
            results = self._results(eqn, inputs, repeats)
            environment.update(zip(eqn.outvars, results, strict=True))

    def _results(self, eqn: Any, inputs: Sequence[Value | None], repeats: int) -> list[Value]:
        name, known = eqn.primitive.name, tuple(v for v in inputs if v is not None)
        if name == "scan":
            return self._scan(eqn, inputs, repeats)
        body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if body is not None and not _KERNELS.match(name):
            return self._call(body, inputs, repeats)
        if name == "optimization_barrier":
            self.barred.update(known)
        if name in _VIEWS and len(known) == len(eqn.outvars):
            return [dataclasses.replace(v, shape=out.aval.shape) for v, out in zip(known, eqn.outvars, strict=True)]
        if name == "add" and self._adds_in_place(known):
            return [known[0]]
        outputs = tuple(self.fresh(v.aval) for v in eqn.outvars)
        if name == "dot_general":
            self._products[outputs[0]] = len(self.operations)
        self.operations.append(Operation(name, eqn.params, known, outputs, repeats))
        return list(outputs)

    def _adds_in_place(self, terms: Sequence[Value]) -> bool:
        """Whether the terms are a barred array and a product, which then becomes one that adds itself to it."""
        if len(terms) != 2 or terms[0] not in self.barred or terms[0].shape != terms[1].shape:
            return False
        number = self._products.get(terms[1])
        if number is None:
            return False
        product = self.operations[number]
        self.operations[number] = dataclasses.replace(product, inputs=(*product.inputs, terms[0]), outputs=(terms[0],))
        return True

    def _call(self, body: Any, inputs: Sequence[Value | None], repeats: int) -> list[Value]:
        jaxpr = getattr(body, "jaxpr", body)
        environment = {v: self.fresh(v.aval) for v in jaxpr.constvars}
        for variable, value in zip(jaxpr.invars, inputs, strict=True):
            environment[variable] = value or self.fresh(variable.aval)
        self.walk(jaxpr, environment, repeats)
        return [self.read(v, environment) for v in jaxpr.outvars]

    def _scan(self, eqn: Any, inputs: Sequence[Value | None], repeats: int) -> list[Value]:
        """One trip reads what the loop reads; what the loop returns is new."""
        self._call(eqn.params["jaxpr"], inputs, repeats * eqn.params["length"])
        return [self.fresh(v.aval) for v in eqn.outvars]


class Materialised:
    """Which values of a program are in memory."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._producer = {v: op for op in program.operations for v in op.outputs}
        self._kept = {*program.inputs, *program.outputs, *program.barred}
        for op in program.operations:
            self._kept.update(op.outputs if op.is_kernel or op.is_reduction else ())
            self._kept.update(op.inputs if op.is_kernel else ())
        self._sources: dict[Value, frozenset[Value]] = {}

    def __contains__(self, value: Value) -> bool:
        return value in self._kept

    def reads(self, operation: Operation) -> frozenset[Value]:
        """The values in memory from which an operation, and what is fused into it, is computed."""
        return frozenset().union(*(self._source(v) for v in operation.inputs))

    def _source(self, value: Value) -> frozenset[Value]:
        if value in self._kept:
            return frozenset([value])
        if value not in self._sources:
            producer = self._producer.get(value)
            self._sources[value] = self.reads(producer) if producer else frozenset()
        return self._sources[value]

    def roots(self) -> Iterator[Operation]:
        """Operations whose results are in memory: one kernel each."""
        return (op for op in self.program.operations if any(v in self for v in op.outputs))


def traffic_bytes(program: Program) -> int:
    """Bytes that all kernels but matrix products and attention read and write; an estimate, see the module.

    XLA merges kernels that read the same arrays, so this is an upper estimate of reads. An array that products are
    added to is read and written by each.
    """
    memory, total = Materialised(program), 0
    for op in memory.roots():
        total += 2 * op.repeats * sum(v.num_bytes for v in op.outputs if v in op.inputs)
        if not op.attention and not re.match("dot_general|conv", op.name):
            total += op.repeats * _moved_bytes(op, memory)
    return total


def _moved_bytes(operation: Operation, memory: Materialised) -> int:
    written = sum(v.num_bytes for v in operation.outputs if v in memory)
    if operation.name == "gather":
        return 2 * written
    return written + sum(v.num_bytes for v in memory.reads(operation))


def peak_bytes(program: Program, kept: Iterable[Value], ignored: Iterable[Value]) -> int:
    """The most bytes alive at once, operations run in order and inputs freed after their last use.

    Args:
      program: to run.
      kept: values that stay until the end, as outputs do.
      ignored: values that do not count.
    """
    memory, forever, skipped = Materialised(program), {*program.outputs, *kept}, set(ignored)
    last_use = {v: step for step, op in enumerate(program.operations) for v in (*memory.reads(op), *op.outputs)}
    expiring: dict[int, list[Value]] = defaultdict(list)
    for value, step in last_use.items():
        if value in memory and value not in forever and value not in skipped:
            expiring[step].append(value)
    alive = peak = sum(v.num_bytes for v in set(program.inputs) - skipped)
    for step, op in enumerate(program.operations):
        alive += sum(v.num_bytes for v in op.outputs if v in memory and v not in skipped and v not in op.inputs)
        peak = max(peak, alive)
        alive -= sum(v.num_bytes for v in expiring[step])
    return peak


def products_into(program: Program, outputs: Iterable[Value]) -> tuple[frozenset[Value], frozenset[Value]]:
    """(results, operands) of the kernels from whose results alone `outputs` are computed, elementwise or not at all.

    Where a barrier has a result computed before, it takes the place of the operands.
    """
    producers = {v: op for op in program.operations for v in op.outputs}
    results: set[Value] = set()
    operands: set[Value] = set()
    pending = list(outputs)
    while pending:
        value = pending.pop()
        op = producers.get(value)
        if op is None or value in results or op.is_reduction:
            continue
        if value in program.barred:
            operands.add(value)
            continue
        results.add(value)
        if op.is_kernel:
            operands.update(op.inputs)
        else:
            pending.extend(op.inputs)
    return frozenset(results), frozenset(operands)
