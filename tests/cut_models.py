"""Whole models cut between tensor and context ranks by hand, as a plan would cut them."""

import dataclasses

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from amsp_jax.engine import context
from amsp_jax.model import Split
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
