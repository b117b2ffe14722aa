"""The papers' formulas against the numbers that the papers, and one training log, print."""

import pathlib
import sys

import pytest

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import named_cluster
from amsp_jax.predict.cost import amsp
from amsp_jax.strategy import DataRanks, Degree, parse

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from papers import frontier, hybrid, megatron, zero  # noqa: E402
from papers.megatron import Gpt, Recompute  # noqa: E402
from papers.zero import Stage  # noqa: E402

GB = 1e9
PARTITIONED = (Stage.OS, Stage.OS_G, Stage.OS_G_P)

# ZeRO

ZERO_TABLE_1 = {
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}


@pytest.mark.parametrize("num_ranks", ZERO_TABLE_1)
def test_zero_table_1(num_ranks):
    """GB a device. The paper rounds the columns of 7.5B and truncates the others, so one unit of the last digit."""
    sizes = [7.5e9] * 3 + [128e9] * 3 + [1e12] * 3
    for size, stage, printed in zip(sizes, PARTITIONED * 3, ZERO_TABLE_1[num_ranks].split(), strict=True):
        last_digit = 10.0 ** -len(printed.partition(".")[2])
        tolerance = 0.501 * last_digit if size == 7.5e9 else last_digit
        assert zero.state_bytes(size, stage, num_ranks) / GB == pytest.approx(float(printed), rel=0, abs=tolerance)


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_plain_data_parallelism_has_sixteen_bytes_a_parameter(num_ranks):
    assert zero.state_bytes(7.5e9, Stage.DP, num_ranks) == 120 * GB


ZERO_TABLE_2 = {
    1: (2e9, 7.6e9, 14.4e9, 128e9),
    2: (4e9, 15.2e9, 28.8e9, 256e9),
    4: (8e9, 30.4e9, 57.6e9, 0.5e12),
    8: (16e9, 60.8e9, 115.2e9, 1e12),
    16: (32e9, 121.6e9, 230.4e9, 2e12),
}


@pytest.mark.parametrize("model_parallel", ZERO_TABLE_2)
def test_zero_table_2(model_parallel):
    """The largest model on 32 GB with 64 ranks; those in trillions are rounded to one digit."""
    for stage, printed in zip(Stage, ZERO_TABLE_2[model_parallel], strict=True):
        largest = zero.largest_model(32 * GB, stage, 64, model_parallel)
        assert largest == pytest.approx(printed, rel=0.025 if printed >= 0.5e12 else 0.01)
        assert zero.state_bytes(largest, stage, 64, model_parallel) == pytest.approx(32 * GB)


@pytest.mark.parametrize(("stage", "passes"), [(Stage.DP, 2), (Stage.OS, 2), (Stage.OS_G, 2), (Stage.OS_G_P, 3)])
def test_zero_volume(stage, passes):
    assert zero.volume(1e9, stage) == passes * 1e9
    assert zero.volume(1e9, stage, num_ranks=8) == passes * 1e9 * 7 / 8
    assert zero.volume(1e9, stage, num_ranks=1) == 0


def test_zero_activations():
    """GPT-2 of 1.5B parameters in fp16: 60.4 GB."""
    elements = zero.activation_elements(hidden=1600, microbatch=32, seq_len=1024, num_layers=48)
    assert 2 * elements / GB == pytest.approx(60.4, abs=0.05)


def test_partitioned_checkpoints_cost_a_twelfth():
    plain = zero.model_parallel_volume(1600, 32, 1024)
    assert zero.model_parallel_volume(1600, 32, 1024, partitioned_checkpoints=True) / plain - 1 == pytest.approx(1 / 12)


# ZeRO++, MiCS, FSDP


