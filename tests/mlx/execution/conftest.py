"""Forwards of prefills, recorded while they run."""

from typing import Any

import mlx.core as mx
import pytest

from services.rank_worker.model.forward import Forward


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of widths of all prefill forwards; it grows as they run."""
    found: list[int] = []

    def noting(name: str) -> None:
        real = getattr(Forward, name)

        def recorded(forward: Forward, tokens: mx.array, *rest: Any) -> Any:
            found.append(tokens.shape[1])
            return real(forward, tokens, *rest)

        monkeypatch.setattr(Forward, name, recorded)

    for name in ("fill_caches", "last_logits", "row_end_logits", "selected_logits"):
        noting(name)
    return found
