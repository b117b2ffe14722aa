"""The one exception for mistakes a person can make in a config, a command or an argument."""


class UserError(ValueError):
    """A mistake of the person who runs the program, never of the program.

    The message has four parts: the thing as it was written, the rule it breaks, the numbers that
    enter, and what to do next. `train.py` prints it on one line and exits with code 2.
    """
