"""A model on pipeline stages gives the loss and gradients of the model as it is written, and no stage does more than its
part."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from amsp_jax import hlo
from amsp_jax.errors import UserError
from amsp_jax.model import Model, Part
from amsp_jax.parallel import STAGE
from amsp_jax.pipeline import make_pipeline
from amsp_jax.plan import LeafPlan, pad, path_name
from amsp_jax.schedule import Schedule
from amsp_jax.stack import Gather, Remat

VOCAB, HIDDEN, ROWS, SEQ = 24, 16, 4, 3


def embed_init(key):
    return {"table": 0.5 * jax.random.normal(key, (VOCAB, HIDDEN))}


def block_init(key):
    a, b = jax.random.split(key)
    return {
        "in": 0.3 * jax.random.normal(a, (HIDDEN, 2 * HIDDEN)),
        "out": 0.3 * jax.random.normal(b, (2 * HIDDEN, HIDDEN)),
        # Too small to be sharded.
        "scale": jnp.ones(()),
    }


def head_init(key):
    return {"out": 0.3 * jax.random.normal(key, (HIDDEN, VOCAB))}


def noise(key, x):
    return jax.vmap(lambda k, row: row * jax.random.uniform(k, row.shape, minval=0.5, maxval=1.5))(key, x)


def embed_apply(params, batch, keys):
    return {"x": noise(keys, params["table"][batch["tokens"]])}


def block_apply(params, x, batch, keys):
    inner = jnp.tanh(x["x"] @ params["in"])
    return {"x": x["x"] + params["scale"] * noise(keys, inner @ params["out"])}


def logits(head, embed, x):
    return x["x"] @ (head["out"] if embed is None else head["out"] + embed["table"].T)


def head_apply(params, embed, x, batch, keys):
    scores = logits(params, embed, x)
    picked = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(scores, -1) - picked
    aux = {"largest": jnp.sum(jnp.max(scores, -1)), "rows": jnp.int32(len(keys))}
    return (jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])), aux


BLOCK = Part(block_init, block_apply)


def model_of(num_blocks, tied=False):
    return Model(
        name="toy",
        embed=Part(embed_init, embed_apply),
        blocks=(BLOCK,) * num_blocks,
        head=Part(head_init, head_apply),
        tied=tied,
    )


def params_of(model):
    keys = jax.random.split(jax.random.key(0), len(model.parts))
    embed, *blocks, head = (part.init(key) for part, key in zip(model.parts, keys, strict=True))
    return model.join(embed, blocks, head)


def data_of(m, rows=ROWS, seq=SEQ):
    rng = np.random.default_rng(3)
    batch = {name: rng.integers(0, VOCAB, (m, rows, seq), dtype=np.int32) for name in ("tokens", "targets")}
    batch["weights"] = rng.random((m, rows, seq), dtype=np.float32)
    return batch, np.arange(m * rows, dtype=np.int32).reshape(m, rows)


def keys_of(rows):
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(5), row))(rows)


def plain(model, params, item):
    """The model on one microbatch, on one device."""
    batch, rows = item
    embed, blocks, head = model.split(params)
    keys = keys_of(rows)
    x = model.embed.apply(embed, batch, keys)
    for i, (part, block) in enumerate(zip(model.blocks, blocks, strict=True), start=1):
        x = part.apply(block, x, batch, jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(keys))
    return model.head.apply(head, embed if model.tied else None, x, batch, keys)


@functools.cache
def oracle(num_blocks, tied, m):
    """(sums, gradients) of the whole batch."""
    model = model_of(num_blocks, tied)

    def loss(params):
        sums = jax.tree.map(lambda x: x.sum(0), lax.map(functools.partial(plain, model, params), data_of(m)))
        return sums[0][0], sums

    grads, sums = jax.jit(jax.grad(loss, has_aux=True))(params_of(model))
    return jax.device_get((sums, grads))


def mesh_of(p, **data_axes):
    sizes = {STAGE: p, **data_axes}
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def leaves_of(params, mesh):
    """Of each leaf the plan that the axes of the mesh say by their names, with `stage` last among the opt axes."""

    def axes(role):
        return tuple(axis for axis in mesh.axis_names if axis.endswith(role))

    def leaf(path, x):
        sizes, name = tuple(mesh.shape.items()), path_name(path)
        if not x.shape:
            data = tuple(axis for axis in mesh.axis_names if axis != STAGE)
            return LeafPlan(name, x.shape, None, 0, (), (), (), (*data, STAGE), sizes)
        dim = 1 if name.endswith("in") else 0
        shards = int(np.prod([size for axis, size in mesh.shape.items() if not axis.endswith("replica")]))
        padded = -(-x.shape[dim] // shards) * shards
        roles = axes("param"), axes("grad"), (*axes("opt"), STAGE), axes("replica")
        return LeafPlan(name, x.shape, dim, padded, *roles, sizes)

    return jax.tree_util.tree_map_with_path(leaf, params)


def stored(leaves, params):
    return jax.tree.map(lambda leaf, x: pad(jnp.asarray(x), leaf.storage_shape), leaves, params)


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline on a mesh, as a jitted function of (params, data)."""

    schedule: Schedule
    num_blocks: int
    mesh: jax.sharding.Mesh
    tied: bool = False
    remat: Remat = Remat.FULL
    dtype: str = "float32"

    @functools.cached_property
    def model(self):
        return model_of(self.num_blocks, self.tied)

    @functools.cached_property
    def leaves(self):
        return leaves_of(jax.eval_shape(lambda: params_of(self.model)), self.mesh)

    def _mapped(self, local, out_specs):
        specs = jax.tree.map(lambda leaf: leaf.opt_spec, self.leaves)
        data = P(None, self.data_axes or None)
        out = specs if out_specs is None else out_specs
        return jax.jit(
            jax.shard_map(local, mesh=self.mesh, in_specs=(specs, (data, data)), out_specs=out, check_vma=False)
        )

    @property
    def data_axes(self):
        return tuple(axis for axis in self.mesh.axis_names if axis != STAGE)

    def pipeline(self, model=None):
        gather_tree = Gather(jnp.dtype(self.dtype), jnp.float32)
        return make_pipeline(model or self.model, self.leaves, self.schedule, gather_tree, self.remat)

    def train(self):
        pipeline = self.pipeline()

        def local(params, data):
            shards = pipeline.param_shards(params, jnp.dtype(self.dtype))
            sums, grads = pipeline.grads(shards, data, keys_of)
            return lax.psum(sums, self.mesh.axis_names), pipeline.reduce(grads, jnp.float32)

        specs = jax.tree.map(lambda leaf: leaf.opt_spec, self.leaves)
        return self._mapped(local, (P(), specs))

    def lowered(self, rows=ROWS, seq=SEQ):
        def abstract(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, jnp.float32), self.leaves)
        data = jax.tree.map(abstract, data_of(self.schedule.num_microbatches, rows, seq))
        return self.train().lower(params, data)

    def forward(self, model, out_specs):
        pipeline = self.pipeline(model)

        def local(params, data):
            return pipeline.forward(pipeline.param_shards(params, jnp.float32), data, keys_of)

        return self._mapped(local, out_specs)


