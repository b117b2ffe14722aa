"""A cluster in numbers: devices, memory, peaks, links and measured rates; presets and files. Imports no jax."""

from amsp_jax.predict.cluster.cluster import Cluster as Cluster
from amsp_jax.predict.cluster.device import DEVICE_PEAKS as DEVICE_PEAKS
from amsp_jax.predict.cluster.device import DevicePeak as DevicePeak
from amsp_jax.predict.cluster.device import compute_capability as compute_capability
from amsp_jax.predict.cluster.device import device_peak as device_peak
from amsp_jax.predict.cluster.device import peak_flops as peak_flops
from amsp_jax.predict.cluster.file import differences as differences
from amsp_jax.predict.cluster.file import from_json as from_json
from amsp_jax.predict.cluster.file import load_cluster as load_cluster
from amsp_jax.predict.cluster.file import save_cluster as save_cluster
from amsp_jax.predict.cluster.file import to_json as to_json
from amsp_jax.predict.cluster.network import CollectiveKind as CollectiveKind
from amsp_jax.predict.cluster.network import Link as Link
from amsp_jax.predict.cluster.network import Network as Network
from amsp_jax.predict.cluster.presets import CLUSTERS as CLUSTERS
from amsp_jax.predict.cluster.presets import named_cluster as named_cluster
from amsp_jax.predict.cluster.rates import Rates as Rates
