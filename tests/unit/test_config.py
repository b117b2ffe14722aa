"""The settings: defaults, and how the command line writes what the library says of them."""

import ast

import pytest

from amsp_jax.cli import exits
from amsp_jax.errors import UserError
from amsp_jax.run.config import TrainConfig

DEFAULTS = """
strategy='auto' tensor=1 pipeline=1 virtual_stages=1 context=1 cluster=None model='llama-tiny' model_overrides={}
data='stdlib' corrupt_records='stop' end_of_document=None steps=1000 run_dir=None seed=0 global_batch=8 microbatch=1
microbatch_group=1 seq_len=1024 optimizer='adamw' learning_rate=3e-4 warmup_steps=100 weight_decay=0.1 clip_norm=1.0
compute_dtype='bfloat16' reduce_dtype='float32' inter_node_dtype=None remat='projections' peel=True checkpoint_every=500
keep_checkpoints=2 keep_every=0 on_damaged='stop' eval_every=500 eval_batches=20 stop_after=None on_nonfinite='stop'
max_skipped=10 check_replicas_every=0 hang_timeout_s=None init_from=None simulated_nodes=None
simulated_devices_per_node=None devices_per_node=None
"""


def test_defaults() -> None:
    """A default that changes would change runs whose configs do not name it."""
    expected = {name: ast.literal_eval(text) for name, text in (word.split("=") for word in DEFAULTS.split())}
    config = TrainConfig()
    assert {name: getattr(config, name) for name in expected} == expected


def test_python_callers_need_no_file() -> None:
    config = TrainConfig(model="llama-tiny", strategy="zero3")
    assert (config.strategy, config.steps) == ("zero3", 1000)
    with pytest.raises(UserError, match=r"^steps='ten' is a str, but it must be an int; write steps=100$"):
        TrainConfig(steps="ten")  # type: ignore[arg-type]


def test_patterns() -> None:
    config = TrainConfig(strategy="zero3", rules={"embed.*": "zero1"}, frozen=["head.*"])
    assert config.frozen == ("head.*",) and eval(config.settings()["rules"]) == {"embed.*": "zero1"}
    assert TrainConfig(frozen="head.*").frozen == ("head.*",)
    with pytest.raises(UserError, match=r"frozen=3 is an int, but it must be a tuple"):
        TrainConfig(frozen=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="rules=.*: 3 is no text"):
        TrainConfig(strategy="zero3", rules={"embed.*": 3})
    with pytest.raises(UserError, match="rules=.* with strategy='auto': the planner does not know rules"):
        TrainConfig(rules={"embed.*": "zero1"})


def test_two_configs_share_no_dictionary() -> None:
    assert TrainConfig().model_overrides is not TrainConfig().model_overrides


@pytest.mark.parametrize(
    ("said", "spelled"),
    [
        ("seq_len=7: it must", "SEQ_LEN=7: it must"),
        ("strategy='auto'; (remat='full')", "STRATEGY='auto'; (REMAT='full')"),
        ("model_overrides['attention']=None now", "MODEL_OVERRIDES['attention']=None now"),
        ("the seq_len of model, --steps=3, --search tensor=2, x.steps=3, num_steps=3, keep=2", None),
    ],
)
def test_settings_in_messages_become_macros(said: str, spelled: str | None) -> None:
    assert exits.spell(said) == (spelled or said)
