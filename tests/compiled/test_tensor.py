"""Whole models cut between tensor and context ranks by hand, against one device; the operators' collectives."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from amsp_jax.compile.hlo import collectives
from amsp_jax.engine import context, tensor
from amsp_jax.model import Part, Split
from amsp_jax.models import GPTConfig, LlamaConfig, gpt, llama

LLAMA = LlamaConfig(num_layers=1, hidden=48, ffn=50, num_heads=6, num_kv_heads=2, vocab_size=61)
GPT = GPTConfig(num_layers=2, hidden=48, ffn=50, num_heads=6, vocab_size=61, max_seq_len=20)
SEQ_LEN = 16


def make(config):
    return llama(config) if isinstance(config, LlamaConfig) else gpt(config)


def make_mesh(**sizes):
    axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)


def draw(model):
    """Parameters with norms and biases away from their initial 1 and 0."""
    rng = np.random.default_rng(0)

    def leaf(path, x):
        mean, std = (0.0, 0.2) if x.ndim == 2 else (float(path[-1].key == "scale"), 0.3)
        return rng.normal(mean, std, x.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, model.abstract_params())


def make_batch(vocab_size):
    """Tokens of weight 0 have targets that are in no vocabulary, or in its padding."""
    rng = np.random.default_rng(1)
    tokens, targets = (rng.integers(0, vocab_size, (2, SEQ_LEN), dtype=np.int32) for _ in range(2))
    weights = (rng.random(tokens.shape) < 0.7).astype(np.float32)
    nowhere = rng.choice(np.array([-100, vocab_size, 10**6], np.int32), tokens.shape)
    return {"tokens": tokens, "targets": np.where(weights > 0, targets, nowhere), "weights": weights}


def forward(model, params, batch):
    """The head's output and the logits."""
    embed, blocks, head = model.split(params)
    x = model.embed.apply(embed, batch, None)
    for part, block in zip(model.blocks, blocks, strict=True):
        x = part.apply(block, x, batch, None)
    tied = embed if model.tied else None
    return model.head.apply(head, tied, x, batch, None), model.logits(head, tied, x)


def loss_and_grads(model, params, batch):
    """((loss sum, (weight sum, logits)), gradients) of this device."""

    def loss(params):
        ((total, weight), _), logits = forward(model, params, batch)
        return total, (weight, logits)

    return jax.value_and_grad(loss, has_aux=True)(params)


def map_splits(function, splits, *trees):
    return jax.tree.map(function, splits, *trees, is_leaf=lambda x: x is None or isinstance(x, Split))


@dataclasses.dataclass(frozen=True)
class Cut:
    """A model's parameters as a plan would store them for `num_tensor` ranks."""

    splits: dict
    num_tensor: int

    def _length(self, split, shape):
        return split and split.padded(shape[split.dim], self.num_tensor)

    def stored(self, params):
        def pad(split, x):
            if not (length := self._length(split, x.shape)):
                return x
            return np.pad(x, [(0, length - n if dim == split.dim else 0) for dim, n in enumerate(x.shape)])

        return map_splits(pad, self.splits, params)

    def specs(self, params):
        def spec(split, x):
            is_cut = self.num_tensor > 1 and self._length(split, x.shape)
            return P(*(None,) * split.dim, "tensor") if is_cut else P()

        return map_splits(spec, self.splits, params)

    def cropped(self, tree, params):
        return jax.tree.map(lambda x, like: np.asarray(x)[tuple(map(slice, like.shape))], tree, params)


def mapped_grads(model, cut, params, sizes):
    """`loss_and_grads` over a mesh with axes `sizes`: what the engine does around a model."""
    specs = cut.specs(params)
    data = P(None, "context") if "context" in sizes else P()

    def local(params, batch):
        (total, (weight, logits)), grads = loss_and_grads(model, params, batch)
        if "context" in sizes:
            total, weight, grads = lax.psum((total, weight, grads), "context")
        if "tensor" in sizes:
            whole = lambda spec, grad: grad if "tensor" in spec else lax.psum(grad, "tensor")  # noqa: E731
            grads = jax.tree.map(whole, specs, grads)
        return (total, (weight, logits)), grads

    return jax.shard_map(
        local,
        mesh=make_mesh(**sizes),
        in_specs=(specs, data),
        out_specs=((P(), (P(), data)), specs),
        check_vma=False,
    )


