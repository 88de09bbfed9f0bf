"""Names of the served model. Owns which names requests may use."""

import fnmatch

from services.gateway.http.errors import ApiError
from shared.configuration.settings import Config

NAME_CHARS_MAX = 256
"""Longest name of a model in a request; every event of its answer repeats the name."""

_PATTERN = frozenset("*?[")


class ModelNames:
    """The served model's name and its aliases."""

    def __init__(self, config: Config) -> None:
        self.served = config.served_name
        """Name of the model as `model.served_name` says."""
        self._aliases = config.model.aliases
        self._serves_any = config.gateway.unknown_model == "serve"

    @property
    def listed(self) -> list[str]:
        """The served name and the aliases that are no patterns, without duplicates."""
        names = [name for name in self._aliases if not _PATTERN & set(name)]
        return list(dict.fromkeys([self.served, *names]))

    @property
    def are_fixed(self) -> bool:
        """Whether requests may use the listed names only."""
        has_patterns = any(_PATTERN & set(name) for name in self._aliases)
        return not (self._serves_any or has_patterns)

    def check(self, name: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404 when the name is not the served model's, an alias of it, or any name where
                `gateway.unknown_model` is "serve".
        """
        is_known = name == self.served or any(
            fnmatch.fnmatchcase(name, alias) for alias in self._aliases
        )
        if len(name) <= NAME_CHARS_MAX and (is_known or (self._serves_any and name)):
            return
        shown = name if len(name) <= 100 else name[:100] + "..."
        raise ApiError(
            404,
            f"The model {shown} does not exist; this server serves {self.served}.",
            param="model",
            code="model_not_found",
        )