@pytest.mark.parametrize(
    ("techniques", "parts"),
    [
        ((), (1, 1, 1)),
        (("quantized_weights",), (0.5, 0.5, 1)),
        (("secondary_shard",), (1, 0, 1)),
        (("quantized_grads",), (1, 1, 0.25)),
        (("quantized_weights", "secondary_shard", "quantized_grads"), (0.5, 0, 0.25)),
    ],
)
def test_zero_plus_plus_volume(techniques, parts):
    """3M to 0.75M."""
    volume = hybrid.cross_node_volume(8e9, **dict.fromkeys(techniques, True))
    assert (volume.forward_gather, volume.backward_gather, volume.grad_reduce) == tuple(8e9 * part for part in parts)
    assert volume.total == 8e9 * sum(parts)


def test_secondary_shard():
    assert hybrid.secondary_shard_bytes(8e9, 8) == 2e9
    assert hybrid.cross_node_gather_volume(8e9, 4, secondary_shard=False) == 2 * 4 * 8e9
    assert hybrid.cross_node_gather_volume(8e9, 4, secondary_shard=True) == 8e9


@pytest.mark.parametrize(("hierarchical", "sixteenths"), [(False, 15), (True, 8)])
def test_mics_gather(hierarchical, sixteenths):
    assert hybrid.inter_node_gather_volume(16.0, 16, 8, hierarchical=hierarchical) == sixteenths


@pytest.mark.parametrize(
    ("group", "world", "volume"), [(8, 64, 2 * 64 * 56 / (8 * 64)), (8, 8, 0), (1, 4, 2 * 64 * 3 / 4)]
)
def test_hybrid_all_reduce(group, world, volume):
    assert hybrid.hybrid_all_reduce_volume(64, group, world) == volume


# AMSP


@pytest.mark.parametrize(("num_nodes", "count"), [(128, 121), (64, 100), (16, 64), (4, 36)])
def test_amsp_space(num_nodes, count):
    space = amsp.space(DataRanks(8, num_nodes))
    assert len(space) == len(set(space)) == count
    for degrees in space:
        components = (degrees.params, degrees.grads, degrees.opt_state)
        assert all(degree.intra == 8 or degree.inter == 1 for degree in components)
        assert degrees.grads in (degrees.params, degrees.opt_state)


RANKS = DataRanks(8, 2)
JOB = amsp.Job(num_params=1000, module_params=(30, 10), num_layers=3, num_microbatches=5, bucket_bytes=100)


def degrees(text, ranks=RANKS):
    return parse(text).resolve(ranks)


@pytest.mark.parametrize(
    ("strategy", "num_bytes"),
    [("ddp", 16), ("zero3", 1), ("zero1", 2 + 2 + 12 / 16), ("zero2", 2 + 14 / 16), ("mics(8)", 2)],
)
def test_amsp_memory(strategy, num_bytes):
    assert amsp.state_bytes(7e9, degrees(strategy)) == num_bytes * 7e9


def test_amsp_memory_of_7b():
    """112 GB where nothing is sharded."""
    assert amsp.state_bytes(7e9, degrees("ddp")) == 112 * GB


class Network:
    """Every collective takes a second; what was asked for is kept."""

    def __init__(self):
        self.asked = []

    def __call__(self, kind, num_bytes, group):
        self.asked.append((kind, num_bytes, str(group)))
        return 1.0


@pytest.mark.parametrize(
    ("strategy", "counts", "asked"),
    [
        # (2 Phi / U s_p) = 20 buckets where parameters are whole.
        ("ddp", (0, 0, 20, 0), {("all-reduce", 100, "8x2")}),
        ("zero1", (0, 0, 20, 16), {("all-reduce", 100, "8x2"), ("broadcast", 125, "8x2")}),
        ("zero2", (0, 4 * 20, 20, 16), {("all-reduce", 100, "8x2"), ("broadcast", 125, "8x2")}),
        # M L (2 + 1) for each of two modules.
        (
            "zero3",
            (90, 0, 0, 0),
            {(kind, size, "8x2") for kind in ("all-gather", "reduce-scatter") for size in (60, 20)},
        ),
        (
            "params=2x1 grads=2x1 opt_state=8x1",
            (90, 0, 10, 4),
            {(kind, size, "2x1") for kind in ("all-gather", "reduce-scatter") for size in (60, 20)}
            | {("all-reduce", 100, "4x2"), ("broadcast", 250, "4x1")},
        ),
        (
            "params=2x1 grads=8x1 opt_state=8x1",
            (90, 4 * 10, 10, 4),
            {(kind, size, "2x1") for kind in ("all-gather", "reduce-scatter") for size in (60, 20)}
            | {("all-reduce", 100, "4x1"), ("all-reduce", 100, "4x2"), ("broadcast", 250, "4x1")},
        ),
    ],
)
def test_amsp_terms(strategy, counts, asked):
    network = Network()
    found = amsp.terms(JOB, degrees(strategy), network)
    assert (found.params_s, found.grads_s, found.opt_reduce_s, found.opt_broadcast_s) == counts
    assert found.total_s == sum(counts)
    assert set(network.asked) == asked


