"""The real step compiles for target devices; without the compiler the error names the command that installs it."""

import contextlib
import io
import os
import re
import subprocess
import sys
from unittest import mock

import jax
import pytest
from gpu_compiler import ROOT, compiles_for_gpus, needs_gpu_compiler
from jax.experimental import topologies

from amsp_jax.__main__ import parse_args
from amsp_jax.cli.commands import compile as compile_command
from amsp_jax.compile import ahead_of_time, hlo, xla_flags
from amsp_jax.engine.collectives import Reduction
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks

MODEL = build_model("llama-tiny", {"num_layers": 2, "hidden": 256, "ffn": 512}, attention="cudnn")


def tiny_plan(target="h100"):
    devices = ahead_of_time.target_devices(target, 2, 2)
    strategy = "params=2x1 grads=2x1 opt_state=2x2"
    return make_plan(strategy, MODEL, ranks=DataRanks(2, 2), devices=devices)


@needs_gpu_compiler
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
def test_targets_are_understood(target):
    found = ahead_of_time.target_devices(target, 2, 2)
    assert len(found) == 4 and ahead_of_time.target_name(found[0].device_kind) == target


@needs_gpu_compiler
def test_the_compiler_needs_no_cuda():
    """In a process of its own, as the tests' is on the CPU anyway."""
    code = "from amsp_jax.compile.ahead_of_time import keep_jax_on_cpu, target_devices\n"
    code += "keep_jax_on_cpu(); print(len(target_devices('h200', 2, 8)))"
    environment = {**os.environ, "JAX_PLATFORMS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "16\n"


@compiles_for_gpus
def test_a_step_compiles_for_four_absent_gpus():
    plan = tiny_plan()
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)
    compiled = ahead_of_time.compile_step(MODEL, optimizer, plan, StepSettings(), (2, 4, 128))
    state = 3 * 4 * sum(leaf.num_opt_shard for leaf in jax.tree.leaves(plan.leaves))
    assert state < compiled.memory_analysis().argument_size_in_bytes < 1.02 * state
    text = compiled.as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cublas" in text
    intra = hlo.mesh_groups(plan.mesh, ("intra_param",))
    blocks = [s for s in hlo.analyse(text) if s.kind == "all-gather" and s.groups == intra and s.num_arrays > 6]
    # Leaves of a block are combined, blocks are not: each of two microbatches gathers each of two blocks twice.
    assert len(blocks) >= 8
    assert any(s.flops.attention and s.flops.matmul for s in blocks)


@compiles_for_gpus
def test_weight_gradients_are_added_up_inside_their_products():
    """Of the blocks' seven matrices, in the loop over microbatches; small products of one input stay apart."""
    plan = make_plan("zero1", MODEL, ranks=DataRanks(1, 2), devices=ahead_of_time.target_devices("h100", 2, 1))
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)
    text = ahead_of_time.compile_step(MODEL, optimizer, plan, StepSettings(), (4, 2, 128)).as_text()
    adding = re.findall(r"= \(f32\[[^)]*\) custom-call.*__cublas.*output_to_operand_aliasing", text)
    assert len(adding) == 7 * len(MODEL.blocks)


@compiles_for_gpus
def test_a_step_compiles_with_pallas_attention():
    model = build_model("llama-tiny", {"num_layers": 2, "hidden": 256, "num_kv_heads": 2}, attention="pallas")
    plan = make_plan("zero3", model, ranks=DataRanks(2, 2), devices=ahead_of_time.target_devices("a100", 2, 2))
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)
    text = ahead_of_time.compile_step(model, optimizer, plan, StepSettings(), (1, 4, 128)).as_text()
    kernels = re.findall(r'custom-call\(.*custom_call_target="__gpu\$xla.gpu.triton".*', text)
    # Forward is not repeated for the backward pass, which has a kernel before its own.
    assert len(kernels) == 3 * 2 and "__cudnn$fmha" not in text


