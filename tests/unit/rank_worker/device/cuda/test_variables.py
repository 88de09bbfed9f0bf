"""Variables of MLX's CUDA backend: limits of caches, kernels on disk, graphs."""

from pathlib import Path

import pytest

from services.rank_worker.device.cuda import variables


def test_cuda_cache_sizes_are_raised_and_thrashing_check_disabled() -> None:
    """The check that ends a process after many cache misses is off, and the caches are larger."""
    environment = {"HOME": "/"}
    variables.enlarge_caches(environment)

    assert environment.pop("MLX_ENABLE_CACHE_THRASHING_CHECK") == "0"
    assert int(environment.pop("MLX_CUDA_GRAPH_CACHE_SIZE")) > 400
    assert int(environment.pop("MLX_CUDA_SDPA_CACHE_SIZE")) > 256
    assert environment == {"HOME": "/"}


def test_cuda_cache_variables_set_by_operator_stay_unchanged() -> None:
    """Variables that the operator has set are not changed."""
    chosen = dict.fromkeys(variables.VARIABLES, "7")
    environment = dict(chosen)
    variables.enlarge_caches(environment)

    assert environment == chosen


def _describe_gpus(folder: Path, *models: str) -> Path:
    """Write what the driver says about GPUs; return the folder."""
    for number, model in enumerate(models):
        gpu = folder / f"0000:{number:02}:1e.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 11\n")
    return folder


def _kernel_folder(gpus: Path) -> str:
    environment: dict[str, str] = {}
    variables.keep_compiled_kernels(environment, gpus)
    return environment.get("MLX_PTX_CACHE_DIR", "")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a home folder of this test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def test_compiled_kernels_are_kept_in_cache_folder_of_user(home: Path) -> None:
    """They outlive a restart of the machine, and no other user can write them."""
    gpus = _describe_gpus(home / "gpus", "NVIDIA H200", "NVIDIA H200")
    assert Path(_kernel_folder(gpus)).is_relative_to(home)
    chosen = {"MLX_PTX_CACHE_DIR": "/elsewhere"}
    variables.keep_compiled_kernels(chosen, gpus)
    assert set(chosen.values()) == {"/elsewhere"}


def test_each_model_of_gpu_and_version_of_mlx_has_kernels_of_its_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for one GPU does not load on another one, and machines may share a home folder."""
    folders = set()
    for model in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
        gpus = _describe_gpus(home / model, model)
        for version in ("0.32.4", "0.33.0"):
            monkeypatch.setattr("importlib.metadata.version", lambda _name, one=version: one)
            folders.add(_kernel_folder(gpus))
    assert len(folders) == 4
    assert {Path(one).name for one in folders} == {"NVIDIA-H200", "NVIDIA-A100-SXM4-80GB"}


def test_kernels_stay_in_folder_of_mlx_where_the_gpu_is_not_known(home: Path) -> None:
    """A folder for several models would hold code that does not load on some of them."""
    assert _kernel_folder(home / "none") == ""
    assert _kernel_folder(_describe_gpus(home / "two", "NVIDIA H200", "NVIDIA L4")) == ""
    gpus = _describe_gpus(home / "unnamed", "NVIDIA H200")
    (gpus / "0000:00:1e.0" / "information").write_text("IRQ: 11\n")
    assert _kernel_folder(gpus) == ""


def test_operations_are_started_without_graphs_unless_the_operator_wants_them() -> None:
    """MLX's variable is set, and one that is set already stays."""
    environment: dict[str, str] = {}
    variables.encode_without_graphs(environment)
    assert environment == {"MLX_USE_CUDA_GRAPHS": "0"}
    chosen = {"MLX_USE_CUDA_GRAPHS": "1"}
    variables.encode_without_graphs(chosen)
    assert chosen == {"MLX_USE_CUDA_GRAPHS": "1"}
