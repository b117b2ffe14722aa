"""What a search found, in words and numbers: only what was measured."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

from amsp_jax.cli.tune.point import Point
from amsp_jax.cli.tune.study import Record
from amsp_jax.cli.tune.trial import RAN, Kind

# Fewer say nothing of importance: the best quarter would be one or two.
MIN_FOR_IMPORTANCE = 8
_BEST_SHARE, _NUM_BEST = 0.25, 5
_NUM_REASONS = 10


def measured(records: Sequence[Record]) -> list[Record]:
    """Those with a step time, the best first."""
    found = [record for record in records if record.outcome.kind is Kind.MEASURED]
    return sorted(found, key=lambda record: record.outcome.step_s or 0.0)


def table(records: Sequence[Record]) -> str:
    """A line for each measured trial, the best first."""
    best = measured(records)
    has_mfu = any(record.outcome.mfu is not None for record in best)
    has_memory = any(record.outcome.peak_memory_bytes is not None for record in best)
    heads = ["trial", "step ms", "tokens/s", *(["MFU %"] if has_mfu else []), *(["GiB"] if has_memory else []), "point"]
    rows = [heads]
    for record in best:
        out = record.outcome
        cells = [str(record.number), f"{1e3 * (out.step_s or 0):.1f}", f"{out.tokens_per_s or 0:,.0f}"]
        cells += [_or_dash(out.mfu, 100, ".1f")] if has_mfu else []
        cells += [_or_dash(out.peak_memory_bytes, 2**-30, ".2f")] if has_memory else []
        rows.append([*cells, str(record.point)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads) - 1)]
    return "\n".join("  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows)


def _or_dash(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(value * scale, form)


def failures(records: Sequence[Record]) -> str:
    """How many trials failed and how many points were left out, by kind, and the reason of each failure."""
    failed = [record for record in records if record.outcome.kind is not Kind.MEASURED]
    counts = Counter(record.outcome.kind for record in failed)
    lines = []
    for kind in (kind for kind in Kind if counts[kind]):
        what = "failed trials" if kind in RAN else "points left out without a run"
        lines.append(f"{counts[kind]} {what}: {kind}")
        of_kind = [record for record in failed if record.outcome.kind is kind]
        if kind in RAN:
            lines += [f"  trial {record.number}, {record.point}: {record.outcome.reason}" for record in of_kind]
        else:
            reasons = Counter(record.outcome.reason for record in of_kind).most_common(_NUM_REASONS)
            lines += [f"  {count} x {reason}" for reason, count in reasons]
    return "\n".join(lines)


def gin_lines(point: Point) -> list[str]:
    """The point as lines of a gin file."""
    return [f"{name} = {value!r}" for name, value in point.settings().items()]


def importance(study: optuna.Study) -> Mapping[str, float]:
    """How much each setting decides whether a trial is among the best, as shares of 1; empty with too few trials.

    By PED-ANOVA: the values of the best quarter of the measured trials, at least 5, against all values alike
    (arXiv 2304.10255). Against those of all trials a setting that the search settled early would count for nothing.
    """
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(complete) < MIN_FOR_IMPORTANCE:
        return {}
    share = max(_BEST_SHARE, _NUM_BEST / len(complete))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=share, evaluate_on_local=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_param_importances(study, evaluator=evaluator)


def importance_lines(shares: Mapping[str, float], num_measured: int) -> str:
    """A line for each setting."""
    if not shares:
        return f"importance of the settings: needs {MIN_FOR_IMPORTANCE} measured trials that differ, not {num_measured}"
    width = max(map(len, shares))
    lines = [f"importance of the settings (PED-ANOVA over {num_measured} measured trials):"]
    return "\n".join([*lines, *(f"  {name.upper():<{width}}  {share:.1%}" for name, share in shares.items())])


def line(record: Record, num_run: int, num_trials: int, is_best: bool) -> str:
    """One trial that is over, as it goes by."""
    out = record.outcome
    if out.kind is not Kind.MEASURED:
        told = f"{out.kind}: {out.reason}"
    else:
        told = f"{1e3 * (out.step_s or 0):.1f} ms a step, {out.tokens_per_s or 0:,.0f} tokens/s"
        told += ", the best so far" if is_best else ""
    return f"{num_run}/{num_trials}  {record.point}: {told}"