def test_amsp_reduces_gradients_in_every_microbatch_but_the_last():
    once = amsp.Job(num_params=1000, module_params=(30, 10), num_layers=3, num_microbatches=1, bucket_bytes=100)
    found = amsp.terms(once, degrees("zero2"), Network())
    assert found.grads_s == 0 and found.opt_reduce_s == 20


LLAMA = {"7b": (32, 4096, 11008), "13b": (40, 5120, 13824), "30b": (60, 6144, 16384)}


def llama_modules(name):
    """Attention and feed-forward of a layer, norms with them."""
    _, hidden, ffn = LLAMA[name]
    return 4 * hidden**2 + hidden, 3 * hidden * ffn + hidden


def llama_params(name):
    num_layers, hidden, _ = LLAMA[name]
    return num_layers * sum(llama_modules(name)) + 2 * 32000 * hidden + hidden


@pytest.mark.parametrize(("name", "billions"), [("7b", 6.74), ("13b", 13.02), ("30b", 27.6)])
def test_amsp_models(name, billions):
    assert llama_params(name) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("activation_gib", [0, 17])
@pytest.mark.parametrize("bucket_mib", [64, 512, 1024])
def test_amsp_objective_picks_the_papers_row_for_7b(bucket_mib, activation_gib):
    """128 GPUs, 8 microbatches, 80 GiB: P = G = 1x1, OS inside the node, also with 34 sbh a layer (17 GiB).

    The choice does not hang on the bucket's size.
    """
    cluster = named_cluster("a800", 16)
    num_params = llama_params("7b")
    job = amsp.Job(
        num_params=num_params,
        module_params=llama_modules("7b"),
        num_layers=32,
        num_microbatches=8,
        bucket_bytes=bucket_mib * 2**20,
    )
    fits = [
        degrees
        for degrees in amsp.space(cluster.ranks)
        if amsp.state_bytes(num_params, degrees) <= (80 - activation_gib) * 2**30
    ]
    best = min(fits, key=lambda degrees: amsp.terms(job, degrees, cluster.network.seconds).total_s)
    assert best.params == best.grads == Degree(1, 1)
    assert best.opt_state.inter == 1 and best.opt_state.intra > 1


# Tokens a second and GPU at 1, 2, 4 and 8 microbatches (Table V), and the same in MFU, by hand.
AMSP_TABLE_5 = {
    "7b": ((3525, 4119, 4416, 4503), (0.530, 0.619, 0.663, 0.676)),
    "13b": ((1918, 2082, 2183, 2230), (0.542, 0.588, 0.617, 0.630)),
    "30b": ((825, 856, 872, 880), (0.485, 0.504, 0.513, 0.518)),
}


@pytest.mark.parametrize("name", AMSP_TABLE_5)
def test_amsp_mfu(name):
    num_layers, hidden, _ = LLAMA[name]
    per_token = amsp.flops_per_token(llama_params(name), num_layers, hidden, 4096)
    assert [amsp.mfu(rate, per_token) for rate in AMSP_TABLE_5[name][0]] == pytest.approx(
        AMSP_TABLE_5[name][1], abs=1e-3
    )


