"""How many prepared graphs and kernels MLX's CUDA backend keeps. No MLX, as it looks only once.

MLX keeps what it has prepared by what was asked for: CUDA graphs, and attention by the shapes of
its arrays. It counts what it did not find over the whole life of the process, and at twice the
number that it keeps it throws, in the middle of a step, from where it cannot go on (mlx issue
4326). A server that runs for months meets ever new shapes, so here it must not; and what serves
many lengths is given more room.
"""

from collections.abc import MutableMapping

VARIABLES = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "1000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "2000",
}
"""MLX's own defaults are 1, 400 and 256."""


def make_room(environment: MutableMapping[str, str]) -> None:
    """Set what nobody has set.

    Args:
        environment: of this process.
    """
    for name, value in VARIABLES.items():
        environment.setdefault(name, value)