def assert_close(a, b, tolerance=2e-6):
    flat_a, flat_b = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (a, b))
    for (path, x), (_, y) in zip(flat_a, flat_b, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def check_gradients(case):
    sums, grads = oracle(case.num_blocks, case.tied, case.schedule.num_microbatches)
    found, found_grads = jax.device_get(case.train()(stored(case.leaves, params_of(case.model)), data_of_case(case)))
    assert_close(found, sums)
    assert_close(found_grads, stored(case.leaves, grads), tolerance=1e-5)


def data_of_case(case):
    return data_of(case.schedule.num_microbatches)


CASES = {
    "gpipe": (("gpipe", 2, 1, 2), 2, {}, {}),
    "1f1b": (("1f1b", 4, 1, 8), 4, {}, {}),
    "more microbatches than stages": (("1f1b", 4, 1, 5), 4, {}, {}),
    "interleaved": (("1f1b", 2, 2, 6), 4, {"intra_param": 2}, {}),
    "interleaved gpipe": (("gpipe", 2, 2, 4), 4, {}, {}),
    "uneven": (("1f1b", 4, 1, 4), 6, {"intra_param": 2}, {}),
    "uneven and interleaved": (("1f1b", 2, 2, 2), 7, {}, {"remat": Remat.PROJECTIONS}),
    "tied": (("1f1b", 2, 1, 3), 2, {"intra_param": 2}, {"tied": True}),
    "tied, gpipe": (("gpipe", 4, 1, 4), 4, {"intra_grad": 2}, {"tied": True}),
    "every role": (("1f1b", 2, 1, 2), 2, {"inter_opt": 2, "intra_param": 2}, {"remat": Remat.NONE}),
    "replicas": (("1f1b", 2, 2, 4), 5, {"intra_replica": 2, "intra_grad": 2}, {"tied": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_device(name):
    schedule, num_blocks, axes, options = CASES[name]
    check_gradients(Case(Schedule(*schedule), num_blocks, mesh_of(schedule[1], **axes), **options))
