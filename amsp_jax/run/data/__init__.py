"""From a corpus, or a source of one's own, to batches on devices.

`open_dataset` opens a corpus that a text names, `open_sources` what Python gives: a `Source`, `from_map` or
`from_iterator`.
`global_batch` puts a process's rows on its devices and `Prefetcher` does so ahead of the step.
"""

from amsp_jax.run.data.batches import Prefetcher, global_batch
from amsp_jax.run.data.corpus import Datasets, open_dataset
from amsp_jax.run.data.iterators import from_iterator
from amsp_jax.run.data.source import Source, from_map, open_sources
from amsp_jax.run.data.tokenizer import Tokenizer
from amsp_jax.run.data.windows import Dataset, TokenDataset, Windows

__all__ = [
    "Dataset",
    "Datasets",
    "Prefetcher",
    "Source",
    "TokenDataset",
    "Tokenizer",
    "Windows",
    "from_iterator",
    "from_map",
    "global_batch",
    "open_dataset",
    "open_sources",
]
