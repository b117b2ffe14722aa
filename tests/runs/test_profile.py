"""`python -m amsp_jax profile`: a trace's numbers against counts made another way, and the command from start to end.

tests/data/zero3_step.* are of two H200: 8 layers of 7B width (hidden 4096, ffn 11008, 32000 tokens), ZeRO-3, bf16,
2 sequences of 4096 a device. The trace is one step of GPU 0 with the kernels that begin the next, and what the host did
to launch its collectives; the program is whole, without layouts, source lines and the settings of its kernels.
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import AbstractMesh

from amsp_jax import __main__ as tools
from amsp_jax.cli.profiling import breakdown as breakdowns
from amsp_jax.cli.profiling import plot_step, program, read_program, read_trace, report
from amsp_jax.cli.profiling.breakdown import Breakdown, Execution, Kernel, break_down, executions, exposed_parts, median
from amsp_jax.cli.profiling.intervals import minus, total, union
from amsp_jax.cli.profiling.program import Op, StepProgram, Work
from amsp_jax.cli.profiling.trace import Event, Trace
from amsp_jax.compile.hlo import Flops
from amsp_jax.errors import UserError
from amsp_jax.runtime import launch

DATA = Path(__file__).parents[1] / "data"
LAYERS, HIDDEN, FFN, VOCABULARY, HEADS, SEQ_LEN, ROWS = 8, 4096, 11008, 32000, 32, 4096, 2
GRID_NS = 50
# Of jaxlib's own types, on Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "zero3.xplane.pb"
    path.write_bytes(gzip.decompress((DATA / "zero3_step.xplane.pb.gz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def gpu_program() -> StepProgram:
    text = gzip.decompress((DATA / "zero3_step.hlo.gz").read_bytes()).decode()
    return read_program(text, AbstractMesh((2,), ("intra_param",)))


@pytest.fixture(scope="module")
def gpu_step(trace_file: Path, gpu_program: StepProgram) -> Execution:
    (step,) = breakdowns.all_executions(read_trace(trace_file), gpu_program)[0]
    return step


@pytest.fixture(scope="module")
def gpu(gpu_step: Execution) -> Breakdown:
    return break_down(gpu_step)


def kernels_of(path: Path) -> list[tuple[str, float, float]]:
    """Name, start and end of each kernel, read without the code under test; the last one begins the next step."""
    planes = [plane for plane in ProfileData.from_file(str(path)).planes if plane.name == "/device:GPU:0"]
    events = [event for line in planes[0].lines for event in line.events]
    return sorted([(event.name, event.start_ns, event.end_ns) for event in events], key=lambda kernel: kernel[1])


def test_time_by_a_grid(trace_file: Path, gpu: Breakdown) -> None:
    """Compute, communication, their overlap and the gaps, by marking cells of a time grid and by kernels' names."""
    *kernels, (_, end, _) = kernels_of(trace_file)
    begin = kernels[0][1]
    computes, sends = np.zeros((2, int((end - begin) / GRID_NS)), bool)
    for name, start, stop in kernels:
        cells = sends if name.startswith("nccl") else computes
        cells[int((start - begin) / GRID_NS) : int((stop - begin) / GRID_NS)] = True
    seconds = {
        "step_s": len(computes), "compute_s": computes.sum(), "communication_s": sends.sum(),
        "exposed_s": (sends & ~computes).sum(), "gap_s": (~sends & ~computes).sum(),
    }  # fmt: skip
    for name, cells in seconds.items():
        assert getattr(gpu, name) == pytest.approx(cells * GRID_NS / 1e9, rel=0.01), name
    assert gpu.overlap == pytest.approx(1 - (sends & ~computes).sum() / sends.sum(), abs=0.005)
    # What was measured.
    assert 0.16 < gpu.compute_s < 0.17 and 0.007 < gpu.exposed_s < 0.009


def test_classes_by_names(trace_file: Path, gpu: Breakdown) -> None:
    seconds = {"nccl": 0.0, "nvjet": 0.0, "cudnn": 0.0}
    for name, start, end in kernels_of(trace_file)[:-1]:
        for word in seconds:
            seconds[word] += (end - start) / 1e9 if word in name else 0.0
    assert gpu.work[Work.COMMUNICATION] == pytest.approx(seconds["nccl"])
    # The operations clear memory as well, which is theirs.
    assert seconds["nvjet"] <= gpu.work[Work.MATMUL] < 1.02 * seconds["nvjet"]
    assert seconds["cudnn"] <= gpu.work[Work.ATTENTION] < 1.06 * seconds["cudnn"]
    assert sum(gpu.work.values()) == pytest.approx(
        sum(end - start for _, start, end in kernels_of(trace_file)[:-1]) / 1e9
    )


