"""Paths of modules in mlx-lm's families: which belong to a decoder layer, and which to no text."""

import re

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)$")
"""Path of a decoder layer in mlx-lm's families."""
OTHER_MODEL = re.compile(r"vision|visual|audio|mtp")
"""Paths of models that answer no text: their layers are never called in a step."""

_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+(?:\.|$)")


def is_in_layer(path: str) -> bool:
    """Tell whether a path is that of a decoder layer or of a module in it."""
    return _IN_LAYER.search(path) is not None
