"""Counts what XLA makes of the training step for target GPUs, so that two checkouts can be compared line by line.

    python benchmarks/compiled_step.py                       # this checkout
    python benchmarks/compiled_step.py --checkout ../before  # another one, whatever its modules are called

Each row is compiled by the checkout's own `benchmarks/train_step.py --compile_for` in a process of its own; no GPU is
needed. The output is a markdown table. `order` is a digest of every instruction's opcode and result type in the order
of the text: two programs of equal digest are equal but for names.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = ("--model", "llama-7b", "--overrides", "{'num_layers': 8}", "--seq_len", "4096", "--microbatch", "1")
"""Settings of every row."""

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
"""Collectives that have a column."""

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?[\w.\-]+ = (.*)$")
_OPCODE = re.compile(r"(?:^| )([a-z][\w\-]*)\(")


def rows(group_flag: str) -> dict[str, tuple[str, ...]]:
    """The arguments of each row: no accumulation, four microbatches, one group of four."""
    return {
        f"{strategy}, {name}": ("--strategy", strategy, *arguments)
        for strategy in ("zero2", "zero3")
        for name, arguments in (
            ("1 microbatch", ()),
            ("4 microbatches", ("--accumulation", "4")),
            ("a group of 4", ("--accumulation", "4", group_flag, "4")),
        )
    }


def instructions(text: str) -> list[tuple[str, str]]:
    """(opcode, result type) of every instruction of `Compiled.as_text()`, in order."""
    found = []
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            opcode = _OPCODE.search(match[1])
            if opcode:
                found.append((opcode[1], match[1][: opcode.start()]))
    return found


def compiled(checkout: Path, target: str, num_devices: int, arguments: tuple[str, ...]) -> tuple[dict[str, str], str]:
    """(the row that `train_step.py` prints, the program's text)."""
    script = checkout / "benchmarks" / "train_step.py"
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    # A program from a cache would be compared with itself.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "program.txt"
        command = [sys.executable, str(script), "--compile_for", target, "--devices", str(num_devices)]
        command += [*COMMON, *arguments, "--dump", str(dump)]
        done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1]), dump.read_text()


def group_flag(checkout: Path) -> str:
    """What the checkout calls the flag for microbatch groups."""
    script = str(checkout / "benchmarks" / "train_step.py")
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    told = subprocess.run([sys.executable, script, "--help"], env=environment, capture_output=True, text=True)
    return "--microbatch_group" if "--microbatch_group" in told.stdout else "--group"


def table_row(name: str, row: dict[str, str], text: str) -> tuple[str, str]:
    """(a row of the table, a line with the number of instructions of each opcode)."""
    found = instructions(text)
    counts = collections.Counter(opcode for opcode, _ in found)
    collectives = [sum(counts[form] for form in (kind, f"{kind}-start")) for kind in KINDS]
    digest = hashlib.sha256(repr(found).encode()).hexdigest()[:12]
    peak = float(row["argument_gib"]) + float(row["temp_gib"])
    cells = [name, *map(str, collectives), row["argument_gib"], row["temp_gib"], f"{peak:.2f}", len(found), digest]
    opcodes = ", ".join(f"{opcode} {count}" for opcode, count in sorted(counts.items()))
    return f"| {' | '.join(map(str, cells))} |", f"- {name}: {opcodes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent, help="the repository to compile")
    parser.add_argument("--target", default="h200", help="as --compile_for of train_step.py")
    parser.add_argument("--devices", type=int, default=4, help="target GPUs, on one node")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    print("| step |", " | ".join(KINDS), "| arguments GiB | temporary GiB | peak GiB | instructions | order |")
    print("|---" * (len(KINDS) + 6) + "|", flush=True)
    lines = []
    for name, arguments in rows(group_flag(checkout)).items():
        if args.only in name:
            row, opcodes = table_row(name, *compiled(checkout, args.target, args.devices, arguments))
            print(row, flush=True)
            lines.append(opcodes)
    print("\nInstructions of each opcode:\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
