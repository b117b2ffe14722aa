"""A training script with an iterator of its own, for one process or two: the losses come out as JSON.

python own_data.py RUN_DIR KIND STOP_AFTER [COORDINATOR PROCESS_ID]
"""

import json
import sys

import grain
import numpy as np

from amsp_jax.cli import settings as cli
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.data import from_iterator
from amsp_jax.run.trainer import Trainer
from amsp_jax.runtime import launch

BATCH, SEQ, VOCAB, STEPS = 8, 8, 64, 6
TINY = {"num_layers": 1, "hidden": 16, "ffn": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": VOCAB}


def global_rows(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, VOCAB, (BATCH, SEQ + 1))


class Mine:
    """This process's share of each global batch; it knows where it is."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.step = index, count, 0

    def __iter__(self) -> "Mine":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows = np.split(global_rows(self.step), self.count)[self.index]
        self.step += 1
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    def get_state(self) -> dict[str, int]:
        return {"step": self.step}

    def set_state(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Validation:
    """Rows by number, a few more than a batch."""

    num_rows = BATCH + 3

    def rows(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        chosen = global_rows(1000 + step)[rows]
        return {"tokens": chosen[:, :-1], "targets": chosen[:, 1:]}


class Ending(Mine):
    """Ends after three batches."""

    def __next__(self) -> dict[str, np.ndarray]:
        if self.step == 3:
            raise StopIteration
        return super().__next__()


class Failing(Mine):
    """Has a fault of its own at the fourth batch."""

    def __next__(self) -> dict[str, np.ndarray]:
        if self.step == 3:
            raise KeyError("page 7")
        return super().__next__()


def grain_iterator(index: int, count: int) -> object:
    dataset = grain.MapDataset.range(1000).seed(0).shuffle().map(lambda i: global_rows(i)[0])
    share = dataset[index::count].to_iter_dataset().batch(BATCH // count)
    return iter(share.map(lambda rows: {"tokens": rows[:, :-1], "targets": rows[:, 1:]}))


def main(
    run_dir: str, kind: str, stop_after: str, coordinator: str = "", process_id: str = "0"
) -> dict[str, list[float]]:
    """Trains, and returns the losses of training and validation."""
    count = 2 if coordinator else 1
    place = {"coordinator": coordinator, "num_processes": 2, "process_id": int(process_id)} if coordinator else {}
    layout = launch.setup(simulated_nodes=2, simulated_devices_per_node=4, **place)
    config = TrainConfig(
        model_overrides=TINY, strategy="zero2", run_dir=str(run_dir), seq_len=SEQ, global_batch=BATCH, steps=STEPS,
        warmup_steps=1, learning_rate=0.01, compute_dtype="float32", stop_after=int(stop_after) or None, eval_every=3,
    )  # fmt: skip
    built = cli.build_model(config)
    make = {"mine": Mine, "ending": Ending, "failing": Failing, "grain": grain_iterator}[kind]
    data = from_iterator(make(int(process_id), count), fingerprint="own rows")
    run = Trainer(built.model, config=config, layout=layout, data=data, validation=Validation()).fit()
    return {"loss": [row["loss"] for row in run.metrics], "validation": [row["loss"] for row in run.validations]}


if __name__ == "__main__":
    print("RESULT", json.dumps(main(*sys.argv[1:])))
    launch.end_process(0)
