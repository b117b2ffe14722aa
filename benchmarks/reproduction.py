"""Every table of docs/reproduction.md and its picture: what this project predicts beside what papers published.

    python benchmarks/reproduction.py

Here are the rows of AMSP's headline table (1024 A800, arXiv 2311.00257); `reproduction_frontier` has those of the
Frontier study. Nothing is fitted to AMSP's table: collectives are the published times of up to 128 GPUs and the closed
form beyond, matrix products the published 228.5 TFLOP/s, the rest the a800 preset's assumptions. MFU as the paper
counts: 6 N + 12 L h s FLOPs a token without causal discount, of 312 TFLOP/s.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import reproduction_frontier  # noqa: E402

from amsp_jax.engine.optimizer import make_optimizer  # noqa: E402
from amsp_jax.engine.rematerialization import Remat  # noqa: E402
from amsp_jax.models.registry import build_model  # noqa: E402
from amsp_jax.predict.cluster import named_cluster  # noqa: E402
from amsp_jax.predict.cost import amsp  # noqa: E402
from amsp_jax.predict.planner import Candidate, Scorer, Workload  # noqa: E402
from amsp_jax.strategy import parse  # noqa: E402

MICS = "params=8x1 grads=8x1 opt_state=8x2"
ROWS = [
    # model, remat, [(name, strategy, the paper's MFU in percent)]
    ("llama-7b", Remat.NONE, [("AMSP", "params=1x1 grads=1x1 opt_state=8x1", 51), ("MiCS", MICS, 35),
                              ("ZeRO-1", "zero1", 36), ("ZeRO-3", "zero3", 4)]),
    ("llama-13b", Remat.NONE, [("AMSP", "params=4x1 grads=4x1 opt_state=8x1", 52), ("MiCS", MICS, 33),
                               ("ZeRO-3", "zero3", 4)]),
    ("llama-30b", Remat.FULL, [("AMSP", "params=8x1 grads=8x1 opt_state=8x4", 42), ("MiCS", MICS, 29)]),
]  # fmt: skip
NUM_NODES, GLOBAL_BATCH, SEQ_LEN = 128, 1024, 4096


def scorer_of(name: str) -> Scorer:
    return Scorer(
        Workload(
            model=build_model(name, attention="cudnn"),
            optimizer=make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0),
            global_batch=GLOBAL_BATCH,
            seq_len=SEQ_LEN,
            reduce_dtype="bfloat16",
        ),
        named_cluster("a800", NUM_NODES),
    )


def main() -> None:
    print_amsp()
    reproduction_frontier.print_tables()
    reproduction_frontier.draw()


def print_amsp() -> None:
    heads = ["model", "row", "strategy", "paper", "overlapped", "not overlapped", "paper's terms", "peak GiB"]
    table = []
    for model, remat, rows in ROWS:
        scorer = scorer_of(model)
        for name, strategy, paper in rows:
            candidate = Candidate(parse(strategy).resolve(scorer.cluster.ranks), 1, remat)
            table.append([model, name, str(candidate.degrees), f"{paper} %", *predicted(scorer, candidate)])
    reproduction_frontier.print_table(heads, table)


def predicted(scorer: Scorer, candidate: Candidate) -> list[str]:
    """MFU with overlap, without, and with the paper's four terms in place of our collectives; peak memory."""
    estimate, alone_s = scorer.estimate(candidate), scorer.compute_s(candidate)
    terms = amsp.terms(scorer.paper_job(1), candidate.degrees, scorer.network.seconds)
    steps = (estimate.step_s, alone_s + sum(estimate.terms_s.values()), alone_s + terms.total_s)
    flops = scorer.workload.model.numbers.flops_per_token_paper(SEQ_LEN) * GLOBAL_BATCH * SEQ_LEN
    full_speed_s = flops / candidate.degrees.ranks.total / scorer.cluster.peak_flops
    return [*(f"{full_speed_s / step_s:.1%}" for step_s in steps), f"{estimate.memory.total / 2**30:.1f}"]


if __name__ == "__main__":
    main()
