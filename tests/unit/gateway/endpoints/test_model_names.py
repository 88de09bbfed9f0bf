"""Names under which requests may ask for the served model."""

from typing import Any

import pytest

from services.gateway.endpoints.model_names import NAME_CHARS_MAX, ModelNames
from services.gateway.http.errors import ApiError
from shared.configuration.loading import config_from_tree


def _names(**gateway: Any) -> ModelNames:
    aliases = ["gpt-5", "claude-*", "qwen?", "gpt-5"]
    tree = {"model": {"served_name": "tiny", "aliases": aliases}, "gateway": gateway}
    return ModelNames(config_from_tree(tree, has_api_keys=False))


@pytest.mark.parametrize("name", ["tiny", "gpt-5", "claude-", "claude-opus-9", "qwen3"])
def test_served_name_and_aliases_are_accepted(name: str) -> None:
    """Names match whole, patterns match as in a shell."""
    _names().check(name)


@pytest.mark.parametrize(
    "name", ["", "TINY", "gpt-5x", "Claude-x", "qwen33", "claude-" + "x" * NAME_CHARS_MAX]
)
def test_other_names_are_refused_with_the_served_name(name: str) -> None:
    """Upper and lower case differ, and long names are refused even if they match."""
    with pytest.raises(ApiError) as caught:
        _names().check(name)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "tiny" in caught.value.message
    assert len(caught.value.message) < 300


def test_every_short_name_is_accepted_where_the_operator_serves_unknown_models() -> None:
    """With unknown_model = "serve" only empty and very long names are refused."""
    names = _names(unknown_model="serve")
    names.check("anything/else")
    for name in ("", "x" * (NAME_CHARS_MAX + 1)):
        with pytest.raises(ApiError):
            names.check(name)
    assert not names.are_fixed


def test_list_has_names_only() -> None:
    """Patterns are no names that a client could ask for."""
    assert _names().listed == ["tiny", "gpt-5"]
    assert not _names().are_fixed
    tree = {"model": {"served_name": "tiny", "aliases": ["gpt-5"]}}
    assert ModelNames(config_from_tree(tree, has_api_keys=False)).are_fixed
