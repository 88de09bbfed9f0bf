"""How a model is split over ranks. Said from its config alone first, then done to the model.

Importing this package imports no MLX.
"""

from services.rank_worker.sharding.divides import check_divides
from services.rank_worker.sharding.split import Split

__all__ = ["Split", "check_divides"]
