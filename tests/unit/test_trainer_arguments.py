"""What a newcomer gives `Trainer` by mistake is told by its constructor, with the words to write instead."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amsp_jax as amsp
from amsp_jax.errors import UserError
from amsp_jax.run.config import TrainConfig


class Rows:
    def rows(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        raise AssertionError("a constructor reads nothing")


class MyHook(amsp.hooks.Hook):
    pass


class MyModel(nnx.Module):
    pass


def my_eval(run: Any, metrics: Any) -> None:
    pass


def model() -> amsp.Model:
    return amsp.Model.from_loss(lambda params, batch, rng: ((0.0, 1.0), {}), lambda key: {})


def trainer(**changes: Any) -> amsp.Trainer:
    return amsp.Trainer(**{"model": model(), "optimizer": optax.sgd(0.1), "data": Rows(), **changes})


@pytest.mark.parametrize("argument", ["hooks", "default_hooks"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([my_eval], r"\[0\]=my_eval is a function, but it must be a hook; amsp_jax.hooks.every\(n, my_eval\)"),
        ([MyHook(), 3], r"\[1\]=3 is an int, but it must be a hook; amsp_jax.hooks.every\(n, function\)"),
        ([MyHook], r"\[0\]=MyHook is a class, but it must be a hook; make one of the class: MyHook\(\)"),
        ([None], r"\[0\]=None is a NoneType, but it must be a hook"),
        (print, r"=print is a function, but it must be a list of hooks; amsp_jax.hooks.every\(n, print\)"),
        (3, "=3 is an int, but it must be a list of hooks"),
        ("wandb", "='wandb' is a str, but it must be a list of hooks"),
        (MyHook, r"=MyHook is a class, but it must be a list of hooks; make one of the class: MyHook\(\)"),
        (MyHook(), r"=<.*MyHook.*> is one hook; give a list"),
    ],
)
def test_what_is_no_hook(argument: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{argument}{message}"):
        trainer(**{argument: value})


def test_every_needs_a_function() -> None:
    with pytest.raises(UserError, match=r"every\(5, 3\): .* cannot be called"):
        amsp.hooks.every(5, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (optax.adamw, r"=optax.adamw is a function, no optimizer yet; call it: optax.adamw\(3e-4\)"),
        (optax.GradientTransformation, "=optax.GradientTransformation is a class, no optimizer yet"),
        (3e-4, r"=0.0003 is a float without init and update; give .* optax.adamw\(3e-4\), or a name"),
        ({"lr": 1}, "is a dict without init and update"),
    ],
)
def test_what_is_no_optimizer(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^optimizer.*{message}"):
        trainer(optimizer=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (MyModel, r"model=MyModel is a class; give a Model: amsp_jax.Model.from_nnx\(embed="),
        (MyModel(), r"model=.* is a MyModel; give a Model: amsp_jax.Model.from_nnx\(embed="),
        (my_eval, "model=my_eval is a function; give a Model: amsp_jax.Model.from_loss"),
        (None, "model=None is a NoneType; give a Model, as amsp_jax.Model.from_loss, amsp_jax.Model.from_nnx or"),
    ],
)
def test_what_is_no_model(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(model=value)


def test_a_missing_corpus_comes_before_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.txt").write_text("words")
    for data, message in (("nofolder", "^data='nofolder': no such file or folder"), ("there.txt", "give vocab_size")):
        with pytest.raises(UserError, match=message):
            trainer(data=data)
        with pytest.raises(UserError, match=message):
            trainer(data=None, optimizer=None, config=TrainConfig(data=data))


def test_one_pattern_is_a_text() -> None:
    assert trainer(frozen="embed.*").config.frozen == ("embed.*",)
    assert eval(TrainConfig(frozen="embed.*").settings()["frozen"]) == ("embed.*",)


@pytest.mark.parametrize("name", ["compute_dtype", "reduce_dtype", "inter_node_dtype"])
def test_dtypes_are_taken_for_their_names(name: str) -> None:
    for dtype in (jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"):
        config = trainer(**{name: dtype}).config
        assert getattr(config, name) == "bfloat16" and f"{name.upper()} = 'bfloat16'\n" in config.to_gin()
    assert getattr(TrainConfig(**{name: np.float32}), name) == "float32"
    for wrong, said in ((jnp.float16, "'float16'"), (np.dtype("int8"), "'int8'"), (3, "3")):
        with pytest.raises(UserError, match=f"{name}={said}: it must be one of float32, bfloat16"):
            trainer(**{name: wrong})
