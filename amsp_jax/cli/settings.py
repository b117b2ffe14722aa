"""From a command line and gin files to a `TrainConfig`; every mistake becomes one `UserError`.

The defaults of `TrainConfig` come first, then each `--gin_file` in order, then the `--gin.NAME=value` flags. The
library speaks of Python arguments (`global_batch=8`); `exits.spell` writes them as gin macros (`GLOBAL_BATCH=8`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import importlib.resources
import logging
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import jax

from amsp_jax.cli.exits import spell
from amsp_jax.cli.gin_safety import check_text, checked_files
from amsp_jax.cli.parsing import Parser
from amsp_jax.engine.optimizer import OPTIMIZERS
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.models import registry
from amsp_jax.models.attention import AttentionChoice, choose_attention
from amsp_jax.models.registry import MODELS, model_config
from amsp_jax.run.config import FIELDS, TrainConfig, did_you_mean, kinds_of
from amsp_jax.runtime import launch
from amsp_jax.strategy import PRESETS, numbers_of

# The package's own files, in a checkout and in an installed wheel alike: `configs` is a folder of the package.
PACKAGE = Path(str(importlib.resources.files("amsp_jax")))
QUICKSTART = "configs/quickstart.gin"

_FLAG = "--gin."
_NO_WRAP = 1_000_000
# Names that a message shows in place of a file that is not there.
_NUM_NEAR = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What a person typed after `python train.py`.

    Attributes:
      gin_files: existing files, in order.
      bindings: gin statements, in order.
      coordinator, num_processes, process_id: of a run of several processes started by hand; None: found out.
      is_dry_run: print devices and plan, and stop.
      wants_help: print the help and stop.
    """

    gin_files: tuple[Path, ...]
    bindings: tuple[str, ...]
    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    is_dry_run: bool
    wants_help: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model, and a line on its attention: which implementation, and why."""

    model: Model
    attention: str


def set_up(
    args: argparse.Namespace | CommandLine, config: TrainConfig | None = None, same: Mapping[str, str] | None = None
) -> launch.DeviceLayout:
    """The devices, in order; from here on jax runs.

    Args:
      args: which processes there are; without a config also their devices, as `add_device_arguments` has them.
      config: of a run, whose devices are settings.
      same: as in `launch.setup`.

    Raises:
      UserError: as `launch.setup` does.
    """
    grid: Any = config or args
    return launch.setup(
        simulated_nodes=grid.simulated_nodes,
        simulated_devices_per_node=grid.simulated_devices_per_node,
        devices_per_node=grid.devices_per_node,
        coordinator=args.coordinator,
        num_processes=args.num_processes,
        process_id=args.process_id,
        same=same,
    )


def parse_command_line(argv: Sequence[str], *, starts_from_quickstart: bool = False) -> CommandLine:
    """Reads the arguments of `train.py`.

    Args:
      argv: without the program's name.
      starts_from_quickstart: where no gin file is named, the quickstart is read.

    Raises:
      UserError: an unknown flag, a flag without a value, a file that does not exist.
    """
    parser = Parser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--gin_file", action="append", default=[])
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    known, unknown = parser.parse_known_args([a for a in argv if not a.startswith(_FLAG)])
    if unknown:
        raise UserError(_unknown_argument(unknown))
    return CommandLine(
        gin_files=tuple(find_gin_files(known.gin_file) if known.gin_file or starts_from_quickstart else ()),
        bindings=tuple(binding(a) for a in argv if a.startswith(_FLAG)),
        coordinator=known.coordinator,
        num_processes=known.num_processes,
        process_id=known.process_id,
        is_dry_run=known.dry_run,
        wants_help=known.help,
    )


def _unknown_argument(unknown: Sequence[str]) -> str:
    flag, equals, value = unknown[0].partition("=")
    name = flag.lstrip("-").replace("-", "_").lower()
    if flag.startswith("-") and name in FIELDS:
        value = value if equals else next((word for word in unknown[1:] if not word.startswith("--")), "VALUE")
        return f"unknown argument {unknown[0]!r}: settings are written {shlex.quote(f'{_FLAG}{name.upper()}={value}')}"
    flags = ["--gin_file", "--coordinator", "--num_processes", "--process_id", "--dry-run"]
    flags += [_FLAG + field.upper() for field in FIELDS]
    return f"unknown argument {unknown[0]!r}{did_you_mean(flag, flags)}; settings are written --gin.STEPS=100"


def find_gin_files(names: Sequence[str]) -> list[Path]:
    """The files of these names; without a name the package's quickstart, whatever lies in the working directory."""
    return [find_gin_file(name) for name in names] or [PACKAGE / QUICKSTART]


