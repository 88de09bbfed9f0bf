"""Downloads a model's files from the Hugging Face hub and reports progress. No MLX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

from shared.errors import ConfigError
from shared.model.checkpoint_files import WEIGHT_PATTERN
from shared.model.hub import fetch

PATTERNS = (
    "*.json",
    WEIGHT_PATTERN,
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
"""Files that mlx-lm loads, without Python code."""


def download(name: str, report: Callable[[float], None], *, code: bool = False) -> Path:
    """Download a model and return its folder; ranks of one host share one download.

    Args:
        name: Hugging Face id.
        report: called with the fraction of bytes downloaded, 0 to 1.
        code: also download the Python files of the repository.

    Raises:
        ConfigError: when there is no such model, access is denied, or it has no config.json.
        UnavailableError: when the hub does not answer and the model is not in the cache.
    """
    patterns = (*PATTERNS, "*.py") if code else PATTERNS
    folder = fetch(name, patterns, _progress_class(report))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"The repository {name} has no config.json, so it is not a model.")
    return folder


def _progress_class(report: Callable[[float], None]) -> type[Any]:
    class Progress(tqdm):
        """A progress bar that also reports the fraction of bytes downloaded."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Counted here, because a disabled bar does not count.
            self._counts_bytes = kwargs.get("unit") == "B"
            self._done = float(kwargs.get("initial") or 0)
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> Any:
            self._done += n or 0
            if self._counts_bytes and self.total:
                report(min(1.0, self._done / self.total))
            return super().update(n)

    return Progress
