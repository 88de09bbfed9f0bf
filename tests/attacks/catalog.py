"""All attacks. Owns their order; has none itself."""

from tests.attacks import bodies, connections, conversations, documents, grammars

ATTACKS = [
    *connections.ATTACKS,
    *bodies.ATTACKS,
    *conversations.ATTACKS,
    *grammars.ATTACKS,
    *documents.ATTACKS,
]
"""In the order in which they run. The names are different."""
