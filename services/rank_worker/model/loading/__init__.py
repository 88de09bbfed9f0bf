"""Loading: a model's config and files become this rank's shard in memory, read in parts.

source.py   where the model is; all that is checked without weights
loader.py   the order of things
build.py    mlx-lm's model, from files or from stand-ins
cast.py     which type weights get
origins.py  where each parameter stands in the files
graph.py    follows MLX's own description of how parameters come about
traced.py   stored numbers, moved and cast
strided.py  how slices, stacks and reshapes move numbers
fit.py      refuses a shard that the device has no memory for
reads.py    which bytes are read at once
reader.py   reads them
fill.py     gives the model its weights
"""

from services.rank_worker.model.loading.fit import Needs, check_fits, memory_of
from services.rank_worker.model.loading.loader import (
    LoadedModel,
    OpenedModel,
    Report,
    Stage,
    load,
    open_model,
)
from services.rank_worker.model.loading.source import Source, find

__all__ = [
    "LoadedModel",
    "Needs",
    "OpenedModel",
    "Report",
    "Source",
    "Stage",
    "check_fits",
    "find",
    "load",
    "memory_of",
    "open_model",
]
