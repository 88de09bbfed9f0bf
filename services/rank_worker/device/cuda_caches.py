"""Sizes of the caches of MLX's CUDA backend, set before MLX is imported. No MLX.

MLX caches CUDA graphs and attention kernels by array shape. It counts cache misses over the life of
the process, and at twice the cache's size it raises an error in the middle of a step (mlx issue
4326). A server that runs for months meets many shapes, so the check is disabled here, and the
caches are larger.
"""

from collections.abc import MutableMapping

VARIABLES = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "1000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "2000",
}
"""MLX's own defaults are 1, 400 and 256."""


def enlarge_caches(environment: MutableMapping[str, str]) -> None:
    """Set MLX's variables for cache sizes (`VARIABLES`), except those that are set already.

    Args:
        environment: variables of this process; changed in place.
    """
    for name, value in VARIABLES.items():
        environment.setdefault(name, value)
