"""What a process sets before jax starts its devices: the XLA flags and variables of its platform, GPUs and site."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from amsp_jax.compile import xla_flags
from amsp_jax.runtime.launch.gpu_generation import find_generation


@dataclasses.dataclass(frozen=True)
class Profile:
    """Our table and the site file together; the user's own values are not in it.

    Attributes:
      generation: of the GPUs, None if it is not known.
      flags: for XLA, as `--name=value`.
      variables: for the drivers and the communication library.
      site: the file that changed them, or an empty one.
    """

    generation: str | None
    flags: list[str]
    variables: Mapping[str, str]
    site: xla_flags.Site

    def apply(self, users_flags: str) -> tuple[list[str], list[str]]:
        """Sets `XLA_FLAGS` and the variables that the user has not set.

        Args:
          users_flags: as in `XLA_FLAGS`, and stronger.

        Returns:
          Lines on what was set, and notes on flags that were left out.

        Raises:
          UserError: jaxlib does not know a flag of the user's or the site's.
        """
        ours = {name: value for name, value in self.variables.items() if name not in os.environ}
        users = xla_flags.merge(os.environ.get("XLA_FLAGS", "").split(), users_flags.split())
        final, notes = xla_flags.checked(self.flags, users, site=self.site)
        os.environ.update(ours, XLA_FLAGS=" ".join(final))
        lines = [f"site file: {self.site.path}"] if self.site.path else []
        lines += [f"environment: {' '.join(f'{name}={value}' for name, value in ours.items())}"] if ours else []
        return [*lines, f"XLA flags: {' '.join(final)}"], notes


def find_profile(platform: str) -> Profile:
    """For "cuda", "rocm" or "cpu" on this machine.

    Raises:
      UserError: the site file is wrong.
    """
    generation, site = find_generation(platform), xla_flags.read_site()
    return Profile(
        generation,
        site.with_flags(xla_flags.flags(platform, generation)),
        site.with_variables(xla_flags.variables(platform, generation)),
        site,
    )
