"""Imports mlx-lm without transformers: what a rank needs of mlx-lm needs no tokenizer.

mlx-lm imports transformers for its tokenizers, and transformers reads its 3,000 source files to
learn what each defines, twice. That is more than half of what a rank would import, and every start
waits for it: the first one, and the one after each fault.
"""

import sys
from types import ModuleType
from typing import Any

from shared.log import Log

_log = Log("rank_worker")

_NAMES = ("transformers", "transformers.tokenization_utils_base")


class _Placeholder(ModuleType):
    """A module in which every name is an empty class: to derive from, to register, to annotate."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"register": staticmethod(_nothing)})


def import_mlx_lm() -> None:
    """Import `mlx_lm`; whoever imports transformers afterwards gets the real one.

    The tokenizers of an `mlx_lm` imported so cannot be used in this process. When another version
    of mlx-lm asks for more than a placeholder has, all is imported as usual, later and by others.
    """
    if {"transformers", "mlx_lm"} & set(sys.modules):
        return
    sys.modules.update({name: _Placeholder(name) for name in _NAMES})
    try:
        import mlx_lm  # noqa: F401, PLC0415
    except Exception as error:  # noqa: BLE001 - whatever it is, the usual import is the answer
        _log.warning("mlx_lm_imported_as_usual", cause=repr(error))
        for name in [one for one in sys.modules if one.partition(".")[0] == "mlx_lm"]:
            del sys.modules[name]
    finally:
        for name in _NAMES:
            del sys.modules[name]


def _nothing(*_: object, **__: object) -> None:
    """Register nothing."""
