"""A ranking and an estimate in words, tables and JSON."""

from amsp_jax.predict.planner.report.explanation import explanation
from amsp_jax.predict.planner.report.records import as_json, estimate_json, explanation_json
from amsp_jax.predict.planner.report.table import gin_lines, ranking_table, rejected_lines
from amsp_jax.predict.planner.report.why import why

__all__ = [
    "as_json",
    "estimate_json",
    "explanation",
    "explanation_json",
    "gin_lines",
    "ranking_table",
    "rejected_lines",
    "why",
]