def find_gin_file(name: str) -> Path:
    """The file of this name, relative to the working directory, else to the package."""
    # What cannot be the name of a file is no file either.
    with contextlib.suppress(OSError, ValueError):
        for path in (Path(name), PACKAGE / name):
            if path.is_file():
                return path
    there = [str(p.relative_to(PACKAGE)) for p in sorted((PACKAGE / "configs").rglob("*.gin"))]
    folders = " or ".join(dict.fromkeys((str(Path.cwd()), str(PACKAGE))))
    near = sorted(there, key=lambda path: _likeness(name, path), reverse=True)[:_NUM_NEAR]
    raise UserError(
        f"--gin_file={name}: no such file in {folders}{did_you_mean(name, there)}; the nearest names are "
        f"{', '.join(near)}"
    )


def _likeness(name: str, path: str) -> float:
    """How much a name is like a path, or like the last part of it."""
    pairs = ((name, path), (Path(name).name, Path(path).name))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def binding(flag: str) -> str:
    """The gin statement of `--gin.NAME=value`: the value is a literal if it reads as one, else a string."""
    name, equals, text = flag.removeprefix(_FLAG).partition("=")
    if not equals:
        raise UserError(f"{flag!r} has no value; write {_FLAG}{name}=VALUE")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise UserError(f"{flag!r}: {name!r} is not a setting{_near_macro(name.split('.')[-1])}; write --gin.STEPS=100")
    return f"{name} = {_value(text, is_word=_takes_words_alone(name))}"


def _takes_words_alone(name: str) -> bool:
    kind, _ = FIELDS.get(name.lower(), (Any, ""))
    return set(kinds_of(kind)) <= {str, type(None)}


def _value(text: str, is_word: bool) -> str:
    if re.fullmatch(r"%[A-Za-z_]\w*", text):
        return text
    try:
        literal = repr(ast.literal_eval(text.strip()))
        # 1e999 is a literal, but inf is not.
        ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return repr(text)
    # A shell takes the quotes of RUN_DIR='7' away.
    is_other = is_word and not (literal == "None" or literal[0] in "'\"")
    return repr(text) if is_other else literal


def load_config(gin_files: Sequence[Path], bindings: Sequence[str] = ()) -> TrainConfig:
    """The defaults changed by these files and these statements, a later one winning over an earlier.

    Raises:
      UserError: a file that is not gin, an unknown name, a binding without effect, a wrong type or range.
    """
    with _gin_errors():
        for path in gin_files:
            checked_files(path, (Path(), PACKAGE))
        check_text("\n".join(bindings), "a binding")
        gin.clear_config()
        gin.parse_config(_defaults_text())
        gin.parse_config_files_and_bindings([str(path) for path in gin_files], list(bindings), finalize_config=False)
        config = gin.get_configurable(TrainConfig)()
    _refuse_unused(gin.config_str(_NO_WRAP), gin.operative_config_str(_NO_WRAP))
    return config


def _defaults_text() -> str:
    """The macro of each field with its default, and the binding from macro to field."""
    imports = "from __gin__ import dynamic_registration\nfrom amsp_jax.run import config\n"
    return imports + TrainConfig().to_gin() + "".join(f"config.TrainConfig.{n} = %{n.upper()}\n" for n in FIELDS)


def build_model(config: TrainConfig, device: jax.Device | None = None) -> BuiltModel:
    """The model that MODEL and MODEL_OVERRIDES name, with the attention that suits the device.

    Args:
      config: the settings.
      device: one of those it will run on; None builds a model to read shapes from.

    Raises:
      UserError: no such model, or overrides that it does not take.
    """
    sizes = model_config(config.model, config.model_overrides)
    attention = AttentionChoice("xla", "no device chosen")
    if device is not None:
        capability = getattr(device, "compute_capability", None)
        attention = choose_attention(
            device.platform,
            capability,
            sizes.head_dim,
            config.compute_dtype,
            config.seq_len,
            forced=config.model_overrides.get("attention"),
            num_context=config.context,
        )
    model = registry.build_model(config.model, config.model_overrides, attention=attention.implementation)
    return BuiltModel(model=model, attention=attention.reason)


