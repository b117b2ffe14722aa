"""Flags and variables by platform, GPU and version; the site file over them, the user over both; what XLA refuses."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from amsp_jax.compile import xla_flags
from amsp_jax.compile.xla_flags import rules, trial
from amsp_jax.engine.collectives import Reduction
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.runtime.launch import gpu_generation as generation
from amsp_jax.runtime.launch.gpu_generation import find_generation
from amsp_jax.runtime.launch.profile import find_profile
from amsp_jax.runtime.launch.provenance import _variables
from amsp_jax.strategy import DataRanks, parse

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_environment(tmp_path):
    """What is set is taken back; neither the user's cache nor the user's site file is read."""
    before = dict(os.environ)
    os.environ |= {name: str(tmp_path / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    os.environ.pop("AMSP_JAX_SITE", None)
    yield
    os.environ.clear()
    os.environ.update(before)


# The table


def test_flags_follow_the_platform():
    cuda, rocm = xla_flags.flags("cuda"), xla_flags.flags("rocm")
    assert "--xla_gpu_enable_triton_gemm=false" in cuda and "--xla_gpu_dot_merger_threshold_mb=0" in cuda
    assert "--xla_gpu_enable_triton_gemm=false" in rocm and "--xla_gpu_enable_cublaslt=true" in rocm
    assert not any("cublaslt" in flag for flag in cuda) and not any("dot_merger" in flag for flag in rocm)
    assert all(flag.startswith("--xla_cpu") for flag in xla_flags.flags("cpu"))


@pytest.mark.parametrize(
    ("platform", "kind", "names"),
    [
        ("cpu", None, set()),
        ("cuda", "hopper", {"XLA_PYTHON_CLIENT_MEM_FRACTION"}),
        ("rocm", None, {"XLA_PYTHON_CLIENT_MEM_FRACTION", "HSA_FORCE_FINE_GRAIN_PCIE"}),
        ("rocm", "cdna2", {"XLA_PYTHON_CLIENT_MEM_FRACTION", "HSA_FORCE_FINE_GRAIN_PCIE"}),
        (
            "rocm",
            "cdna3",
            {
                "XLA_PYTHON_CLIENT_MEM_FRACTION",
                "HSA_FORCE_FINE_GRAIN_PCIE",
                "GPU_MAX_HW_QUEUES",
                "HIP_FORCE_DEV_KERNARG",
                "HSA_NO_SCRATCH_RECLAIM",
            },
        ),
    ],
)
def test_variables_follow_the_generation(platform, kind, names):
    assert xla_flags.variables(platform, kind).keys() == names


@pytest.mark.parametrize(
    ("kind", "jaxlib", "holds"),
    [
        ("hopper", "", True),
        ("ampere", "", False),
        (None, "", False),
        ("hopper", ">=0.10", True),
        ("hopper", "<0.9", False),
    ],
)
def test_a_rule_holds_for_its_generations_and_versions(monkeypatch, kind, jaxlib, holds):
    rule = rules.Rule("xla_a", "1", ("cuda",), "why", generations=("hopper",), jaxlib=jaxlib)
    monkeypatch.setattr(rules, "_FLAGS", (rule,))
    # As text 0.10 would be below 0.9; an unreleased version counts as well.
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.10.3.dev1")
    assert xla_flags.flags("cuda", kind) == (["--xla_a=1"] if holds else [])


def test_every_rule_has_a_reason_and_only_known_generations():
    for rule in rules._FLAGS + rules._VARIABLES:
        assert rule.reason.endswith(".")
        assert set(rule.generations) <= {*generation._NVIDIA, *generation._AMD.values()}


# The generation of the GPUs


def amd(root, *versions):
    for i, version in enumerate((0, *versions)):
        node = root / "sys/class/kfd/kfd/topology/nodes" / str(i)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 8\ngfx_target_version {version}\n")


def nvidia(root, *names):
    for i, name in enumerate(names):
        card = root / f"proc/driver/nvidia/gpus/0000:0{i}:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 16\n")


@pytest.mark.parametrize(
    ("make", "cards", "platform", "found"),
    [
        (nvidia, ["NVIDIA H100 80GB HBM3"] * 2, "cuda", "hopper"),
        (nvidia, ["NVIDIA H200"], "cuda", "hopper"),
        (nvidia, ["NVIDIA GH200 480GB"], "cuda", "hopper"),
        (nvidia, ["NVIDIA A100-SXM4-80GB"], "cuda", "ampere"),
        (nvidia, ["NVIDIA A800-SXM4-80GB"], "cuda", "ampere"),
        (nvidia, ["NVIDIA B200"], "cuda", None),
        (nvidia, ["NVIDIA H200", "NVIDIA A100-PCIE-40GB"], "cuda", None),
        (amd, [90010] * 8, "rocm", "cdna2"),
        (amd, [90402] * 8, "rocm", "cdna3"),
        (amd, [110000], "rocm", None),
        (nvidia, ["NVIDIA H200"], "cpu", None),
    ],
)
def test_generation(tmp_path, make, cards, platform, found):
    make(tmp_path, *cards)
    assert find_generation(platform, tmp_path) == found


def test_where_a_container_hides_the_drivers_files_nvidia_smi_is_asked(tmp_path, monkeypatch):
    done = subprocess.CompletedProcess([], 0, "NVIDIA H100 NVL\nNVIDIA H100 NVL\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert find_generation("cuda", tmp_path) == "hopper"


def test_without_nvidia_smi_the_generation_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    assert find_generation("cuda", tmp_path) is None


# The site file


def site(tmp_path, text):
    path = tmp_path / "site.toml"
    path.write_text(text)
    return xla_flags.read_site({"AMSP_JAX_SITE": str(path)})


def test_a_site_adds_changes_and_removes(tmp_path):
    ours = site(
        tmp_path,
        "[flags]\nxla_a = 2\nxla_c = true\n[environment]\nNCCL_IB_TC = '106'\n"
        "[remove]\nflags = ['xla_b']\nenvironment = ['HSA_X']\n",
    )
    assert ours.with_flags(["--xla_a=1", "--xla_b=1", "--xla_d=1"]) == ["--xla_a=2", "--xla_d=1", "--xla_c=true"]
    assert ours.with_variables({"HSA_X": "1", "HIP_Y": "1"}) == {"HIP_Y": "1", "NCCL_IB_TC": "106"}


def test_where_the_file_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    default = tmp_path / ".config/amsp_jax/site.toml"
    assert xla_flags.read_site({}).path is None
    default.parent.mkdir(parents=True)
    default.write_text("[flags]\n")
    assert xla_flags.read_site({}).path == default
    assert xla_flags.read_site({"AMSP_JAX_SITE": ""}).path is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[flags", "no TOML"),
        ("flags = 1", "flags is none of the tables"),
        ("[flag]\na = 1", "flag is none of the tables [flags], [environment], [remove]"),
        ("[flags]\n'--xla_a' = 1", "[flags] --xla_a is no name there"),
        ("[flags]\nxla_a = [1]", "[flags] xla_a is [1], not text"),
        ("[flags]\nxla_a = 'b --xla_c=1'", "[flags] xla_a is 'b --xla_c=1', with a character that ends it"),
        ("[environment]\nXLA_FLAGS = '--xla_a=1'", "[environment] XLA_FLAGS goes into [flags]"),
        ("[environment]\nJAX_PLATFORMS = 'cpu'", "[environment] JAX_PLATFORMS is read before this file"),
        ("[environment]\nA = {b = 1}", "[environment] A is {'b': 1}, not text"),
        ('[environment]\nA = "\\u0000"', "[environment] A is '\\x00'"),
        ("[remove]\nflags = 'xla_a'", "[remove] flags = 'xla_a'; it may have"),
        ("[remove]\nother = ['xla_a']", "[remove] other = ['xla_a']; it may have"),
    ],
)
def test_a_wrong_site_file_is_named_with_its_key(tmp_path, text, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        site(tmp_path, text)
    assert str(caught.value).startswith(f"site file {tmp_path / 'site.toml'}: ") and "\n" not in str(caught.value)


def test_a_site_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="site file .*none.toml: No such file .* Correct AMSP_JAX_SITE"):
        xla_flags.read_site({"AMSP_JAX_SITE": str(tmp_path / "none.toml")})


# What a process sets


def test_the_users_values_win_over_the_sites_and_ours(tmp_path, monkeypatch):
    (tmp_path / "site.toml").write_text(
        "[flags]\nxla_gpu_enable_triton_gemm = true\nxla_gpu_b = 1\n"
        "[environment]\nNCCL_IB_TC = 106\nNCCL_CROSS_NIC = 1\n[remove]\nenvironment = ['HIP_FORCE_DEV_KERNARG']\n"
    )
    os.environ |= {"AMSP_JAX_SITE": str(tmp_path / "site.toml"), "NCCL_CROSS_NIC": "0", "XLA_FLAGS": "--xla_gpu_b=2"}
    monkeypatch.setattr("amsp_jax.runtime.launch.profile.find_generation", lambda _: "cdna3")
    monkeypatch.setattr(trial, "_run_child", lambda flags: (0, ""))
    lines, notes = find_profile("rocm").apply("--xla_gpu_c=3")
    assert not notes
    flags = os.environ["XLA_FLAGS"].split()
    assert {"--xla_gpu_enable_triton_gemm=true", "--xla_gpu_b=2", "--xla_gpu_c=3"} <= set(flags)
    assert [os.environ[name] for name in ("NCCL_IB_TC", "NCCL_CROSS_NIC", "GPU_MAX_HW_QUEUES")] == ["106", "0", "2"]
    assert "HIP_FORCE_DEV_KERNARG" not in os.environ
    assert lines[0] == f"site file: {tmp_path / 'site.toml'}" and "NCCL_IB_TC=106" in lines[1]
    assert "NCCL_CROSS_NIC" not in lines[1] and lines[2] == f"XLA flags: {' '.join(flags)}"
    stored = _variables()
    assert stored["NCCL_CROSS_NIC"] == "0" and stored["HSA_NO_SCRATCH_RECLAIM"] == "1"


def test_a_sites_flag_that_xla_refuses_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_run_child", lambda flags: (-6, "Unknown flags in XLA_FLAGS: --xla_nope=1"))
    ours = site(tmp_path, "[flags]\nxla_nope = 1\n")
    with pytest.raises(UserError, match=r"site.toml: \[flags\] xla_nope: jaxlib .* does not know that"):
        xla_flags.checked(ours.with_flags([]), [], tmp_path / "cache", ours)


def test_a_dry_run_prints_what_is_set(tmp_path):
    (tmp_path / "site.toml").write_text("[environment]\nNCCL_IB_TC = 106\n")
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 2000)
    settings = [f"--gin.DATA={tmp_path / 'corpus.txt'}", "--gin.SIMULATED_DEVICES_PER_NODE=2"]
    done = subprocess.run(
        [sys.executable, "train.py", "--dry-run", *settings],
        cwd=ROOT,
        env={**os.environ, "AMSP_JAX_SITE": str(tmp_path / "site.toml"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\nenvironment: NCCL_IB_TC=106\n" in done.stdout
    assert "\nXLA flags: --xla_cpu_collective_call_warn_stuck_timeout_seconds=120 " in done.stdout


# Text, and what goes with one compilation


@pytest.mark.parametrize(
    ("strategy", "num_scattered", "num_of_a_node", "num_optimizer"),
    [
        ("params=4x1 grads=4x2 opt_state=4x2", 8, 4, 8),
        ("params=1x1 grads=4x1 opt_state=4x2", 4, 4, 8),
        ("mics(4)", 4, 4, 4),
        # Whole gradients are reduced once a step, straight to the optimizer's shards.
        ("zero1", 8, 4, 8),
        ("ddp", 1, 1, 1),
    ],
)
def test_collectives_are_combined_up_to_a_block(strategy, num_scattered, num_of_a_node, num_optimizer):
    model = build_model("llama-tiny")
    block = sum(x.size for x in jax.tree.leaves(model.split(model.abstract_params())[1][0]))
    degrees = parse(strategy).resolve(DataRanks(4, 2))
    assert xla_flags.combine_thresholds(model, degrees, "bfloat16", Reduction.of("float32")) == {
        "xla_gpu_all_gather_combine_threshold_bytes": str(2 * block),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": str(4 * (block // num_scattered)),
        "xla_gpu_all_reduce_combine_threshold_bytes": str(4 * (block // num_optimizer)),
    }
    between = xla_flags.combine_thresholds(model, degrees, "bfloat16", Reduction.of("float32", "bfloat16"))
    assert between["xla_gpu_reduce_scatter_combine_threshold_bytes"] == str(4 * (block // num_of_a_node))


def test_a_threshold_of_the_users_is_left_to_the_flags():
    options = {"xla_a": "1", "xla_b": "2"}
    assert xla_flags.without(options, "--xla_b=7 --xla_c") == {"xla_a": "1"}


def test_the_users_flags_win():
    assert xla_flags.merge(["--a=1", "--b=2"], ["--a=3"]) == ["--a=3", "--b=2"]


# What XLA refuses


def test_a_flag_that_xla_refuses_is_dropped_once_and_remembered(tmp_path, monkeypatch):
    ours = ["--xla_gpu_enable_no_such_thing=true", *xla_flags.flags("cuda")]
    ours += xla_flags.flags("rocm")
    cache = tmp_path / "new" / "flags.json"
    kept, notes = xla_flags.checked(ours, [], cache)
    assert kept == xla_flags.merge(ours[1:])
    assert len(notes) == 1 and "--xla_gpu_enable_no_such_thing=true left out" in notes[0]
    monkeypatch.setattr(trial, "_run_child", lambda flags: pytest.fail("asked twice"))
    assert xla_flags.checked(ours, [], cache) == (kept, notes)


def test_a_users_flag_that_xla_refuses_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        trial, "_run_child", lambda flags: (-6, "F0000 env.cc] Unknown flags in XLA_FLAGS: --xla_nope=1 --xla_b")
    )
    with pytest.raises(UserError, match="XLA flags --xla_nope=1: jaxlib"):
        xla_flags.checked(["--xla_b"], ["--xla_nope=1"], tmp_path / "a")
    usage = "E0000 flags.cc] Couldn't interpret value abc for flag xla_level.\nusage: --xla_level=abc"
    monkeypatch.setattr(trial, "_run_child", lambda flags: (-6, usage))
    with pytest.raises(UserError, match="XLA flags --xla_level=abc: jaxlib .* or their values"):
        xla_flags.checked(["--xla_b"], ["--xla_level=abc"], tmp_path / "c")
    monkeypatch.setattr(trial, "_run_child", lambda flags: (-6, "something else"))
    with pytest.raises(UserError, match="something else"):
        xla_flags.checked([], ["--xla_nope=1"], tmp_path / "b")
