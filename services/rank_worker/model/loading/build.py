"""Builds mlx-lm's model with lazy parameters, and casts them. Reads no weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx import nn
from mlx.utils import tree_map_with_path

from services.rank_worker.model.loading.source import ModelSource
from services.rank_worker.peers.failure import first_line
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.log import Log

_log = Log("rank_worker.loading")

_CONFIG_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""Errors that mlx-lm raises for a config it does not support."""

ReadFile = Callable[[Path], dict[str, mx.array]]
"""Returns the arrays of a weight file, by name."""


def build_model(
    source: ModelSource, settings: ModelConfig, read_file: ReadFile | None = None
) -> nn.Module:
    """Build mlx-lm's model from its folder, with lazy parameters.

    Args:
        source: the model's folder and config.
        settings: says whether the model's own code may run.
        read_file: returns the arrays of a weight file by name; None: MLX's own lazy loading.

    Raises:
        ConfigError: when the model is not supported, its weights do not fit its config, or its own
            code fails.
    """
    name, folder = source.config["model_type"], source.folder
    own_code = source.config.get("model_file")
    try:
        with _patched_load(read_file):
            model, _ = mlx_lm.utils.load_model(
                folder, lazy=True, trust_remote_code=settings.trust_remote_code
            )
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or not (own_code or isinstance(error, _CONFIG_ERRORS)):
            raise
        text = first_line(error) or type(error).__name__
        _log.debug("model_not_built", error=repr(error))
        if own_code:
            # Such code may raise any exception, for any reason.
            raise ConfigError(
                f"The model in {folder} cannot be built by its own code ({own_code}), or its "
                f"weights do not fit its config: {type(error).__name__}: {text}"
            ) from error
        if "not supported" in text:
            raise ConfigError(
                f'mlx-lm does not support models of type "{name}": use another model, '
                "or a newer mlx-lm."
            ) from error
        raise ConfigError(
            f"The weights in {folder} do not fit its config ({name}): {text}"
        ) from error
    return model


@contextmanager
def _patched_load(read_file: ReadFile | None) -> Iterator[None]:
    """Replace `mx.load` in mlx-lm's loader only."""
    if read_file is None:
        yield
        return
    utils: Any = mlx_lm.utils
    real = utils.mx
    utils.mx = SimpleNamespace(**{**vars(real), "load": lambda path: read_file(Path(path))})
    try:
        yield
    finally:
        utils.mx = real


def cast_dtype(settings: ModelConfig) -> mx.Dtype | None:
    """Return the dtype that weights are cast to; None to keep the dtypes of the files.

    Args:
        settings: `model.dtype`; "auto" means float32 on a CPU and no cast elsewhere.
    """
    if settings.dtype != "auto":
        dtype: mx.Dtype = getattr(mx, settings.dtype)
        return dtype
    # On the CPU only float32 uses BLAS, and some operations exist for no other type.
    return mx.float32 if mx.default_device().type == mx.DeviceType.cpu else None


def cast_parameters(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast a model's floating-point parameters in place.

    Args:
        model: the model; parameters that it keeps in float32 by itself stay so.
        dtype: the new dtype.
    """
    keeps = getattr(model, "cast_predicate", None)

    def cast(path: str, value: Any) -> Any:
        if not isinstance(value, mx.array) or not mx.issubdtype(value.dtype, mx.floating):
            return value
        if dtype != mx.float32 and keeps is not None and not keeps(path):
            return value
        return value.astype(dtype)

    model.update(tree_map_with_path(cast, model.parameters()))
