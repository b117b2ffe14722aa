"""Compiled programs of GPUs are kept for the next start, by jax's persistent compilation cache."""

from __future__ import annotations

import jax

from amsp_jax.user_cache import user_cache


def keep_programs(platform: str) -> list[str]:
    """Names a folder for them, unless the user did or switched the cache off; returns lines on what was set.

    Not on the CPU: its programs are for one processor, and a home may be shared by several kinds.
    """
    chosen = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    is_on = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if platform == "cpu" or chosen or not is_on:
        return []
    folder = user_cache() / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return [f"compiled programs: {folder}"]
