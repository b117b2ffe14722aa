"""Why the first of a ranking is first: its near ties, what it does, and where the well-known strategies stand."""

from __future__ import annotations

import textwrap

from amsp_jax.predict.planner.report.table import TERMS, field_text, heading, searched
from amsp_jax.predict.planner.report.text import WIDTH, aligned, counted, gib, percent, seconds, signed
from amsp_jax.predict.planner.types import Candidate, Estimate, Objective, Ranking, Reason
from amsp_jax.strategy import Degree, Degrees, parse

WELL_KNOWN = ("zero1", "zero2", "zero3", "mics", "hpz")
"""The presets that a winner is compared with."""

_NEAR = 0.01
_OBJECTIVES = {
    Objective.STEP_TIME: "predicted step time",
    Objective.PAPER: "sum of communication terms (AMSP's objective)",
}


def why(ranking: Ranking) -> str:
    """A few sentences, a line each, and a table of the well-known presets."""
    sentences = [_smallest(ranking), _described(ranking.best.candidate), *_ties(ranking)]
    if ranking.best.candidate.parallel.total > 1:
        sentences.insert(1, _cut(ranking.best.candidate))
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, WIDTH, subsequent_indent="  ")]
    if ranking.best.candidate.degrees.ranks.total > 1:
        lines += ["", *_presets(ranking)]
    return "\n".join(lines)


def _smallest(ranking: Ranking) -> str:
    best = ranking.best
    objective = _OBJECTIVES[ranking.objective]
    if len(ranking.ranked) == 1:
        text = f"Only one fits; its {objective} is {seconds(best.objective_s)}"
    else:
        text = f"The first has the smallest {objective} of the {len(ranking.ranked)} that fit: "
        text += seconds(best.objective_s)
    if ranking.objective is Objective.PAPER:
        return f"{text}. Predicted for it: a step of {seconds(best.step_s)}, a peak of {gib(best.memory.total)} GiB."
    text = f"{text}, of which compute waits {seconds(best.timeline.exposed_s)} for collectives"
    return f"{text} and {seconds(best.timeline.bubble_s)} for other stages." if best.timeline.bubble_s else f"{text}."


def _cut(candidate: Candidate) -> str:
    """What one copy of the model is cut into."""
    parallel = candidate.parallel
    told = []
    if parallel.pipeline > 1:
        chunks = f" of {candidate.virtual_stages} chunks" if candidate.virtual_stages > 1 else ""
        told.append(f"{parallel.pipeline} stages{chunks}")
    if parallel.context > 1:
        told.append(f"{parallel.context} parts of each sequence")
    if parallel.tensor > 1:
        told.append(f"{parallel.tensor} parts of each matrix")
    copies = counted(candidate.degrees.ranks.total, "copy")
    return f"It cuts the model into {' x '.join(told)}, and trains {copies} of it."


def _described(candidate: Candidate) -> str:
    """What it does with parameters, gradients and optimizer states, and what that costs when."""
    degrees = candidate.degrees
    params, grads, opt_state = degrees.params, degrees.grads, degrees.opt_state
    each = "microbatch" if candidate.microbatch_group == 1 else f"group of {candidate.microbatch_group} microbatches"
    if params.total == 1:
        told = [f"keeps parameters whole, so that no {each} gathers them"]
    else:
        told = [f"gathers parameters {_over(params)}, twice a {each}"]
    if grads.total == 1:
        told.append("keeps gradients whole, so that they are reduced once a step")
    elif grads == params:
        told.append(f"keeps gradients as parameters, reduced every {each}")
    else:
        told.append(f"reduces gradients every {each} {_over(grads)}")
    if opt_state.total == 1:
        told.append("keeps optimizer states whole")
    elif opt_state == grads:
        told.append("keeps optimizer states as gradients")
    else:
        told.append(f"spreads optimizer states {_over(opt_state)}, reached once a step")
    return f"It {told[0]}; {told[1]}; and {told[2]}."


def _over(degree: Degree) -> str:
    if degree.inter == 1:
        return f"over {counted(degree.intra, 'device')} of a node"
    return f"over {degree.total} devices ({degree.intra} of each of {degree.inter} nodes)"