# Megatron


def gpt(num_layers, hidden, num_heads, vocab_size=51200, seq_len=2048):
    return Gpt(num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab_size=vocab_size, seq_len=seq_len)


MEGATRON = {
    "22b": gpt(48, 6144, 64),
    "175b": gpt(96, 12288, 96),
    "530b": gpt(105, 20480, 128),
    "1t": gpt(128, 25600, 160),
}
ACTIVATIONS = {
    ("22b", 4): (7079985152, 1325400064, 884998144, 654311424, 213909504, 100663296),
    ("175b", 1): (2868903936, 578813952, 358612992, 327155712, 106954752, 50331648),
    ("530b", 1): (4110417920, 880803840, 513802240, 545259520, 178257920, 83886080),
    ("1t", 1): (5138022400, 1101004800, 642252800, 681574400, 222822400, 104857600),
}


@pytest.mark.parametrize(("name", "microbatch"), ACTIVATIONS)
def test_megatron_activations(name, microbatch):
    settings = (
        {},
        {"tensor": 8},
        {"tensor": 8, "sequence_parallel": True},
        {"tensor": 8, "recompute": Recompute.SELECTIVE},
        {"tensor": 8, "sequence_parallel": True, "recompute": Recompute.SELECTIVE},
        {"tensor": 8, "sequence_parallel": True, "recompute": Recompute.FULL},
    )
    for setting, expected in zip(settings, ACTIVATIONS[name, microbatch], strict=True):
        assert megatron.layer_activation_bytes(MEGATRON[name], microbatch, **setting) == expected


def test_flash_attention_and_no_dropout():
    model, sbh, scores = MEGATRON["175b"], 2048 * 12288, 96 * 2048**2
    layer = megatron.layer_activation_bytes
    assert layer(model, 1, flash_attention=True) == 34 * sbh == layer(model, 1, recompute=Recompute.SELECTIVE)
    assert layer(model, 1, dropout=False) == 32 * sbh + 2 * scores
    assert layer(model, 1, dropout=False, flash_attention=True) == 32 * sbh
    assert layer(model, 1, dropout=False, tensor=8) == (8 + 24 / 8) * sbh + 2 * scores / 8
    assert layer(model, 1, dropout=False, tensor=8, sequence_parallel=True) == 4 * sbh + 2 * scores / 8


@pytest.mark.parametrize(
    ("stages", "chunks", "layers"), [(1, 1, 96), (16, 1, 96), (8, 3, 96 * (1 + 7 / 24)), (1, 4, 96)]
)
def test_activations_of_the_first_stage(stages, chunks, layers):
    assert megatron.first_stage_activation_bytes(10, 96, stages, chunks) == pytest.approx(10 * layers)


@pytest.mark.parametrize(
    ("vocab_size", "tensor", "stored"),
    [(50257, 1, 50304), (50257, 4, 50688), (50257, 8, 51200), (51200, 8, 51200), (51201, 8, 52224), (1, 2, 256)],
)
def test_padded_vocabulary(vocab_size, tensor, stored):
    assert megatron.padded_vocab_size(vocab_size, tensor) == stored


# A training log of 175B on 128 GCDs: tensor 4, 16 stages, the vocabulary of GPT-2 padded.
LOG = gpt(96, 12288, 96, vocab_size=megatron.padded_vocab_size(50257, tensor=4))


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, 2899359744), *((stage, 2718480384) for stage in range(1, 15)), (15, 2899384320)]
)
def test_parameters_of_a_rank(stage, expected):
    assert megatron.rank_params(LOG, tensor=4, num_stages=16, stage=stage) == expected


