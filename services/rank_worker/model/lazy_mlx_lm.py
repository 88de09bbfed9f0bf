"""Imports mlx-lm without transformers, because a rank uses no tokenizer.

mlx-lm imports transformers for its tokenizers, and transformers scans its 3,000 source files twice.
That would be more than half of a rank's import time, at every start and after every failure.
"""

import sys
from types import ModuleType
from typing import Any

from shared.log import Log

_log = Log("rank_worker")

_NAMES = ("transformers", "transformers.tokenization_utils_base")


class _Placeholder(ModuleType):
    """A module in which every name is an empty class, enough for base classes and annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"register": staticmethod(lambda *_, **__: None)})


def import_mlx_lm() -> None:
    """Import `mlx_lm` with a placeholder for transformers; later imports get the real package.

    The tokenizers of this `mlx_lm` do not work in this process. If a version of mlx-lm needs more
    than the placeholder has, nothing is imported here, and the next import is an ordinary one.
    """
    if {"transformers", "mlx_lm"} & set(sys.modules):
        return
    sys.modules.update({name: _Placeholder(name) for name in _NAMES})
    try:
        import mlx_lm  # noqa: F401, PLC0415
    except Exception as error:  # noqa: BLE001 - any error: import it the ordinary way
        _log.warning("mlx_lm_placeholder_failed", cause=repr(error))
        for name in [one for one in sys.modules if one.partition(".")[0] == "mlx_lm"]:
            del sys.modules[name]
    finally:
        for name in _NAMES:
            del sys.modules[name]