def _ties(ranking: Ranking) -> list[str]:
    best, *others = ranking.ranked
    if not others:
        return []
    lines, second = [], others[0]
    if best.objective_s:
        near = sum(e.objective_s <= (1 + _NEAR) * best.objective_s for e in others)
        if near:
            verb = "is" if near == 1 else "are"
            lines.append(
                f"{counted(near, 'other')} {verb} within 1 % of it: near ties, which may differ when measured."
            )
        more = 100 * (second.objective_s / best.objective_s - 1)
        lines.append(f"The next, {_point(ranking, second)}, takes {more:.2g} % more: {_difference(best, second)}.")
    return lines


def _point(ranking: Ranking, estimate: Estimate) -> str:
    point = estimate.candidate
    fields = (f"{name.replace('_', ' ')} {field_text(point, name)}" for name in searched(ranking))
    return ", ".join([str(point.degrees), *fields])


def _difference(best: Estimate, other: Estimate) -> str:
    """Of step times: how much of it is waiting, and which collectives changed most."""
    waits = other.timeline.exposed_s - best.timeline.exposed_s
    gaps = {name: other.terms_s[phase] - best.terms_s[phase] for phase, name in TERMS.items()}
    name = max(gaps, key=gaps.__getitem__)
    computes = other.timeline.compute_s - best.timeline.compute_s
    text = f"{signed(waits)} of waiting, {signed(computes)} of computing"
    return f"{text}; of its collectives, {name} {signed(gaps[name])}" if gaps[name] > 0 else text


def _presets(ranking: Ranking) -> list[str]:
    """A line for each: its rank and times, or why it has none."""
    fields = searched(ranking)
    times = ["step", "more", "waits", "computes", "peak, GiB"]
    rows = [["preset", "strategy", *map(heading, fields), "rank", *times, "what takes most more"]]
    for name in WELL_KNOWN:
        degrees = parse(name).resolve(ranking.best.candidate.degrees.ranks)
        found = next(((i, e) for i, e in enumerate(ranking.ranked, 1) if _is(e.candidate, degrees, ranking)), None)
        if found is None:
            rows.append([name, str(degrees), *[""] * len(fields), "-", *["-"] * len(times), _reason(ranking, degrees)])
            continue
        rank, estimate = found
        rows.append([name, str(degrees), *(field_text(estimate.candidate, field) for field in fields)])
        rows[-1] += [str(rank), *_against(ranking, estimate)]
    return aligned(rows, left=(0, 1, len(rows[0]) - 1))


def _is(candidate: Candidate, degrees: Degrees, ranking: Ranking) -> bool:
    """Whether it has these degrees, and the model cut as the first has it."""
    return candidate.degrees == degrees and candidate.parallel == ranking.best.candidate.parallel


def _against(ranking: Ranking, estimate: Estimate) -> list[str]:
    best = ranking.best
    more = estimate.objective_s / best.objective_s - 1 if best.objective_s else 0.0
    gaps = {name: estimate.terms_s[phase] - best.terms_s[phase] for phase, name in TERMS.items()}
    longer = sorted((name for name in gaps if gaps[name] > 0), key=lambda name: -gaps[name])
    return [
        seconds(estimate.step_s),
        f"{percent(more)} %",
        seconds(estimate.timeline.exposed_s),
        seconds(estimate.timeline.compute_s),
        gib(estimate.memory.total),
        ", ".join(f"{name} {signed(gaps[name])}" for name in longer[:1]),
    ]


def _reason(ranking: Ranking, degrees: Degrees) -> str:
    """Why these degrees are not ranked; the nearest miss where several candidates have them."""
    rejections = [r for r in ranking.rejected if _is(r.candidate, degrees, ranking)]
    if not rejections:
        return "not predicted: the counts under the table say why"
    rejection = min(rejections, key=lambda r: (r.reason is not Reason.MEMORY, r.missing_bytes))
    if rejection.reason is Reason.MEMORY:
        return f"needs {gib(rejection.missing_bytes)} GiB more than {gib(ranking.memory_bytes)}"
    return str(rejection.reason)