def test_parameters_of_the_whole_model():
    assert megatron.num_params(LOG) == 174609555456
    assert megatron.rank_params(LOG, tensor=1, num_stages=1, stage=0) == 174609555456


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"tensor": 4, "num_stages": 7, "stage": 0}, "num_layers=96 does not divide by 7"),
        ({"tensor": 5, "num_stages": 16, "stage": 0}, "hidden=12288 does not divide by 5"),
        ({"tensor": 4, "num_stages": 16, "stage": 16}, "stage=16, but 16 stages"),
    ],
)
def test_a_split_that_does_not_exist(split, message):
    with pytest.raises(UserError, match=message):
        megatron.rank_params(LOG, **split)


def test_flops_with_recomputation():
    flops = megatron.hardware_flops(LOG, 1280)
    assert flops == pytest.approx(3.7590433383894216e18, rel=1e-15)
    s, h, v, num_layers = 2048, 12288, 50688, 96
    factor = 1 + s / (6 * h) + v / (16 * num_layers * h)
    assert flops == pytest.approx(24 * 4 * 1280 * s * num_layers * h**2 * factor, rel=1e-14)
    assert megatron.utilization(flops, 196.4964, 128, 1e12) == pytest.approx(149.46, abs=0.005)


def test_flops_without_recomputation():
    s, h, v, num_layers = 2048, 12288, 50688, 96
    factor = 1 + s / (6 * h) + v / (12 * num_layers * h)
    assert megatron.model_flops(LOG, 1280) == pytest.approx(72 * 1280 * num_layers * s * h**2 * factor, rel=1e-14)


@pytest.mark.parametrize(
    ("name", "global_batch", "step_s", "num_gpus", "percent"),
    [
        ("22b", 4, 1.10, 8, 41.5),
        ("175b", 64, 13.75, 64, 51.4),
        ("530b", 280, 37.83, 280, 56.0),
        ("1t", 512, 71.49, 512, 56.3),
    ],
)
def test_megatron_mfu(name, global_batch, step_s, num_gpus, percent):
    flops = megatron.model_flops(MEGATRON[name], global_batch)
    assert 100 * megatron.utilization(flops, step_s, num_gpus, 312e12) == pytest.approx(percent, abs=0.2)


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "percent"), [(16, 320, 1, 4.69), (64, 800, 1, 7.88), (16, 320, 2, 2.34)]
)
def test_bubbles(stages, microbatches, chunks, percent):
    """The first two are Frontier's recipes."""
    assert 100 * megatron.bubble_of_ideal(stages, microbatches, chunks) == pytest.approx(percent, abs=0.006)


def test_bubble_of_the_whole_time():
    ideal, total = megatron.bubble_of_ideal(16, 320), megatron.bubble_of_total(16, 320)
    assert total == 15 / 335 == pytest.approx(ideal / (1 + ideal))


def test_tensor_parallel_volume():
    """Four gathers and four reduce-scatters, each (t - 1)/t of sbh."""
    assert megatron.tensor_layer_elements(MEGATRON["175b"], 1, 8) == 8 * 2048 * 12288 * 7 / 8
    assert megatron.tensor_layer_elements(MEGATRON["175b"], 1, 1) == 0


# Frontier


@pytest.mark.parametrize(("name", "billions"), [("22b", 22.07), ("175b", 174.62), ("1t", 1008.04)])
def test_frontier_parameters(name, billions):
    assert megatron.num_params(frontier.MODELS[name]) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(("num_params", "total"), [(22e9, 308e9), (175e9, 2.45e12), (1e12, 14e12)])
def test_frontier_memory(num_params, total):
    states = frontier.state_bytes(num_params)
    assert (states.params, states.grads, states.opt_state) == (6 * num_params, 4 * num_params, 4 * num_params)
    assert states.total == total


def test_frontier_training():
    assert frontier.training_flops(1e12, 20e12) == 1.2e26


@pytest.mark.parametrize(("name", "tflops"), [("22b", 73.5), ("175b", 69.2), ("1t", 61.2)])
def test_frontier_utilization(name, tflops):
    share = megatron.utilization(tflops * 1e12, 1, 1, frontier.GCD_PEAK_FLOPS)
    assert share == pytest.approx(frontier.UTILIZATION[name], abs=3e-4)