def test_optimizer_reads_and_writes_at_the_memory_rate(gpu: Breakdown) -> None:
    """Parameters and two moments are read and written, the gradient is read: 7 float32 of half of all parameters."""
    num_bytes = 7 * 4 * num_parameters() / 2
    assert 2e12 < num_bytes / gpu.work[Work.OPTIMIZER] < 4.8e12


def num_parameters(tables: int = 2) -> int:
    return LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) + tables * HIDDEN * VOCABULARY


def test_flops(gpu: Breakdown) -> None:
    """Each product forward and twice backward; of attention 2 forward and 5 backward, and a causal mask halves it."""
    assert gpu.matmul_flops == 6 * num_parameters(tables=1) * ROWS * SEQ_LEN
    assert gpu.attention_flops == LAYERS * 7 * (2 * ROWS * SEQ_LEN**2 * HIDDEN) / 2
    assert 600e12 < gpu.matmul_flops_per_s < 989e12


def test_collectives(trace_file: Path, gpu: Breakdown) -> None:
    names = [name for name, _, _ in kernels_of(trace_file)[:-1]]
    words = {"AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "AllReduce": "all-reduce"}
    counts = {(kind, "intra_param"): sum(word in name for name in names) for word, kind in words.items()}
    assert {key: count for key, (count, _, _) in gpu.collectives.items()} == counts
    assert sum(exposed_s for _, _, exposed_s in gpu.collectives.values()) == pytest.approx(gpu.exposed_s)


def test_every_kernel_is_known_to_the_program(trace_file: Path, gpu_program: StepProgram) -> None:
    """Collectives by the asynchronous start that launched them, as their own names are not in the program's text."""
    trace = read_trace(trace_file)
    assert not trace.is_cpu
    ops = {event.op for event in trace.events[0]}
    assert "all-gather.17" in ops - gpu_program.ops.keys()
    assert trace.starts["all-gather.17"] == "all-gather-start.1"
    assert {op for op in ops if op not in gpu_program.ops and trace.starts.get(op) not in gpu_program.ops} == set()


def test_text_and_json(gpu: Breakdown) -> None:
    found = report.Profile(title="7B on 2 x H200", num_steps=1, devices={0: gpu, 1: gpu}, is_cpu=False)
    text = report.text(found)
    assert re.search(r"^compute +165\.50 +93\.5%$", text, re.MULTILINE)
    assert re.search(r"^all-gather +intra_param +18 +26\.51 +6\.00", text, re.MULTILINE)
    assert "nvjet_sm90_tst" in text and report.CPU_NOTE not in text
    numbers = json.loads(json.dumps(report.to_json(found)))
    assert numbers["exposed_s"] == {"value": gpu.exposed_s, "min": gpu.exposed_s, "max": gpu.exposed_s}
    assert sum(one["count"] for one in numbers["kernels"]) == 1044


def test_picture(gpu_step: Execution, tmp_path: Path) -> None:
    path = plot_step(gpu_step, tmp_path / "step.png", "7B on 2 x H200")
    assert path.read_bytes().startswith(b"\x89PNG")


def event(name: str, start: float, end: float, launch: int = 0, op: str = "") -> Event:
    return Event(name=name, op=op or name, module="jit_step", start_ns=start, end_ns=end, launch=launch)


def test_a_step_begins_where_its_first_launch_comes_again() -> None:
    """On another stream the second kernel runs before the first one; a later one comes twice in each step."""
    launched = [("first", 10, 20), ("gather", 5, 12), ("twice", 20, 25), ("twice", 25, 30)]
    events = [
        event(name, start + 100 * step, end + 100 * step, 4 * step + i)
        for step in range(3)
        for i, (name, start, end) in enumerate(launched)
    ]
    trace = Trace(is_cpu=False, events={0: tuple(reversed(events))}, starts={})
    runs = trace.executions(0, "jit_step")
    assert [[one.name for one in run] for run in runs] == [["gather", "first", "twice", "twice"]] * 3
    steps = executions(trace, StepProgram("jit_step", {}, frozenset()), 0)
    assert [(one.start_ns, one.end_ns) for one in steps] == [(5, 105), (105, 205)]
    with pytest.raises(UserError, match="0 executions of jit_other"):
        executions(trace, StepProgram("jit_other", {}, frozenset()), 0)


def kernel(work: Work, start: float, end: float, kind: str = "") -> Kernel:
    flops = Flops(matmul=100 if work is Work.MATMUL else 0)
    return Kernel(event(f"{work}{start}", start, end), Op(work, kind, "a" if kind else "", flops))


def test_two_collectives_at_once_are_exposed_once() -> None:
    """|gather 0-10|, |reduce 5-20|, |matmul 8-12|: 0-8 is the gather's, 12-20 the reduction's, and 8-12 is hidden."""
    kernels = (
        kernel(Work.COMMUNICATION, 0, 10, "all-gather"),
        kernel(Work.COMMUNICATION, 5, 20, "reduce-scatter"),
        kernel(Work.MATMUL, 8, 12),
    )
    assert exposed_parts(kernels) == {("all-gather", "a"): [(0, 8)], ("reduce-scatter", "a"): [(12, 20)]}
    found = break_down(Execution(kernels, 0, 25))
    assert [found.step_s, found.compute_s, found.communication_s, found.exposed_s, found.gap_s] == pytest.approx(
        [25e-9, 4e-9, 20e-9, 16e-9, 5e-9]
    )
    assert found.overlap == pytest.approx(0.2)
    assert found.matmul_flops_per_s == pytest.approx(100 / 4e-9)


def test_median_counts_what_is_missing_as_nothing() -> None:
    steps = [Execution((kernel(Work.MATMUL, 0, end),), 0, end) for end in (10, 20)]
    steps.append(Execution((kernel(Work.MATMUL, 0, 30), kernel(Work.COPIES, 30, 40)), 0, 40))
    found = median([break_down(step) for step in steps])
    assert found.step_s == pytest.approx(20e-9)
    assert found.work == {Work.MATMUL: pytest.approx(20e-9), Work.COPIES: 0}


def test_intervals() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        starts = rng.integers(0, 60, 8)
        spans = [(int(start), int(start + length)) for start, length in zip(starts, rng.integers(1, 9, 8), strict=True)]
        merged = union(spans)
        cells = {cell for start, end in spans for cell in range(start, end)}
        assert {cell for start, end in merged for cell in range(start, end)} == cells
        left = minus((10, 50), merged)
        assert {cell for start, end in left for cell in range(start, end)} == set(range(10, 50)) - cells
        assert total(left) == len(set(range(10, 50)) - cells)


FUSED = """HloModule jit_step
%sum (a: f32[]) -> f32[] {
  ROOT %s = f32[] parameter(0)
}
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%sum
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %fusion-start = ((f32[8]), f32[8]) fusion-start(%x), kind=kCustom, calls=%fused
  %fusion-done = f32[8] fusion-done(%fusion-start)
  %ring = f32[8] collective-permute(%fusion-done), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  ROOT %all = f32[8] all-reduce(%ring), replica_groups={{0,1,2,3}}, to_apply=%sum
}
"""


def test_collectives_in_fusions_and_permutations() -> None:
    found = read_program(FUSED, AbstractMesh((2, 2), ("outer", "inner")))
    ops = {name: (op.kind, op.axes) for name, op in found.ops.items() if op.work is Work.COMMUNICATION}
    assert ops == {
        "fusion-start": ("all-reduce", "inner"),
        "ring": ("collective-permute", "inner"),
        "all": ("all-reduce", "inner+outer"),
    }
    # A kernel that XLA named itself, as XLA launched it.
    assert found.find("r-fusion", "r_fusion", {"r-fusion": "fusion-start"}).axes == "inner"


@pytest.mark.parametrize(
    ("kernel_name", "kind", "axes"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective-permute", "inner"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(rccl)", "all-reduce", "unknown axes"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "collective", "unknown axes"),
    ],
)
def test_a_collective_without_its_operation_is_known_by_its_kernel(kernel_name: str, kind: str, axes: str) -> None:
    found = read_program(FUSED, AbstractMesh((2, 2), ("outer", "inner")))
    assert found.find("nobody", kernel_name, {}) == Op(Work.COMMUNICATION, kind, axes)


