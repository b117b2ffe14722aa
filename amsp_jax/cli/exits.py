"""From the exception that ends a command to its exit code and its line on stderr."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable

from amsp_jax.errors import BadNumbersError, Stopped, UserError
from amsp_jax.run.config import FIELDS
from amsp_jax.runtime import exit_codes, output

_LONGEST_MESSAGE = 600
# A setting's name, then `=`, perhaps with a key; not the end of a longer word, and not a command's flag `--steps=3` or
# `--search tensor=2`.
_ASSIGNED = re.compile(rf"(?<![\w./-])(?<!--search )({'|'.join(FIELDS)})(?=(\['\w+'\])?=)")


def run(main: Callable[[], None]) -> int:
    """Calls `main` and returns the exit code, after one line on stderr if it is not 0 (`runtime.exit_codes`)."""
    # absl makes its logger when it is imported; one that is asked for before does not know which file logs.
    with contextlib.suppress(ImportError):
        importlib.import_module("absl.logging")
    # Libraries that log through absl warn of settings that are ours, not the user's.
    logging.getLogger("absl").setLevel(logging.ERROR)
    output.print_any_text()
    output.spell_with(spell)
    try:
        main()
    except UserError as error:
        print("error:", one_line(error), file=sys.stderr)
        return exit_codes.USER_ERROR
    except BadNumbersError as error:
        print("error:", one_line(error), file=sys.stderr)
        return exit_codes.BAD_NUMBERS
    except Stopped as stopped:
        # Only a command that uses jax can be stopped at a step, so jax is imported by now.
        import jax

        if jax.process_index() == 0:
            print(one_line(stopped), file=sys.stderr)
        return exit_codes.STOPPED
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] == "amsp_jax":
            raise
        print("error:", _missing_package(error), file=sys.stderr)
        return exit_codes.USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`| head`); what Python still flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def spell(text: str) -> str:
    """A text of the library with settings as this command line writes them: `STEPS=3` in place of `steps=3`."""
    return _ASSIGNED.sub(lambda name: name[1].upper(), text)


def one_line(error: Exception) -> str:
    """The message in this command line's words, shortened in its middle, with nothing that a terminal would obey."""
    words = " ".join(spell(str(error)).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 200]} ... {text[-190:]}"


def _missing_package(error: ModuleNotFoundError) -> str:
    return f"the module {error.name} is not installed; `amsp-jax doctor` names its package and what installs it"
