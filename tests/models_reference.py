"""LLaMA and GPT in numpy, float64, written from the papers and apart from `models/`: the oracle of test_models."""

import jax
import numpy as np


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def linear(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def rms_norm(params, x, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * params["scale"]


def layer_norm(params, x, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps) * params["scale"] + params["bias"]


def rope(x, theta):
    """One head [S, H] as complex numbers: feature i and feature i + H/2 turn together."""
    seq_len, head_dim = x.shape
    angle = np.outer(np.arange(seq_len), theta ** (-np.arange(head_dim // 2) / (head_dim // 2)))
    turned = (x[:, : head_dim // 2] + 1j * x[:, head_dim // 2 :]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def attend(q, k, v):
    """One head, [S, H]."""
    scores = q @ k.T / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def attention(params, x, num_heads, num_kv_heads, theta=None):
    """One row, [S, D]; rotary positions where theta is given."""
    size = x.shape[-1] // num_heads
    q, k, v = (linear(params[name], x) for name in ("q", "k", "v"))
    outputs = []
    for head in range(num_heads):
        shared = head // (num_heads // num_kv_heads)
        q_head, k_head, v_head = (
            q[:, head * size :][:, :size],
            k[:, shared * size :][:, :size],
            v[:, shared * size :][:, :size],
        )
        if theta is not None:
            q_head, k_head = rope(q_head, theta), rope(k_head, theta)
        outputs.append(attend(q_head, k_head, v_head))
    return linear(params["o"], np.concatenate(outputs, -1))


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def llama_logits(config, params, tokens):
    """One row of tokens [S] to logits [S, V]."""
    eps = config.norm_eps
    x = params["embed"]["table"][tokens]
    for block in params["blocks"]:
        h = rms_norm(block["attention_norm"], x, eps)
        x = x + attention(block["attention"], h, config.num_heads, config.num_kv_heads, config.rope_theta)
        h, mlp = rms_norm(block["mlp_norm"], x, eps), block["mlp"]
        x = x + linear(mlp["down"], silu(linear(mlp["gate"], h)) * linear(mlp["up"], h))
    return output(params, rms_norm(params["head"]["norm"], x, eps))


def gpt_logits(config, params, tokens):
    """One row of tokens [S] to logits [S, V]."""
    eps = config.norm_eps
    x = params["embed"]["table"][tokens] + params["embed"]["positions"][: len(tokens)]
    for block in params["blocks"]:
        h = layer_norm(block["attention_norm"], x, eps)
        x = x + attention(block["attention"], h, config.num_heads, config.num_heads)
        h, mlp = layer_norm(block["mlp_norm"], x, eps), block["mlp"]
        x = x + linear(mlp["down"], gelu(linear(mlp["up"], h)))
    return output(params, layer_norm(params["head"]["norm"], x, eps))


def output(params, x):
    if "output" in params["head"]:
        return linear(params["head"]["output"], x)
    return x @ params["embed"]["table"].T


def loss(logits, targets, weights):
    """Sum over tokens of weight x cross-entropy: logits [B, S, V], targets and weights [B, S]."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    total = 0.0
    for index in np.ndindex(*targets.shape):
        if weights[index]:
            total -= weights[index] * log_probs[index][targets[index]]
    return total
