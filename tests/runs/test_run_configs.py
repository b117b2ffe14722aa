"""configs/runs: every file says what it is, divides on its cluster, and fits where it says.

Files named after a model let the planner choose. The others are recipes: nodes, strategy and all degrees are given.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from amsp_jax import __main__ as tools
from amsp_jax.cli import settings as cli
from amsp_jax.cli.commands import workload
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.models import MODELS
from amsp_jax.predict.cluster import named_cluster
from amsp_jax.predict.planner import Candidate, Scorer, Space, Workload, search
from amsp_jax.run.checks import batch_shape, require_memory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from papers import megatron  # noqa: E402

FOLDER = Path(__file__).parents[2] / "configs"
MODEL_FILES = [FOLDER / "runs" / f"{name.replace('-', '_')}.gin" for name in MODELS if name != "llama-tiny"]
RECIPES = sorted(set((FOLDER / "runs").glob("*.gin")) - set(MODEL_FILES))
each_model = pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def load(path, bindings=()):
    return cli.load_config([path], bindings)


@each_model
def test_the_file_says_what_it_is_and_how_to_run_it(path):
    assert load(path).model == path.stem.replace("_", "-")
    assert f"\n#   python train.py --gin_file=configs/runs/{path.name}\n" in path.read_text()


@each_model
def test_the_file_fits_where_it_says(path):
    """Its `plan` command is that of its own settings, and finds a strategy."""
    config, text = load(path), path.read_text()
    assert config.is_auto
    nodes, device = re.search(r"# Fits:   (\d+) nodes? of 8 (H\d00)", text).groups()
    command = re.search(r"python -m amsp_jax (plan .*?)\n# Tokens", text, re.DOTALL).group(1)
    args = tools.parse_args(re.sub(r"[\\#]", " ", command).split())
    assert (args.model, args.nodes, args.cluster) == (config.model, int(nodes), device.lower())
    for name in ("global_batch", "seq_len", "microbatch", "remat", "reduce_dtype"):
        assert getattr(args, name) == getattr(config, name)
    cluster = workload.cluster_of(args.cluster, args.nodes)
    space = Space(microbatches=(args.microbatch,), remats=(Remat(args.remat),))
    best = search(workload.workload_of(args, cluster), cluster, space).best
    batch = batch_shape(config.global_batch, config.microbatch, cluster.num_devices, config.seq_len)
    assert best.accumulation == batch.accumulation
    assert f"Tokens: {batch.tokens / 1e6:.2f}M a step" in text


def test_the_small_run_divides_on_any_part_of_a_node():
    config = load(FOLDER / "runs" / "llama_125m.gin")
    for num_devices in (1, 2, 4, 8):
        batch_shape(config.global_batch, config.microbatch, num_devices, config.seq_len)


def sbatch_commands(path):
    """Of the header: nodes, the job script's name, the file, and the bindings that follow it."""
    text = re.sub(r" \\\n# +", " ", path.read_text())
    for line in re.findall(r"^#   (sbatch .*)$", text, re.MULTILINE):
        words = shlex.split(line)
        nodes = next(int(word.removeprefix("--nodes=")) for word in words if word.startswith("--nodes="))
        script, file, *flags = [word for word in words[1:] if not re.match(r"--(nodes|account)=", word)]
        yield nodes, script, file, [cli.binding(flag) for flag in flags]


COMMANDS = [(path, *command) for path in RECIPES for command in sbatch_commands(path)]


def parallel_of(config):
    return ModelParallel(pipeline=config.pipeline, context=config.context, tensor=config.tensor)


@each_recipe
def test_a_recipe_says_how_to_submit_it(path):
    assert "Fits:   " in path.read_text()
    commands = list(sbatch_commands(path))
    assert commands
    for _, script, file, _ in commands:
        on_frontier = path.stem.startswith("frontier")
        assert script == f"configs/slurm/{'frontier' if on_frontier else 'train'}.sbatch"
        assert file == f"configs/runs/{path.name}"


