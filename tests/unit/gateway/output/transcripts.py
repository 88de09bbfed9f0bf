"""All golden transcripts by name."""

from tests.unit.gateway.output.json_transcripts import HEADERS, HERMES
from tests.unit.gateway.output.mention_transcripts import MENTIONS
from tests.unit.gateway.output.other_transcripts import BARE, OTHERS
from tests.unit.gateway.output.reasoning_transcripts import HARMONY, THINKING
from tests.unit.gateway.output.tagged_transcripts import TAGGED

ALL = {
    f"{one.tool_format}, {one.reasoning_format}: {one.name}": one
    for group in (HERMES, TAGGED, HEADERS, BARE, OTHERS, HARMONY, THINKING, MENTIONS)
    for one in group
}
