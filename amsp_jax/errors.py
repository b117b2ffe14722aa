"""How a run ends early: by a mistake of a person's, by numbers that went bad, or because it was asked to."""


class UserError(ValueError):
    """A mistake of the person who runs the program, never of the program.

    The message has four parts: the thing as it was written, the rule it breaks, the numbers that
    enter, and what to do next. `train.py` prints it on one line and exits with code 2.
    """


def text_of(error: BaseException) -> str:
    """What an error of other people's code says, on one line: its type and its message, a `UserError`'s message alone.

    It never raises, though a message may be made by code that does.
    """
    try:
        words = " ".join(str(error).split()).rstrip(".")
    except Exception:
        words = "its message cannot be printed"
    kind = type(error).__name__
    if isinstance(error, UserError) and words:
        return words
    return f"{kind}: {words}" if words else kind


class BadNumbersError(Exception):
    """The numbers of a run went bad: no mistake in its command, and the same command again would not mend it."""


class NonFiniteError(BadNumbersError):
    """The loss or the gradient norm of `step` is not finite, once more than is allowed in a row."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class HookError(UserError):
    """A hook raised, which ended the run; the message names the hook and the step, and says what is saved."""


class Stopped(Exception):
    """The run was asked to stop and has; the message says what is saved and how to go on."""
