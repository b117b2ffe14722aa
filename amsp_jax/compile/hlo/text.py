"""XLA's text of a compiled program as computations of instructions; only what the other modules ask is read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e8m0fnu"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result, as one device sees it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its number of values."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return self.size * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      opcode: `all-gather-start`, `fusion`, ...
      arrays: of its result, tuples flattened.
      operands: their names.
      attributes: the text after the operands.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str

    def called(self) -> list[str]:
        """The computations that it runs: a fusion's, a call's, a loop's body, all branches."""
        return [name for text in _CALLED.findall(self.attributes) for name in re.findall(r"[\w.\-]+", text)]

    def num_trips(self) -> int:
        """How often it runs what it calls: 1, or a loop's trips as far as XLA knows them."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes) if self.opcode == "while" else None
        return int(found[1]) if found else 1


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: the instructions of each, in order; that of a scheduled program is the order of execution.
      entry: the name of the one that runs first.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str


def parse(text: str) -> Program:
    """Reads `Compiled.as_text()`.

    Raises:
      ValueError: it has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if not line.startswith(" "):
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif instruction := _parse_instruction(line):
            current.append(instruction)
    if not entry:
        raise ValueError("the text has no ENTRY computation; it is not that of a compiled program")
    return Program({name: tuple(lines) for name, lines in computations.items()}, entry)


def _parse_instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = found[2]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.search(rest, end)
    if not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[opcode.end() : close]))
    return Instruction(found[1], opcode[1], parse_arrays(rest[:end]), operands, rest[close:])


def parse_arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, tuples flattened; tokens and the like are left out."""
    return tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(text)
        if dtype in ITEM_BYTES
    )


def _closing(text: str, start: int) -> int:
    """Just past the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)
