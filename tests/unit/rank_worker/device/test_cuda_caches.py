"""Limits of caches in MLX's CUDA backend, raised for long-running ranks."""

from services.rank_worker.device import cuda_caches


def test_cuda_cache_sizes_are_raised_and_thrashing_check_disabled() -> None:
    """The check that ends a process after many cache misses is off, and the caches are larger."""
    environment = {"HOME": "/"}
    cuda_caches.enlarge_caches(environment)

    assert environment.pop("MLX_ENABLE_CACHE_THRASHING_CHECK") == "0"
    assert int(environment.pop("MLX_CUDA_GRAPH_CACHE_SIZE")) > 400
    assert int(environment.pop("MLX_CUDA_SDPA_CACHE_SIZE")) > 256
    assert environment == {"HOME": "/"}


def test_cuda_cache_variables_set_by_operator_stay_unchanged() -> None:
    """Variables that the operator has set are not changed."""
    chosen = dict.fromkeys(cuda_caches.VARIABLES, "7")
    environment = dict(chosen)
    cuda_caches.enlarge_caches(environment)

    assert environment == chosen
