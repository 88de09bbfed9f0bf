"""How a model is split over ranks. Said from its config alone first, then done to the model.

    split.py          which part a rank holds
    possible.py       whether a model can be split so, and what can be done instead
    families.py       what mlx-lm's source says about a model type
    divides.py        heads and widths
    shares.py         how many experts or layers each rank gets
    apply.py          does it to a model
    expert.py         finds the layers of routed experts and divides them
    local_experts.py  runs those of this rank; says which forwards wait for the device
    pipeline.py       divides layers

Importing this package imports no MLX: only the last four files do.
"""

from services.rank_worker.model.sharding.divides import check_divides
from services.rank_worker.model.sharding.possible import check_possible, obstacle, possible_sizes
from services.rank_worker.model.sharding.split import Split

__all__ = ["Split", "check_divides", "check_possible", "obstacle", "possible_sizes"]
