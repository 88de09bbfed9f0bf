"""Reasoning effort as arguments of chat templates. Owns the names that templates know."""

from typing import Any

EFFORTS = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""The efforts of all dialects, each with the nearest one that most templates know."""


def thinking_arguments(*, is_on: bool) -> dict[str, Any]:
    """Return the template arguments that switch a model's reasoning on or off."""
    # Qwen, GLM and others read the first name, DeepSeek and Granite the second.
    return {"enable_thinking": is_on, "thinking": is_on}


def is_unknown(effort: str | None) -> bool:
    """Return whether an effort was given that has no effect."""
    return effort is not None and effort not in EFFORTS


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Return the template arguments for a reasoning effort.

    Args:
        effort: one of `EFFORTS`; None and others, which clients invent, are the template's default.
    """
    if effort is None or is_unknown(effort):
        return {}
    if effort == "none":
        return thinking_arguments(is_on=False)
    return {"reasoning_effort": EFFORTS[effort]}
