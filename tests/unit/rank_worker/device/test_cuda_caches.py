"""A rank that runs for months meets more shapes than MLX's CUDA backend allows by itself."""

from services.rank_worker.device import cuda_caches


def test_nothing_that_was_never_seen_before_ends_a_rank() -> None:
    """MLX is told not to count what it finds missing, before it looks; and keeps more."""
    environment = {"HOME": "/"}
    cuda_caches.enlarge_caches(environment)

    assert environment.pop("MLX_ENABLE_CACHE_THRASHING_CHECK") == "0"
    assert int(environment.pop("MLX_CUDA_GRAPH_CACHE_SIZE")) > 400
    assert int(environment.pop("MLX_CUDA_SDPA_CACHE_SIZE")) > 256
    assert environment == {"HOME": "/"}


def test_what_an_operator_has_set_stays() -> None:
    """Also a check that was asked for."""
    chosen = dict.fromkeys(cuda_caches.VARIABLES, "7")
    environment = dict(chosen)
    cuda_caches.enlarge_caches(environment)

    assert environment == chosen
