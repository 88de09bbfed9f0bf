"""Builds mlx-lm's model from a folder, from the files' own arrays or from others in their place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx import nn

from services.rank_worker.failure import first_line
from services.rank_worker.model.loading.source import Source
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.log import Log

_log = Log("rank_worker.loading")

_REFUSALS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What mlx-lm raises for a config that it cannot follow."""

Weights = dict[str, mx.array]
ReadFile = Callable[[Path], Weights]


def build(source: Source, settings: ModelConfig, read_file: ReadFile | None = None) -> nn.Module:
    """Build the model with weights that are not read yet.

    Args:
        source: where it is.
        settings: whether its own code may run.
        read_file: gives a weight file's arrays; None: MLX opens it and reads what is evaluated.

    Raises:
        ConfigError: the model is not supported, its weights do not fit its config, or its own code
            fails.
    """
    name, folder = source.config["model_type"], source.folder
    own_code = source.config.get("model_file")
    try:
        with _files_read_by(read_file):
            model, _ = mlx_lm.utils.load_model(
                folder, lazy=True, trust_remote_code=settings.trust_remote_code
            )
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or not (own_code or isinstance(error, _REFUSALS)):
            raise
        text = first_line(error) or type(error).__name__
        _log.debug("model_not_built", error=repr(error))
        if own_code:
            # It may raise whatever it likes.
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


class _OtherLoad:
    """MLX as `mlx_lm.utils` sees it, with another `load`."""

    def __init__(self, real: Any, read_file: ReadFile) -> None:
        self._real = real
        self._read_file = read_file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, path: str) -> Weights:
        """Return the arrays of a weight file."""
        return self._read_file(Path(path))


@contextmanager
def _files_read_by(read_file: ReadFile | None) -> Iterator[None]:
    if read_file is None:
        yield
        return
    utils: Any = mlx_lm.utils
    real = utils.mx
    utils.mx = _OtherLoad(real, read_file)
    try:
        yield
    finally:
        utils.mx = real
