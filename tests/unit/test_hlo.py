"""Collectives are read from all forms in which XLA writes them, each once, with how often it runs."""

import textwrap
from types import SimpleNamespace

import pytest

from amsp_jax.compile import hlo


def program(entry, rest=""):
    """Text of a program with these instructions in its entry computation."""
    lines = textwrap.indent(textwrap.dedent(entry).strip("\n"), "  ")
    rest = textwrap.dedent(rest).strip("\n")
    return f"HloModule jit_step, is_scheduled=true\n\n{rest}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"


CPU = """
%p = f32[8,4]{1,0} parameter(0)
%ag = f32[16,4]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}, metadata={op_name="x"}
ROOT %rs = (f32[4,4]{1,0}, bf16[2]{0}) reduce-scatter(%p, %p), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%sum
"""


def test_the_cpu_form():
    gather, *scatters = hlo.collectives(program(CPU))
    assert (gather.kind, gather.dtype, gather.shape, gather.num_bytes) == ("all-gather", "f32", (16, 4), 256)
    assert gather.groups == frozenset({frozenset({0, 1}), frozenset({2, 3})})
    assert gather.is_sync and not gather.in_loop and gather.num_runs == 1 and gather.op == "ag"
    assert [(s.shape, s.num_bytes, s.op) for s in scatters] == [((4, 4), 64, "rs"), ((2,), 4, "rs")]
    assert {s.groups for s in scatters} == {frozenset({frozenset({0, 2}), frozenset({1, 3})})}


GPU = """
%s = ((bf16[2048]{0}, bf16[2,8]{1,0}), (bf16[4096]{0}, /*index=1*/bf16[4,8]{1,0})) all-gather-start(%a, %b), \
channel_id=1, replica_groups=mesh['inter_opt'=2,'intra_param'=2] {'intra_param'}, dimensions={0}, \
backend_config={"collective_backend_config":{"is_sync":false}}
%f = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused
%d = (bf16[4096]{0}, bf16[4,8]{1,0}) all-gather-done(%s), backend_config={"is_sync":false}
%s2 = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%f), replica_groups=mesh['a'=2,'b'=2], \
device_ids=([2,2]T(1,0)) {'b'}, to_apply=%sum, backend_config={"collective_backend_config":{"is_sync":true}}
%d2 = f32[4]{0} reduce-scatter-done(%s2)
%s3 = f32[] all-reduce-start(%f), replica_groups={{0,1,2,3}}, to_apply=%sum
%d3 = f32[] all-reduce-done(%s3)
"""


def test_asynchronous_and_combined():
    found = hlo.collectives(program(GPU))
    assert [(c.kind, c.shape, c.is_sync) for c in found] == [
        ("all-gather", (4096,), False),
        ("all-gather", (4, 8), False),
        ("reduce-scatter", (4,), True),
        ("all-reduce", (), False),
    ]
    assert found[0].op == found[1].op == "s" and found[0].num_bytes == 8192
    assert found[0].groups == frozenset({frozenset({0, 1}), frozenset({2, 3})})
    assert found[2].groups == frozenset({frozenset({0, 2}), frozenset({1, 3})})
    assert found[3].is_scalar and len(found[3].groups) == 1


LOOP = """
%wrapped (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1}}, to_apply=%sum
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = ((f32[8]{0}), f32[4]{0}, s32[]) async-start(%y), calls=%wrapped, backend_config={"is_sync":false}
  %end = f32[4]{0} async-done(%start)
  %inner = (s32[]) while(%i), condition=%cond, body=%inside, backend_config={"known_trip_count":{"n":"5"}}
}

%inside (t: (s32[])) -> (s32[]) {
  %cp = f32[2]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
}
"""


def test_wrapped_and_in_loops():
    entry = '%w = (s32[]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    found = {c.kind: c for c in hlo.collectives(program(entry, LOOP))}
    assert set(found) == {"reduce-scatter", "collective-permute"}
    scatter, permute = found["reduce-scatter"], found["collective-permute"]
    assert (scatter.num_runs, scatter.in_loop, scatter.is_sync, scatter.op) == (3, True, False, "start")
    assert (permute.num_runs, permute.in_loop, permute.is_sync) == (15, True, True)
    assert permute.groups == frozenset({frozenset({0, 1})})


