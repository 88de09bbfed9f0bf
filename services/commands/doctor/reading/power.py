"""Energy settings: `pmset -g` of macOS."""

import re

_SETTING = re.compile(r"^\s*([A-Za-z]\w*)\s+(\d{1,6})\b(.*)$")


def read_power(text: str) -> dict[str, int]:
    """Return the settings that are in use now; {} when there are none to be seen."""
    return {match[1]: int(match[2]) for match in map(_SETTING.match, text.splitlines()) if match}
