"""A model as a pipeline over the mesh axis `stage`: the exchange of its blocks, and the scan over ticks."""

from amsp_jax.engine.pipeline.ticks import Pipeline as Pipeline
from amsp_jax.engine.pipeline.ticks import make_pipeline as make_pipeline