@pytest.mark.parametrize(
    ("path", "nodes", "bindings"),
    [pytest.param(path, nodes, flags, id=f"{path.stem}-{nodes}") for path, nodes, _, _, flags in COMMANDS],
)
def test_a_recipe_divides_and_fits(path, nodes, bindings):
    """Ranks, batch and stages on the nodes of the command; the predicted peak in the memory of the header's preset."""
    config, text = load(path, bindings), path.read_text()
    cluster = named_cluster(re.search(r"the preset `(\w+)`", text).group(1), nodes)
    parallel = parallel_of(config)
    ranks = parallel.data_ranks(nodes, cluster.devices_per_node)
    assert ranks.total * parallel.total == cluster.num_devices
    batch = batch_shape(config.global_batch, config.microbatch, ranks.total, config.seq_len)
    model = cli.build_model(config).model
    assert len(model.blocks) % (config.pipeline * config.virtual_stages) == 0
    PipelineSchedule(config.pipeline_schedule, config.pipeline, config.virtual_stages, batch.accumulation)
    plan = make_plan(config.strategy, model, ranks=ranks, parallel=parallel)
    require_memory(plan, cluster.memory_bytes)
    if not bindings:
        assert f"# States: {plan.bytes_per_device().total / 2**30:.1f} GiB on a device," in text
    assert needed_bytes(config, cluster, plan.degrees) <= cluster.memory_bytes


def needed_bytes(config, cluster, degrees):
    """What the planner says that a device needs, with the attention that it would run."""
    job = Workload(
        model=workload.planned_model(config.model, config.model_overrides, cluster, config.seq_len),
        optimizer=make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0),
        global_batch=config.global_batch,
        seq_len=config.seq_len,
        reduce_dtype=config.reduce_dtype,
    )
    candidate = Candidate(
        degrees,
        config.microbatch,
        Remat(config.remat),
        parallel=parallel_of(config),
        virtual_stages=config.virtual_stages,
        pipeline_schedule=config.pipeline_schedule,
    )
    return Scorer(job, cluster).needed_bytes(candidate)


@each_recipe
def test_a_recipe_says_its_nodes_copies_tokens_and_bubble(path):
    """The numbers of the header are those of its first command."""
    config, text = load(path), path.read_text()
    nodes, *_ = next(sbatch_commands(path))
    ranks = parallel_of(config).data_ranks(nodes, 8)
    batch = batch_shape(config.global_batch, config.microbatch, ranks.total, config.seq_len)
    assert f"# Fits:   {nodes} nodes of 8 " in text
    assert f"# Tokens: {batch.tokens / 1e6:.2f}M a step, " in text
    if config.pipeline > 1:
        bubble = megatron.bubble_of_ideal(config.pipeline, batch.accumulation, config.virtual_stages)
        assert f"; {ranks.total} copies of the model.\n" in text
        assert f"# Bubble: {config.pipeline - 1} stages / " in text and f"{batch.accumulation} microbatches" in text
        assert f" = {100 * bubble:.2f} % of the ideal time." in text


@each_recipe
def test_a_recipe_says_how_to_predict_it(path):
    """Its `plan` command is that of its own settings."""
    config = load(path)
    nodes, *_ = next(sbatch_commands(path))
    text = re.sub(r" \\\n# +", " ", path.read_text())
    command = re.search(r"^#   python -m amsp_jax (plan .*)$", text, re.MULTILINE).group(1)
    args = tools.parse_args(shlex.split(command))
    assert (args.explain, args.nodes) == (config.strategy, nodes)
    for name in ("model", "global_batch", "seq_len", "microbatch", "remat", "reduce_dtype"):
        assert getattr(args, name) == getattr(config, name)
    for name in ("tensor", "pipeline", "context", "pipeline_schedule", "virtual_stages"):
        assert getattr(args, name) == getattr(config, name)


@pytest.mark.parametrize(
    ("name", "degrees", "global_batches"), [("175b", (4, 16), (640, 5120)), ("1t", (8, 64), (1600, 4800))]
)
def test_the_recipes_of_the_frontier_study(name, degrees, global_batches):
    """TP and PP, and the batches of the sweep's first and last point."""
    path = FOLDER / "runs" / f"frontier_{name}.gin"
    configs = [load(path, bindings) for *_, bindings in sbatch_commands(path)]
    assert {(config.tensor, config.pipeline) for config in configs} == {degrees}
    assert tuple(config.global_batch for config in configs) == global_batches
    for config in configs:
        assert (config.strategy, config.microbatch, config.remat) == ("zero1", 1, "full")
        assert config.model_overrides == {"init_std": 0.006} and config.learning_rate == 6e-5
