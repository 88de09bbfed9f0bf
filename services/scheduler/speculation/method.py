"""The methods by which drafts are proposed."""

from typing import Literal, TypeGuard

Method = Literal["ngram", "draft_model", "eagle"]
Model = Literal["draft_model", "eagle"]
"""Those whose drafts the ranks propose themselves, in the step that verifies them."""


def is_model(method: str) -> TypeGuard[Model]:
    """Tell whether drafts of this method are proposed by the ranks."""
    return method in ("draft_model", "eagle")
