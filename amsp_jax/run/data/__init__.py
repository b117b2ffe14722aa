"""From a text that names a corpus to batches on devices.

`open_dataset` resolves the text, `TokenDataset.rows` is the order of samples as a pure function,
`global_batch` puts a process's rows on its devices and `Prefetcher` does so ahead of the step.
"""

from amsp_jax.run.data.batches import Prefetcher, global_batch
from amsp_jax.run.data.corpus import Datasets, open_dataset
from amsp_jax.run.data.tokenizer import Tokenizer
from amsp_jax.run.data.windows import TokenDataset, Windows

__all__ = ["Datasets", "Prefetcher", "TokenDataset", "Tokenizer", "Windows", "global_batch", "open_dataset"]
