"""What is timed is what is said to be timed; what is left out is said; processes agree."""

import dataclasses
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from amsp_jax.__main__ import parse_args
from amsp_jax.cli.commands import calibrate as command
from amsp_jax.compile.hlo import collectives, mesh_groups
from amsp_jax.compile.hlo.text import parse
from amsp_jax.errors import UserError
from amsp_jax.predict.calibrate import ProgressLine, calibrate, calibrated, plot_network
from amsp_jax.predict.calibrate.collectives import (
    KINDS,
    SIZES,
    collective,
    groups,
    measure_collectives,
    message_arrays,
)
from amsp_jax.predict.calibrate.compute import AttentionSize, Menu, Workbench, factor_arrays, matmul_rates, multiply
from amsp_jax.predict.calibrate.measure import _assumed_slowdown
from amsp_jax.predict.calibrate.overlap import _products_beside_gather, slowdown_of
from amsp_jax.predict.calibrate.programs import filled, group_axes, group_mesh, repeated
from amsp_jax.predict.calibrate.stopwatch import Stopwatch
from amsp_jax.predict.cluster import Cluster, differences, load_cluster, save_cluster
from amsp_jax.strategy import Degree

ROOT = Path(__file__).parents[2]
MIB = 2**20
TINY = Menu(
    products={"float32": ((8, 8, 8), (128, 128, 128))}, pass_bytes=(1024,), attention=(AttentionSize(1, 16, 2, 8),)
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of the tests, as nodes."""

    num_nodes: int = 2
    devices_per_node: int = 4
    memory_bytes: int = 2**33
    platform: str = "cpu"
    process_index: int = 0

    @property
    def devices(self):
        return tuple(jax.devices()[: self.num_nodes * self.devices_per_node])

    def cluster(self):
        return Cluster(
            name="simulated",
            num_nodes=self.num_nodes,
            devices_per_node=self.devices_per_node,
            device_kind="cpu",
            memory_bytes=self.memory_bytes,
            peak_flops=None,
            source="tests",
        )


class MadeUp(Stopwatch):
    """A stopwatch that runs nothing: a program takes `latency_s`, then 1 s for each `bytes_per_s`."""

    def __init__(self, budget_s, latency_s, bytes_per_s):
        super().__init__(budget_s)
        self.latency_s, self.bytes_per_s, self.measured = latency_s, bytes_per_s, []

    def measure(self, label, make_program, arrays, predicted_s):
        number, unit = label.split()[-2:]
        num_bytes = float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
        self.measured.append(label)
        seconds = self.latency_s + num_bytes / self.bytes_per_s
        self.elapsed_s += self.cost_s(seconds)
        return seconds


# Programs


def text_of(mesh, body, arrays, num_repeats=5):
    avals = jax.eval_shape(lambda: filled(mesh, arrays))
    return repeated(mesh, body, len(arrays), num_repeats).lower(*avals).compile().as_text()


@pytest.mark.parametrize("group", [Degree(2, 1), Degree(4, 1), Degree(1, 2), Degree(4, 2), Degree(2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_a_loop_around_one_collective(kind, group):
    arrays = message_arrays(kind, group, 256, np.dtype("float32"))
    mesh = group_mesh(Machine(), group)
    (found,) = collectives(text_of(mesh, collective(kind, group), arrays))
    assert (found.kind, found.num_runs, found.in_loop) == (kind, 5, True)
    assert found.groups == mesh_groups(mesh, group_axes(group))
    assert found.shape == arrays[-1].shape and max(array.num_bytes for array in arrays) == 256


def test_groups_lie_as_in_training():
    """Members inside a node are neighbours; a group over nodes has the same places in each."""
    ids = {
        group: mesh_groups(group_mesh(Machine(), group), group_axes(group)) for group in (Degree(2, 1), Degree(2, 2))
    }
    assert ids[Degree(2, 1)] == {frozenset(pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))}
    assert ids[Degree(2, 2)] == {frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})}


def test_a_program_repeats_a_collective_with_what_it_gave():
    group = Degree(4, 1)
    mesh = group_mesh(Machine(), group)
    arrays = filled(mesh, message_arrays("all-gather", group, 32, np.dtype("float32")))
    x, whole = (np.array(array).reshape(8, -1) for array in arrays)
    for _ in range(3):
        x[:, 0] = whole[:, 0]
        whole = np.repeat(x.reshape(2, 8), 4, axis=0)
    got_x, got = repeated(mesh, collective("all-gather", group), 2, 3)(*arrays)
    np.testing.assert_array_equal(np.asarray(got_x).reshape(8, 2), x)
    np.testing.assert_array_equal(np.asarray(got).reshape(8, 8), whole)


def test_products_beside_a_gather_are_all_there():
    group = Degree(4, 1)
    arrays = [*factor_arrays((32, 32, 32), "float32"), *message_arrays("all-gather", group, 256, np.dtype("float32"))]
    text = text_of(group_mesh(Machine(), group), _products_beside_gather(2, group), arrays)
    instructions = [i for computation in parse(text).computations.values() for i in computation]
    products = [i for i in instructions if i.opcode == "dot"]
    assert [i.arrays[0].shape for i in products] == [(32, 32)] * 4
    assert [(c.kind, c.num_runs) for c in collectives(text)] == [("all-gather", 5)]


@pytest.mark.parametrize(
    ("beside_s", "slowdown"), [(1.9, 1.0), (2.0, 1.0), (2.2, 1.25), (2.5, 2.0), (2.51, None), (3.0, None), (3.5, None)]
)
def test_products_after_a_gather_are_no_interference(beside_s, slowdown):
    """A gather of 1 s and products of 2 s alone: what takes 3 s ran one after the other."""
    assert slowdown_of(2.0, beside_s, 1.0) == (None if slowdown is None else pytest.approx(slowdown))


def test_what_is_assumed_of_compute_beside_a_collective_is_said():
    slowdown, note = _assumed_slowdown("gpu")
    assert slowdown == 719 / 666 and "could not be measured" in note and "1.08 times" in note and "H200" in note
    slowdown, note = _assumed_slowdown("cpu")
    assert slowdown == 1.0 and "as long as alone" in note


def test_a_chain_of_products_keeps_its_numbers():
    """A chain that vanished or overflowed would be timed on zeros or infinities, which draw less power."""
    mesh = group_mesh(Machine(), Degree(1, 1))
    factors = factor_arrays((16, 24, 40), "float32")
    before = np.asarray(filled(mesh, factors)[0])
    after = np.asarray(repeated(mesh, multiply, 3, 200)(*filled(mesh, factors))[0])
    np.testing.assert_allclose(after, before, atol=1e-3)
    assert np.ptp(before) > 1.5


# What is measured, and what is left out


def test_groups_that_strategies_use_come_first():
    first, others = groups(num_nodes=4, devices_per_node=4)
    assert [str(group) for group in first] == ["4x1", "2x1", "4x4", "4x2", "1x4", "1x2"]
    assert [str(group) for group in others] == ["2x4", "2x2"]
    assert groups(num_nodes=1, devices_per_node=1) == ([], [])
    assert groups(num_nodes=2, devices_per_node=1) == ([Degree(1, 2)], [])


def test_a_fast_network_is_measured_whole():
    watch = MadeUp(1000.0, 1e-5, 1e12)
    table, notes = measure_collectives(Machine(), watch, 1000.0)
    assert notes == []
    assert {key: len(times) for key, times in table.items()} == {
        (kind, group): 4 if group == Degree(2, 2) else 7
        for kind in KINDS
        for group in (Degree(4, 1), Degree(2, 1), Degree(4, 2), Degree(1, 2), Degree(2, 2))
    }
    assert sorted(table["all-reduce", Degree(4, 2)]) == list(SIZES)


def test_what_was_disturbed_is_measured_again():
    class Disturbed(MadeUp):
        """Three messages take longer the first time, one of them always."""

        def measure(self, label, *rest):
            is_again = label in self.measured
            seconds = super().measure(label, *rest)
            if label == "all-gather 4x1 1 GiB":
                return 2 * seconds
            return (
                seconds if is_again or label not in ("all-gather 4x2 64 MiB", "all-reduce 2x1 1 GiB") else 1.4 * seconds
            )

    watch, quiet = Disturbed(1000.0, 1e-5, 1e10), MadeUp(1000.0, 1e-5, 1e10)
    table, _ = measure_collectives(Machine(), watch, 1000.0)
    expected, _ = measure_collectives(Machine(), quiet, 1000.0)
    assert watch.measured[len(quiet.measured) :] == [
        "all-gather 4x1 1 GiB", "all-reduce 2x1 1 GiB", "all-gather 4x2 64 MiB",
    ]  # fmt: skip
    assert table["all-gather", Degree(4, 1)].pop(2**30) == 2 * expected["all-gather", Degree(4, 1)].pop(2**30)
    assert table == expected


def test_what_is_too_slow_is_left_out_and_said():
    watch = MadeUp(30.0, 1e-3, 1e9)
    table, notes = measure_collectives(Machine(), watch, 30.0)
    assert watch.elapsed_s < 40
    assert all(min(table["all-gather", group]) == 2**18 for group in groups(2, 4)[0])
    assert all(note.startswith("not measured within 30 s: ") for note in notes)
    assert any("1 GiB in " in note and "4x1" in note for note in notes)


def test_what_is_too_large_is_left_out_and_said():
    table, notes = measure_collectives(Machine(memory_bytes=256 * MIB), MadeUp(1e4, 1e-5, 1e12), 1e4)
    assert max(table["all-gather", Degree(2, 1)]) == 16 * MIB
    assert notes[0].startswith(
        "too large to measure in 256 MiB of memory: 64 MiB, 1 GiB in 4x1 (all-gather, reduce-scatter), 2x1 (all-gather,"
    )


def test_shards_of_a_message_are_equal_whatever_their_number():
    machine = Machine(num_nodes=1, devices_per_node=3)
    table, _ = measure_collectives(machine, MadeUp(100.0, 1e-5, 1e12), 100.0, sizes=[2**18])
    assert list(table["all-gather", Degree(3, 1)]) == [2**18 + 8]


def test_the_first_product_is_measured_whatever_it_takes():
    watch = Stopwatch(0.001)
    bench = Workbench(Machine(), watch, until_s=0.001)
    rates = matmul_rates(bench, TINY.products)
    assert [point[:3] for point in rates["float32"]] == [(8, 8, 8)] and rates["float32"][0][3] > 0
    assert bench.notes == ["not measured within 0.001 s: float32 product 128 x 128 x 128"]


# The whole


@pytest.fixture(scope="module")
def measured():
    lines = []
    cluster = calibrate(Machine(), 60.0, lambda *line: lines.append(line), sizes=[2**18], menu=TINY)
    return cluster, lines


def test_calibrate_fills_every_table(measured, tmp_path):
    cluster, lines = measured
    assert set(cluster.network.measured) >= {(kind, group) for kind in KINDS for group in groups(2, 4)[0]}
    assert cluster.network.intra.bytes_per_s > 0 and cluster.network.inter.latency_s > 0
    assert len(cluster.rates.matmul["float32"]) == 2 and cluster.rates.overlap_slowdown >= 1
    assert cluster.versions["jax"] == jax.__version__ and cluster.date
    # Devices of the tests share cores, so that products may not run beside the gather.
    assert cluster.rates.overlap_slowdown <= 2
    assert all(0 <= spent <= 1 for _, spent in lines) and lines[0][1] == 0
    save_cluster(cluster, tmp_path / "c.json")
    assert load_cluster(tmp_path / "c.json") == cluster
    plot_network(cluster, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_what_was_measured_before_is_read(measured, tmp_path, monkeypatch):
    module = sys.modules[calibrated.__module__]
    calls = []
    monkeypatch.setattr(module, "calibrate", lambda *_: calls.append(1) or measured[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cluster, line = calibrated(Machine(), lambda make: make())
    (file,) = (tmp_path / "amsp_jax" / "clusters").iterdir()
    assert file.name == f"cpu_2x4_jax-{jax.__version__}.json"
    assert cluster == measured[0] and line == f"measured now, kept in {file}"

    # Free memory varies; it is no reason to measure again, but what counts now.
    less = Machine(memory_bytes=2**30)
    cluster, line = calibrated(less, lambda make: make())
    assert len(calls) == 1 and cluster.memory_bytes == 2**30 and f"from {file}" in line
    assert cluster.network == measured[0].network

    save_cluster(dataclasses.replace(measured[0], versions={"jax": "0.1"}), file)
    _, line = calibrated(Machine(), lambda make: make())
    assert len(calls) == 2 and "jax: 0.1 in the file" in line
    file.write_text("{")
    _, line = calibrated(Machine(), lambda make: make())
    assert len(calls) == 3 and "cut off" in line
    assert differences(load_cluster(file), measured[0]) == []

    nowhere = tmp_path / "file"
    nowhere.touch()
    _, line = calibrated(Machine(), lambda make: make(), nowhere / "c.json")
    assert "not kept" in line


def test_a_plot_needs_a_network(measured, tmp_path):
    alone = dataclasses.replace(measured[0], num_nodes=1, devices_per_node=1, network=None)
    with pytest.raises(UserError, match="no collective was measured"):
        plot_network(alone, tmp_path / "c.png")


# The command


def parse_command(*argv):
    return parse_args(["calibrate", *argv])


def test_the_summary_names_the_messages_of_its_times(measured):
    cluster = measured[0]
    (kind, group), points = next(iter(cluster.network.measured.items()))
    ((num_bytes, seconds),) = points
    text = f"{1e6 * seconds:.0f} us for 256 KiB, {num_bytes / seconds / 1e9:.3g} GB/s (message over time) for 256 KiB"
    assert f"{kind} {group}: {text}" in command._summary(cluster)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out", "no/c.json"], "--out=no/c.json: .*no cannot be written to"),
        (["--out", "."], "--out=.: a folder"),
        (["--out", "c" * 256], "--out=c+: a name of 256 bytes, of 255 at most"),
        (["--out", "c.png", "--plot", "./c.png"], "--plot=c.png: is --out, too"),
        (["--out", "c.json", "--plot", "c.txt"], "--plot=c.txt: draws .png, .pdf and .svg"),
    ],
)
def test_mistakes_show_before_anything_is_measured(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = parse_command(*argv)
    with pytest.raises(UserError, match=message):
        command._check_files(args)


def test_a_budget_of_nothing():
    args = parse_command("--out", "c.json", "--budget", "0")
    with pytest.raises(UserError, match="--budget=0: seconds to measure, more than 0"):
        command.run(args)


def test_progress_is_sparse_in_a_log_and_one_line_on_a_terminal():
    now, log, screen = [0.0], io.StringIO(), io.StringIO()
    screen.isatty = lambda: True
    lines = [ProgressLine(stream, lambda: now[0]) for stream in (log, screen)]
    for second in range(12):
        now[0] = float(second)
        for line in lines:
            line(f"product {second}", second / 12)
    for line in lines:
        line.close()
    assert log.getvalue() == "calibrating, 0% of the time: product 0\ncalibrating, 83% of the time: product 10\n"
    assert screen.getvalue().count("\r") == 13 and "\n" not in screen.getvalue()
    assert "[##########..........] product 6" in screen.getvalue()


CHILD = """
import sys
from amsp_jax.runtime import launch
from amsp_jax.predict.calibrate import calibrate
from amsp_jax.predict.calibrate.compute import AttentionSize, Menu
from amsp_jax.predict.cluster import to_json
index = int(sys.argv[2])
layout = launch.setup(simulated_nodes=2, simulated_devices_per_node=2, coordinator=sys.argv[1], num_processes=2,
                      process_id=index)
menu = Menu(products={"float32": ((8, 8, 8),)}, pass_bytes=(1024,), attention=(AttentionSize(1, 16, 2, 8),))
print(to_json(calibrate(layout, 8.0, sizes=[2**18], menu=menu)))
"""


@pytest.mark.slow
def test_two_processes_measure_the_same_numbers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environ.pop("XLA_FLAGS")
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, address, str(i)], env=environ, stdout=-1, stderr=-1, text=True)
        for i in range(2)
    ]
    try:
        (first, first_error), (second, second_error) = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], first_error + second_error
    # Gloo says on stdout whom it found.
    first, second = first[first.index("{") :], second[second.index("{") :]
    assert first == second and '"all-gather"' in first
