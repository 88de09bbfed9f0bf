"""Fetching files of a model from Hugging Face's hub; what goes wrong is one sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, UnavailableError


def fetch(name: str, patterns: Sequence[str], progress: type[Any] | None = None) -> Path:
    """Return the folder with a hub model's files; processes of one host share one download.

    Args:
        name: Hugging Face id.
        patterns: which files.
        progress: a class of tqdm's kind that shows how far the download is; None: the client's own.

    Raises:
        ConfigError: there is no such model, or it may not be read.
        UnavailableError: the hub does not answer and the model is not in the cache.
    """
    import huggingface_hub  # noqa: PLC0415 - slow, and only a model from the hub needs it
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(patterns), tqdm_class=progress
        )
    except errors.GatedRepoError:
        raise ConfigError(
            f"The model {name} is gated: accept its terms on the hub, then run `hf auth login`."
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ConfigError(
            f"Hugging Face's hub knows no model {name}, or it is private: check model.path, "
            "and log in with `hf auth login` if it is yours."
        ) from None
    except errors.LocalEntryNotFoundError:
        raise UnavailableError(
            f"The model {name} is not on this machine, and the hub does not answer."
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise UnavailableError(f"Downloading {name} failed: {error}."[:1_000]) from None
    return Path(folder)
