"""AMSP, ZeRO and the Frontier recipe as one JAX framework.

What needs jax is imported at first use: strategies can be read and resolved on a machine without it.
"""

import importlib
from typing import Any

from amsp_jax.errors import HookError, UserError
from amsp_jax.strategy import (
    PRESETS,
    DataRanks,
    FullReplica,
    FullSharding,
    NodeSharding,
    PartialSharding,
    RankSharding,
    Strategy,
    ddp,
    hfsdp,
    hpz,
    mics,
    over,
    parse,
    register_strategy,
    zero1,
    zero2,
    zero3,
)

_HOME = {
    "Model": "model",
    "ModelParallel": "engine.parallel",
    "ModelNumbers": "model",
    "Part": "model",
    "Split": "model",
    "token_loss": "model",
    "Plan": "engine.plan",
    "make_plan": "engine.plan",
    "make_learning_rate": "engine.learning_rate",
    "make_optimizer": "engine.optimizer",
    "Remat": "engine.rematerialization",
    "TrainState": "engine.state",
    "abstract_state": "engine.state",
    "init_state": "engine.state",
    "reshard": "engine.state",
    "StepSettings": "engine.step_settings",
    "make_eval_step": "engine.eval_step",
    "make_train_step": "engine.train_step",
    "Run": "run.run",
    "TrainConfig": "run.config",
    "Trainer": "run.trainer",
    "build_model": "models.registry",
}
"""The module of each public name that needs jax."""

_MODULES = {"data": "run.data", "hooks": "run.hooks"}
"""Where a public module is, such as `amsp_jax.data`."""

__all__ = [
    "PRESETS",
    "DataRanks",
    "FullReplica",
    "FullSharding",
    "HookError",
    "Model",
    "ModelNumbers",
    "ModelParallel",
    "NodeSharding",
    "PartialSharding",
    "Part",
    "Plan",
    "RankSharding",
    "Remat",
    "Run",
    "Split",
    "StepSettings",
    "Strategy",
    "TrainConfig",
    "TrainState",
    "Trainer",
    "UserError",
    "abstract_state",
    "build_model",
    "data",
    "ddp",
    "hfsdp",
    "hooks",
    "hpz",
    "init_state",
    "make_eval_step",
    "make_learning_rate",
    "make_optimizer",
    "make_plan",
    "make_train_step",
    "mics",
    "over",
    "parse",
    "register_strategy",
    "reshard",
    "token_loss",
    "zero1",
    "zero2",
    "zero3",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
