"""Models in Flax NNX, written for one device: LLaMA and GPT, and the registry of named sizes."""

from amsp_jax.models.gpt import GPTConfig, gpt
from amsp_jax.models.llama import LlamaConfig, llama
from amsp_jax.models.registry import MODELS, build_model, model_config

__all__ = ["MODELS", "GPTConfig", "LlamaConfig", "build_model", "gpt", "llama", "model_config"]
