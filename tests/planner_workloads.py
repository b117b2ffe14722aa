"""What the planner's tests plan: a LLaMA on nodes of a named cluster."""

from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.models.registry import build_model
from amsp_jax.predict.planner import Space, Workload

ONE = Space(microbatches=(1,), remats=(Remat.PROJECTIONS,))


def workload(model="llama-7b", global_batch=1024, **overrides):
    built = build_model(model, overrides, attention="cudnn")
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)
    return Workload(model=built, optimizer=optimizer, global_batch=global_batch, seq_len=4096)