def test_a_copy_inside_other_work_is_a_copy() -> None:
    ops = {"f": Op(Work.OTHER), "m": Op(Work.MATMUL)}
    found = program.StepProgram("jit_step", ops, frozenset())
    assert found.find("f", "MemcpyD2D", {}).work is Work.COPIES
    assert found.find("m", "Memset 3", {}).work is Work.MATMUL


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("jit(step)/shard_map/while/body/mul", "jit(step)/while/body/mul"),
        ("jit(step)/transpose(jvp())/mul", "jit(step)/mul"),
        ("jit(step)/while/body/closed_call/mul", "jit(step)/jit(_where)/select_n"),
    ],
    ids=["devices", "one device", "one device, microbatches"],
)
def test_what_is_outside_the_model_is_the_optimizer(model: str, optimizer: str) -> None:
    paths = {"m": model, "o": optimizer}
    lines = [f'  %{name} = f32[8] negate(%x), metadata={{op_name="{path}"}}' for name, path in paths.items()]
    text = "\n".join(["HloModule jit_step", "ENTRY %main (x: f32[8]) -> f32[8] {", *lines, "}"])
    ops = read_program(text, AbstractMesh((2,), ("a",))).ops
    assert (ops["m"].work, ops["o"].work) == (Work.OTHER, Work.OPTIMIZER)


