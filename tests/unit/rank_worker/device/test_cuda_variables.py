"""Variables of MLX's CUDA backend: limits of caches, kernels on disk, graphs."""

from pathlib import Path

import pytest

from services.rank_worker.device import cuda_variables


def test_cuda_cache_sizes_are_raised_and_thrashing_check_disabled() -> None:
    """The check that ends a process after many cache misses is off, and the caches are larger."""
    environment = {"HOME": "/"}
    cuda_variables.enlarge_caches(environment)

    assert environment.pop("MLX_ENABLE_CACHE_THRASHING_CHECK") == "0"
    assert int(environment.pop("MLX_CUDA_GRAPH_CACHE_SIZE")) > 400
    assert int(environment.pop("MLX_CUDA_SDPA_CACHE_SIZE")) > 256
    assert environment == {"HOME": "/"}


def test_cuda_cache_variables_set_by_operator_stay_unchanged() -> None:
    """Variables that the operator has set are not changed."""
    chosen = dict.fromkeys(cuda_variables.VARIABLES, "7")
    environment = dict(chosen)
    cuda_variables.enlarge_caches(environment)

    assert environment == chosen


def test_compiled_kernels_are_kept_in_cache_folder_of_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They outlive a restart of the machine, and no other user can write them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    environment: dict[str, str] = {}
    cuda_variables.keep_compiled_kernels(environment)
    (folder,) = environment.values()
    assert Path(folder).is_relative_to(tmp_path)
    chosen = dict.fromkeys(environment, "/elsewhere")
    cuda_variables.keep_compiled_kernels(chosen)
    assert set(chosen.values()) == {"/elsewhere"}


def test_each_kind_of_gpu_and_version_of_mlx_has_kernels_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Code for one GPU does not load on another one, and machines may share a home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folders = set()
    for number, model in enumerate(["NVIDIA H200", "NVIDIA A100-SXM4-80GB", None]):
        gpus = tmp_path / str(number)
        if model is not None:
            (gpus / "0000:00:1e.0").mkdir(parents=True)
            text = f"Model: \t\t {model}\nIRQ:   \t\t 11\n"
            (gpus / "0000:00:1e.0" / "information").write_text(text)
        for version in ("0.32.4", "0.33.0"):
            monkeypatch.setattr("importlib.metadata.version", lambda _name, one=version: one)
            environment: dict[str, str] = {}
            cuda_variables.keep_compiled_kernels(environment, gpus)
            folders |= set(environment.values())
    assert len(folders) == 6
    assert {Path(one).name for one in folders} == {
        "NVIDIA-H200",
        "NVIDIA-A100-SXM4-80GB",
        "unknown-gpu",
    }


def test_operations_are_started_without_graphs_unless_the_operator_wants_them() -> None:
    """MLX's variable is set, and one that is set already stays."""
    environment: dict[str, str] = {}
    cuda_variables.encode_without_graphs(environment)
    assert environment == {"MLX_USE_CUDA_GRAPHS": "0"}
    chosen = {"MLX_USE_CUDA_GRAPHS": "1"}
    cuda_variables.encode_without_graphs(chosen)
    assert chosen == {"MLX_USE_CUDA_GRAPHS": "1"}
