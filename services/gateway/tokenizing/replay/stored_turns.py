"""Turns as documents of this host's cache store. Owns their form, not their place in memory.

So sessions go on from the cache after a restart of the gateway, and in other gateways of the host.
"""

import array
import asyncio
import hashlib

import msgspec

from services.gateway.links.document_client import DocumentClient
from services.gateway.tokenizing.replay.turns import PromptPlace, Turn
from shared.errors import UnavailableError
from shared.log import Log

LOAD_S_MAX = 1.0
"""Longest wait for the turns of one conversation; others are read as the client sent them."""
LOADED_TURNS_MAX = 512
"""Most turns of one conversation that are read."""

_log = Log("gateway.turns")


class _Document(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fields of a turn as they are stored."""

    chars: int
    digest: bytes
    ids: bytes
    stop: str
    text: str
    reasoning: str
    calls: list[tuple[str, str, str]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


class StoredTurns:
    """Writes turns to the cache store and reads them back."""

    def __init__(self, documents: DocumentClient, tokenizer: bytes) -> None:
        """Prepare to read and write.

        Args:
            documents: the link to the store.
            tokenizer: digest of the tokenizer, whose ids mean nothing to another one.
        """
        self._documents = documents
        self._tokenizer = tokenizer

    @property
    def is_on(self) -> bool:
        """Whether the store is connected and its disk usable."""
        return self._documents.is_on

    async def load(self, tenant: str, keys: list[bytes]) -> dict[bytes, Turn | None]:
        """Return turns by their keys, as far as the store answers in time; None is not stored.

        Args:
            tenant: whose turns they are.
            keys: their keys in the memory.
        """
        found: dict[bytes, Turn | None] = {}

        async def load_one(key: bytes) -> None:
            data = await self._documents.load(tenant, self._name(key))
            found[key] = None if data is None else _read(data)

        reads = [load_one(key) for key in keys[-LOADED_TURNS_MAX:]]
        try:
            async with asyncio.timeout(LOAD_S_MAX):
                await asyncio.gather(*reads)
        except (TimeoutError, UnavailableError) as error:
            _log.warning("turns_not_read", wanted=len(reads), detail=str(error))
        return found

    def keep(self, tenant: str, key: bytes, turn: Turn) -> None:
        """Send a turn to the store, if it is there, without waiting for it to be written.

        Args:
            tenant: whose turn it is.
            key: its key in the memory.
            turn: the turn.
        """
        if not self.is_on:
            return
        document = _Document(
            turn.place.chars,
            turn.place.digest,
            turn.ids.tobytes(),
            turn.stop,
            turn.text,
            turn.reasoning,
            list(turn.calls),
        )
        # Without the store only time is lost.
        self._documents.keep(tenant, self._name(key), _encoder.encode(document))

    def _name(self, key: bytes) -> str:
        return f"turn_{hashlib.blake2b(self._tokenizer + key, digest_size=24).hexdigest()}"


def _read(data: bytes) -> Turn | None:
    """Return the turn of a document, None if another version of this program wrote it."""
    try:
        found = _decoder.decode(data)
        ids = array.array("i")
        ids.frombytes(found.ids)
    except (msgspec.DecodeError, ValueError):
        return None
    return Turn(
        PromptPlace(found.chars, found.digest),
        ids,
        found.stop,
        found.text,
        found.reasoning,
        tuple(found.calls),
    )