def _preset_words(name: str) -> str:
    """A preset with the numbers that it takes, `mics(k)`."""
    numbers = ", ".join(numbers_of(name))
    return f"{name}({numbers})" if numbers else name


def help_text() -> str:
    """What `python train.py --help` prints."""
    defaults = TrainConfig().settings()
    settings = [f"  {name.upper():<27} {defaults[name]:<16} {spell(text)}" for name, text in _explained()]
    presets = [f"  {_preset_words(name):<11} {_first_line(PRESETS[name])}" for name in PRESETS]
    return "\n".join(
        [
            "python train.py [--gin_file=FILE]... [--gin.NAME=VALUE]...",
            "                [--coordinator HOST:PORT --num_processes N --process_id I] [--dry-run]",
            "",
            f"Without --gin_file it starts from {QUICKSTART}, whose values come before the defaults below.",
            "A later file or flag wins over an earlier one. --dry-run checks everything, prints processes, devices and",
            "the plan, and writes nothing.",
            "",
            "Settings, their defaults and meaning:",
            *settings,
            "",
            "Strategies (STRATEGY): 'params=... grads=... opt_state=...', each replica, node, full, AxB (A devices of",
            "each of B nodes) or a count of devices; or a preset, where k is a number of devices:",
            *presets,
            "",
            f"Models (MODEL): {', '.join(MODELS)}",
            f"Optimizers (OPTIMIZER): {', '.join(OPTIMIZERS)}",
            "",
            "Exit codes: 0 done, 2 a mistake in the settings, 85 stopped by a signal and saved, 86 another process was",
            "lost, 87 the numbers went bad, 130 interrupted twice.",
        ]
    )


def _explained() -> Iterator[tuple[str, str]]:
    for name, (kind, text) in FIELDS.items():
        literals = (one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is typing.Literal)
        words = ", ".join(word for literal in literals for word in typing.get_args(literal))
        yield name, text + (f" ({words})" if words else "")


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").splitlines()[0]


@contextlib.contextmanager
def _gin_errors() -> Iterator[None]:
    """Turns whatever gin raises into a `UserError`, and keeps gin's own log lines off the screen."""
    logging.disable(logging.ERROR)
    try:
        yield
    except UserError as error:
        # gin appends the name of the configurable to whatever passes through it.
        raise UserError(str(error).split("\n  In call to configurable")[0]) from None
    except SyntaxError as error:
        raise UserError(_syntax_message(error)) from None
    except Exception as error:  # gin has no exception type of its own
        raise UserError(_binding_message(str(error))) from None
    finally:
        logging.disable(logging.NOTSET)


def _syntax_message(error: SyntaxError) -> str:
    where = f"{error.filename or 'a binding'}, line {error.lineno}"
    word = re.search(r"Failed to parse token '(.*)'", str(error.msg))
    if not word:
        return f"{where}: {error.msg}; a line of a gin file is NAME = value"
    return f"{where}: {word[1]!r} is not a gin value; strings need quotes, '{word[1]}', and it is True, False, None"


def _binding_message(message: str) -> str:
    if missing := re.search(r"call to configurable 'macro' .* in scope '(\w+)'", message):
        return f"%{missing[1]} is used but has no value{_near_macro(missing[1])}"
    return message


def _refuse_unused(config_gin: str, operative_gin: str) -> None:
    """A binding that no setting depends on is a mistake: gin alone would ignore it."""
    used = set(operative_gin.splitlines())
    for line in config_gin.splitlines():
        if not line or line.startswith("#") or line in used:
            continue
        name = line.split(" = ")[0]
        raise UserError(f"{name}: no setting uses it{_near_macro(name)}; `python train.py --help` lists the settings")


def _near_macro(name: str) -> str:
    return did_you_mean(name.upper(), [field.upper() for field in FIELDS])


gin.add_config_file_search_path(str(PACKAGE))