def parallel(model, params, batch, sizes):
    """`loss_and_grads` of such a mesh, put together."""
    cut, num_context = Cut(model.splits(), sizes.get("tensor", 1)), sizes.get("context", 1)
    mapped = mapped_grads(model, cut, params, sizes)
    order = context.zigzag(SEQ_LEN, num_context)
    (total, (weight, logits)), grads = jax.jit(mapped)(cut.stored(params), {k: v[:, order] for k, v in batch.items()})
    logits = np.asarray(logits)[:, context.zigzag_inverse(SEQ_LEN, num_context)]
    return (total, (weight, logits)), cut.cropped(grads, params)


def assert_near(got, expected):
    """Equal to float32 rounding, measured against the largest value of each array.

    The gradient of a key's bias is zero, softmax being what it is, and its rounding is that of larger terms.
    """

    def check(path, a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 * max(0.1, np.abs(b).max()), err_msg=jax.tree_util.keystr(path)
        )

    jax.tree_util.tree_map_with_path(check, got, expected)


CASES = {
    # Each rank one KV head and three query heads; MLP 50 and vocabulary 61, which is padded to 62.
    "llama, t=2": (LLAMA, {"tensor": 2}),
    # Fewer KV heads than ranks: 6 query heads padded to 8, rank 1's two need both KV heads, rank 3's are padding.
    "llama, t=4": (LLAMA, {"tensor": 4}),
    # Two ranks share a KV head.
    "llama, t=4, 4 heads": (dataclasses.replace(LLAMA, num_heads=4, tied=True), {"tensor": 4}),
    # 3 KV heads padded to 4, and so their query heads to 8.
    "llama, t=2, 3 KV heads": (dataclasses.replace(LLAMA, num_kv_heads=3, tied=True), {"tensor": 2}),
    # The last rank's part of the vocabulary is all padding.
    "llama, t=4, 5 words": (dataclasses.replace(LLAMA, vocab_size=5), {"tensor": 4}),
    "gpt, t=2": (GPT, {"tensor": 2}),
    "gpt, t=4": (dataclasses.replace(GPT, tied=False), {"tensor": 4}),
    "llama, c=2": (LLAMA, {"context": 2}),
    "gpt, c=4": (GPT, {"context": 4}),
    "llama, c=2, t=4": (dataclasses.replace(LLAMA, tied=True), {"context": 2, "tensor": 4}),
    "gpt, c=2, t=2": (GPT, {"context": 2, "tensor": 2}),
    "llama, c=4, t=2": (LLAMA, {"context": 4, "tensor": 2}),
    "llama, axes of 1": (LLAMA, {"context": 1, "tensor": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cut_model_equals_one_device(case):
    config, sizes = CASES[case]
    model, batch = make(config), make_batch(config.vocab_size)
    params = draw(model)
    expected = jax.jit(lambda p, b: loss_and_grads(model, p, b))(params, batch)
    assert_near(parallel(model, params, batch, sizes), expected)


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_dtypes_of_a_cut_model(config):
    """In the compute dtype, with float32 sums; strict promotion lets nothing else pass."""
    model, sizes = make(config), {"context": 2, "tensor": 4}
    params, cut = draw(model), Cut(model.splits(), 4)
    stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), cut.stored(params))
    (total, (weight, logits)), grads = jax.eval_shape(
        mapped_grads(model, cut, params, sizes), stored, make_batch(config.vocab_size)
    )
    assert (total.dtype, weight.dtype, logits.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(lambda x: (x.shape, x.dtype), stored)


# --- collectives of a compiled block


def block_text(config, num_tensor, policy=None):
    """The compiled forward and backward pass of one block, and its arguments' shapes."""
    model = make(config)
    part = model.blocks[0]
    params = model.split(model.abstract_params())[1][0]
    cut = Cut(part.splits, num_tensor)
    specs = cut.specs(params)
    apply = jax.checkpoint(part.apply, policy=policy) if policy else part.apply

    def local(params, x):
        return jax.grad(lambda p, x: jnp.sum(jnp.square(apply(p, x, {}, None))), argnums=(0, 1))(params, x)

    data = P(None, "tensor")
    mapped = jax.shard_map(
        local, mesh=make_mesh(tensor=num_tensor), in_specs=(specs, data), out_specs=(specs, data), check_vma=False
    )
    stored = jax.eval_shape(lambda: cut.stored(jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)))
    x = jax.ShapeDtypeStruct((2, SEQ_LEN, config.hidden), jnp.float32)
    return jax.jit(mapped).lower(stored, x).compile().as_text()


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable], ids=["plain", "all-saved"])
def test_a_layer_gathers_four_times_and_reduces_four_times(config, policy):
    found = collectives(block_text(config, 4, policy))
    rows, hidden = 2, config.hidden
    assert Counter((c.kind, c.shape) for c in found) == {
        ("all-gather", (rows, SEQ_LEN, hidden)): 4,
        ("reduce-scatter", (rows, SEQ_LEN // 4, hidden)): 4,
    }


# --- operators


def test_without_the_axis_operators_are_the_identity():
    def all_of(x):
        x = tensor.gather(tensor.local_sequence(tensor.leave(tensor.enter(x)), 1), 2)
        return tensor.maximum(tensor.total(x)), tensor.rank() + context.rank() + context.positions(4)

    def jaxprs():
        x = jnp.ones((2, 4, 4))
        yield jax.make_jaxpr(all_of)(x)
        for manual in ({"data"}, {"data", "tensor"}):
            # Not manual over `tensor`, or an axis of length 1.
            mesh = make_mesh(data=2, tensor=4 if "tensor" not in manual else 1)
            mapped = jax.shard_map(
                all_of, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()), axis_names=manual, check_vma=False
            )
            yield jax.make_jaxpr(mapped)(x)

    for jaxpr in jaxprs():
        assert not re.search(r"all_gather|reduce_scatter|psum|pmax|axis_index", str(jaxpr))


def test_the_axis_is_seen_in_every_kind_of_traced_code():
    """Loops, branches, rematerialised functions and backward passes of one's own."""
    seen = []

    @jax.custom_vjp
    def operator(x):
        seen.append(tensor.size())
        return x

    def forward(x):
        return operator(x), None

    def backward(_, cotangent):
        seen.append(tensor.size())
        return (cotangent,)

    operator.defvjp(forward, backward)

    def local(x):
        branches = (operator, lambda x: x)
        body = jax.checkpoint(lambda x, i: (lax.switch(i % 2, branches, x), None))
        return jax.grad(lambda x: jnp.sum(lax.scan(body, x, jnp.arange(2))[0]))(x)

    mapped = jax.shard_map(
        local, mesh=make_mesh(tensor=4), in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
    )
    jax.eval_shape(mapped, jnp.ones(4))
    assert len(seen) >= 2
    assert set(seen) == {4}


# --- what models say of their parameters


def test_splits_of_llama():
    splits = llama(LLAMA).splits()
    queries = {"dim": 1, "units": (2, 6)}
    attention = {k: v["kernel"] for k, v in splits["blocks"][0]["attention"].items()}
    assert attention["q"] == Split(**queries, name="heads")
    assert attention["k"] == attention["v"] == Split(1, (2,), replicate=True, name="heads")
    assert attention["o"] == Split(0, (2, 6), name="heads")
    assert splits["blocks"][0]["attention_norm"]["scale"] is None
    assert splits["embed"]["table"] == Split(0, (61,), name="vocabulary entries")
    assert splits["head"]["output"]["kernel"] == Split(1, (61,), name="vocabulary entries")


def test_biases_are_split_as_their_columns_and_whole_behind_rows():
    block = gpt(GPT).splits()["blocks"][1]
    assert block["attention"]["q"]["bias"] == Split(0, (6,), name="heads")
    assert block["mlp"]["up"]["bias"] == Split(0, (50,), name="MLP columns")
    assert block["attention"]["o"]["bias"] is None
    assert block["mlp"]["down"]["bias"] is None


@pytest.mark.parametrize("config", [LLAMA, GPT, dataclasses.replace(LLAMA, tied=True)])
def test_splits_have_the_structure_of_the_parameters(config):
    model = make(config)
    jax.tree.map(lambda split, x: None, model.splits(), model.abstract_params(), is_leaf=lambda x: x is None)


def test_a_module_that_says_nothing_of_a_parameter_has_no_splits():
    class Half(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.ones(2), split=None), nnx.Param(jnp.ones(2))

    assert Part.from_nnx(lambda rngs: Half()).splits is None
    assert Part.from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs)).splits is None
