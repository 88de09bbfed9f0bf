"""Checks of conversations, the same in every dialect."""

import pytest

from services.gateway.conversation.conversation import Conversation, Tool, ToolChoice
from services.gateway.http.errors import ApiError


@pytest.mark.parametrize(
    ("tools", "deferred", "choice", "param"),
    [
        (["a", "a"], [], ToolChoice(), "tools"),
        (["a"], ["a"], ToolChoice("none"), "tools"),
        ([], [], ToolChoice("required"), "tool_choice"),
        (["a"], [], ToolChoice("named", "b"), "tool_choice"),
    ],
    ids=["same name", "same name deferred", "required without tools", "unknown name"],
)
def test_tools_that_cannot_be_told_apart_or_chosen_are_refused_by_their_field(
    tools: list[str], deferred: list[str], choice: ToolChoice, param: str
) -> None:
    """A call must mean one tool, and a demanded call needs a tool."""
    conversation = Conversation(
        [], list(map(Tool, tools)), choice, deferred_tools=list(map(Tool, deferred))
    )
    with pytest.raises(ApiError) as refused:
        conversation.check_tools()
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "choice", [ToolChoice(), ToolChoice("required"), ToolChoice("named", "later")]
)
def test_tools_of_different_names_are_accepted(choice: ToolChoice) -> None:
    """A deferred tool may be demanded too."""
    Conversation([], [Tool("a")], choice, deferred_tools=[Tool("later")]).check_tools()