MICRO = [
    "--gin.MODEL=llama-tiny",
    "--gin.MODEL_OVERRIDES={'num_layers':2,'hidden':16,'ffn':32,'num_heads':2,'num_kv_heads':2,'vocab_size':258}",
    *(
        "--gin.SEQ_LEN=16",
        "--gin.GLOBAL_BATCH=16",
        "--gin.MICROBATCH=2",
        "--gin.STEPS=1",
        "--gin.COMPUTE_DTYPE=float32",
    ),
]


def profile(tmp_path: Path, *flags: str) -> int:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    settings = [f"--gin.DATA={tmp_path / 'text.txt'}", f"--gin.RUN_DIR={tmp_path / 'run'}"]
    return tools.main(["profile", *MICRO, *settings, "--out", str(tmp_path / "out"), *flags])


@pytest.mark.usefixtures("clean_environment")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(tmp_path, "--json", "--steps=2", "--gin.STRATEGY=params=replica grads=node opt_state=full") == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    assert found == json.loads((tmp_path / "out" / "profile.json").read_text())
    assert found["is_cpu"] and found["num_steps"] == 2 and found["num_local_devices"] == 8
    counts = {(one["kind"], one["axes"]): one["count"] for one in found["collectives"]}
    # A gather and two reductions of each leaf: 9 in a block of llama, a table, a norm and an output.
    num_leaves = 2 * 9 + 3
    assert counts["all-gather", "inter_opt+intra_grad"] == num_leaves
    assert counts["reduce-scatter", "intra_grad"] == counts["reduce-scatter", "inter_opt"] == num_leaves
    assert 0 < found["compute_s"]["value"] < found["step_s"]["value"]
    assert found["matmul_flops"] > 0
    assert report.CPU_NOTE in err and "to look at the trace" in err
    assert Path(found["trace"]).is_file() and Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("clean_environment")
def test_a_folder_keeps_one_trace(tmp_path: Path) -> None:
    """What is not of the command, also another trace, stays as it is."""
    others = [tmp_path / "out" / name for name in ("notes.txt", "plugins/profile/2026_01_02/host.xplane.pb")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    older = tmp_path / "out" / "plugins" / "profile" / "amsp_jax" / "host_of_before.xplane.pb"
    older.parent.mkdir()
    older.write_text("older")
    assert profile(tmp_path, "--steps=1", "--gin.STRATEGY=ddp") == 0
    trace = Path(json.loads((tmp_path / "out" / "profile.json").read_text())["trace"])
    assert not older.exists() and trace.parent == older.parent and trace.stat().st_size > len("older")
    assert [path.read_text() for path in others] == ["mine", "mine"]


@pytest.mark.parametrize("out", ["file", "file/below", "/proc"])
def test_out_is_checked_before_devices_start(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "setup", None)
    (tmp_path / "file").write_text("")
    assert profile(tmp_path, f"--out={tmp_path / out}") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out={tmp_path / out}: ") and "name a folder that can be written to" in error


def test_a_trace_without_devices(gpu_program: StepProgram) -> None:
    with pytest.raises(UserError, match="no device"):
        breakdowns.all_executions(Trace(is_cpu=True, events={}, starts={}), gpu_program)


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["profile", "--steps=0"]) == 2
    assert tools.main(["profile", "--gin.STRATEGY=zero9"]) == 2
    assert "zero9" in capsys.readouterr().err
