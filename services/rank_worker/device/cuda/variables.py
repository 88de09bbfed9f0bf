"""Variables of MLX's CUDA backend, set before MLX is imported. No MLX.

MLX caches CUDA graphs and attention kernels by array shape. It counts cache misses over the life of
the process, and at twice the cache's size it raises an error in the middle of a step (mlx issue
4326). A server that runs for months meets many shapes, so the check is disabled here, and the
caches are larger.
"""

import contextlib
import importlib.metadata
import re
from collections.abc import MutableMapping
from pathlib import Path

from shared.errors import ConfigError
from shared.os import user_folders

VARIABLES = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "1000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "2000",
}
"""MLX's own defaults are 1, 400 and 256."""

KERNELS_VARIABLE = "MLX_PTX_CACHE_DIR"
"""Names the folder in which MLX keeps compiled kernels, and looks for them."""
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


def enlarge_caches(environment: MutableMapping[str, str]) -> None:
    """Set MLX's variables for cache sizes (`VARIABLES`), except those that are set already.

    Args:
        environment: variables of this process; changed in place.
    """
    for name, value in VARIABLES.items():
        environment.setdefault(name, value)


def keep_compiled_kernels(
    environment: MutableMapping[str, str], gpu_folder: Path = _GPU_FOLDER
) -> None:
    """Have MLX keep compiled kernels in this user's cache folder, if there is one.

    Otherwise MLX keeps them in the folder for temporary files, which is emptied at a restart, and
    which other users may write to. MLX finds a kernel by its name alone, so each version of MLX and
    each model of GPU has a folder of its own: machines may share a home folder. Where the model is
    unknown, or a machine has several, MLX's own folder is used.

    Args:
        environment: variables of this process; changed in place.
        gpu_folder: where the NVIDIA driver describes each GPU.
    """
    models = _gpu_models(gpu_folder)
    if len(models) != 1:
        return
    with contextlib.suppress(ConfigError):
        folder = user_folders.cache_folder(KERNELS_VARIABLE) / "kernels"
        own = folder / importlib.metadata.version("mlx") / models.pop()
        environment.setdefault(KERNELS_VARIABLE, str(own))


def _gpu_models(folder: Path) -> set[str]:
    """Return the models of this machine's GPUs, as names of folders; empty if one is unknown."""
    models = set()
    for path in folder.glob("*/information"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            return set()
        found = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        if found is None:
            return set()
        models.add(re.sub(r"[^A-Za-z0-9]+", "-", found.group(1)).strip("-"))
    return models


def encode_without_graphs(environment: MutableMapping[str, str]) -> None:
    """Have MLX start operations one by one, for a world that uses NCCL, unless it is set already.

    MLX collects operations in CUDA graphs. It captures a collective from a stream for that, which
    takes the host three times as long as starting it, and a step has two per layer.

    Args:
        environment: variables of this process; changed in place.
    """
    environment.setdefault("MLX_USE_CUDA_GRAPHS", "0")