def test_a_loop_whose_trips_are_unknown_counts_once():
    entry = "%w = (s32[]) while(%t), condition=%c, body=%body"
    assert hlo.collectives(program(entry, LOOP))[0].num_runs == 1


def test_computations_that_nothing_runs_do_not_count():
    assert hlo.collectives(program("%p = f32[8]{0} parameter(0)", LOOP)) == []


def test_what_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.collectives("module @jit_step {}")


def test_groups_of_mesh_axes():
    mesh = SimpleNamespace(shape={"inter": 2, "intra": 3})
    assert hlo.mesh_groups(mesh, ("intra",)) == frozenset({frozenset({0, 1, 2}), frozenset({3, 4, 5})})
    assert hlo.mesh_groups(mesh, ("inter",)) == frozenset({frozenset({0, 3}), frozenset({1, 4}), frozenset({2, 5})})


def groups_of(*groups):
    return frozenset(map(frozenset, groups))


@pytest.mark.parametrize(
    ("kind", "groups", "axes"),
    [
        ("all-gather", groups_of((0, 1), (2, 3), (4, 5), (6, 7)), "intra"),
        ("all-reduce", groups_of((0, 1, 4, 5), (2, 3, 6, 7)), "intra+stage"),
        ("collective-permute", groups_of((0, 4), (1, 5), (2, 6), (3, 7)), "stage"),
        ("collective-permute", groups_of((0, 1)), "intra"),
        ("all-reduce", groups_of((0, 1)), "groups of 2"),
        ("all-to-all", groups_of((0, 7), (1, 6), (2, 5), (3, 4)), "groups of 2"),
    ],
)
def test_axes_of_groups(kind, groups, axes):
    """The fewest; a permutation may send between some of its devices alone."""
    mesh = SimpleNamespace(shape={"stage": 2, "inter": 2, "intra": 2})
    assert hlo.axes_of(mesh)(kind, groups) == axes


def test_work_between_start_and_end():
    """A product, a fused product, causal attention and a loop of products count; what is outside does not."""
    entry = """
%x = bf16[8,4]{1,0} parameter(0)
%w = bf16[4,16]{1,0} parameter(1)
%q = bf16[2,8,3,5]{3,2,1,0} parameter(2)
%early = (bf16[8,16]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
%s = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
%late = (bf16[8,16]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
%f = bf16[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused
%a = (bf16[2,3,8,5]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", \
"dimensions": ["2", "3", "8", "8"]}, "mask_type": "CAUSAL"}}
%l = (s32[]) while(%t), condition=%c, body=%looped, backend_config={"known_trip_count":{"n":"3"}}
%d = f32[16]{0} all-gather-done(%s)
%rs = f32[8]{0} reduce-scatter(%d), replica_groups={{0,1}}, to_apply=%sum
"""
    rest = """
%fused (x: bf16[8,4], w: bf16[4,16]) -> bf16[8,16] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[4,16]{1,0} parameter(1)
  ROOT %dot = bf16[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%looped (t: (s32[])) -> (s32[]) {
  %one = bf16[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused
}
"""
    gather, scatter = hlo.analyse(program(entry, rest))
    product = 2 * 8 * 4 * 16
    assert gather.flops == hlo.Flops(matmul=product * (1 + 1 + 3), attention=2 * 2 * (2 * 3 * 8 * 8) * 5 // 2)
    assert not gather.is_sync and gather.num_bytes == 64 and gather.num_arrays == 1
    assert scatter.is_sync and scatter.flops.total == 0 and scatter.num_bytes == 64


def test_a_combined_operation_is_one_span():
    spans = hlo.analyse(program(GPU, "%fused (x: f32[8]) -> f32[4] {\n}"))
    assert [(s.kind, s.num_arrays, s.num_bytes) for s in spans] == [
        ("all-gather", 2, 2 * 4096 + 2 * 32),
        ("reduce-scatter", 1, 2 * 16),
        ("all-reduce", 1, 4),
    ]