@compiles_for_gpus
def test_thresholds_take_effect_as_options_of_one_compilation():
    plan, optimizer = tiny_plan(), make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)

    def num_operations():
        text = ahead_of_time.compile_step(MODEL, optimizer, plan, StepSettings(), (1, 4, 128)).as_text()
        return len(hlo.analyse(text))

    combined = num_operations()
    none = {
        name: "1" for name in xla_flags.combine_thresholds(MODEL, plan.degrees, "bfloat16", Reduction.of("float32"))
    }
    with mock.patch.object(xla_flags, "combine_thresholds", lambda *_: none):
        assert num_operations() > 3 * combined


def test_options_are_those_of_a_run_and_the_users_win(monkeypatch):
    plan = make_plan("zero3", MODEL, ranks=DataRanks(2, 2))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_gather_combine_threshold_bytes=7")
    options = ahead_of_time.compiler_options(MODEL, plan, StepSettings())
    assert options["xla_gpu_enable_latency_hiding_scheduler"] == "True"
    assert options["xla_gpu_autotune_level"] == "0"
    assert "xla_gpu_reduce_scatter_combine_threshold_bytes" in options
    assert "xla_gpu_all_gather_combine_threshold_bytes" not in options


def test_without_the_plugin_the_command_that_installs_it_is_named(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(UserError, match=r"jax's own version .* pip install -e '\.\[cuda\]'"):
        ahead_of_time.target_devices("h100", 1, 4)


def test_a_description_that_jax_does_not_understand(monkeypatch):
    def refuse(**_):
        raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: Failed to parse GpuTargetConfigProto.")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(UserError, match="does not understand the description of h200: FAILED_PRECONDITION"):
        ahead_of_time.target_devices("h200", 1, 4)


@pytest.mark.parametrize(
    ("kind", "target"),
    [("NVIDIA A800-SXM4-80GB", "a100"), ("A100", "a100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")],
)
def test_target_of_a_device(kind, target):
    assert ahead_of_time.target_name(kind) == target


@pytest.mark.parametrize("kind", ["AMD Instinct MI250X", "Tesla V100-SXM3-32GB", "NVIDIA GH200"])
def test_devices_without_a_target(kind):
    with pytest.raises(UserError, match=f"{kind}: target devices are NVIDIA A100"):
        ahead_of_time.target_name(kind)


def check_command(flags):
    """Arguments and collectives are exact; memory and what hides a collective are shown."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(
            "compile --model llama-tiny --model-overrides {'num_layers':2,'hidden':256,'ffn':512} --cluster h100 "
            f"--nodes 2 --strategy mics(8) --global-batch 48 --seq-len 128{flags}"
        )
    out = printed.getvalue()
    assert re.search(r"^arguments +([\d.]+) +\1 +[+-]0.0%$", out, re.MULTILINE)
    rows = re.findall(r"^(\S+) +(\S+) +(\w+) +(\d+) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert {(kind, axes) for kind, axes, *_ in rows} == {
        ("all-gather", "intra_param"), ("reduce-scatter", "intra_param"), ("all-reduce", "inter_replica")
    }  # fmt: skip
    assert all(arrays in (planned, "packed") and size == expected for _, _, arrays, planned, size, expected in rows)
    assert "for 16 target devices NVIDIA H100" in out and "synchronous" in out


@compiles_for_gpus
def test_the_command_prints_xla_beside_the_planner():
    check_command("")


@compiles_for_gpus
def test_the_command_prints_a_group_of_microbatches():
    check_command(" --microbatch-group 3")


def test_the_command_refuses_what_cannot_be_compiled():
    with pytest.raises(UserError, match="AMD Instinct MI250X: target devices are NVIDIA A100"):
        run("compile --model llama-tiny --cluster frontier --strategy zero3 --global-batch 8 --seq-len 128")
    with pytest.raises(UserError, match="--global-batch 9 does not divide by 8 "):
        run("compile --model llama-tiny --cluster h100 --strategy zero3 --global-batch 9 --seq-len 128")


def run(line):
    compile_command.run(parse_args(line.split()))
