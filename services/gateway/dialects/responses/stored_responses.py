"""Stored responses, which are documents of this host's cache store. Owns their ids and errors."""

from services.gateway.dialects.responses.item_ids import RESPONSE_PREFIX
from services.gateway.http.errors import ApiError, unavailable, unsupported
from services.gateway.links.document_client import DocumentClient
from shared import limits
from shared.errors import UnavailableError
from shared.log import Log

RETRY_S = 5.0
NAME_CHARS_MAX = 128
"""Longest id of a response."""

_ID_CHARS = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-")
_log = Log("gateway.responses")


class StoredResponses:
    """Keeps, returns and deletes stored responses, each of one owner.

    An owner is that of `authentication.owner`.
    """

    def __init__(self, documents: DocumentClient) -> None:
        """Keep responses in the cache store.

        Args:
            documents: the link to it.
        """
        self._documents = documents

    @property
    def is_on(self) -> bool:
        """Whether the store is connected and its disk usable, so that responses are kept."""
        return self._documents.is_on

    def refusal(self) -> ApiError:
        """Return the error for a request that needs stored responses while no store is there."""
        if not self._documents.has_link:
            problem = "this server keeps no responses; send all items with each request."
            return unsupported("store", problem)
        problem = "The cache store, which keeps responses, is not available: send store false."
        return unavailable(problem, RETRY_S)

    def keep(self, owner: str, response_id: str, document: bytes) -> None:
        """Send a response to the store, without waiting for it to be written.

        A response that cannot be kept is logged: the request itself has succeeded.

        Args:
            owner: the owner.
            response_id: its id.
            document: the response with its input items (`stored_items.document`).
        """
        if not self._documents.keep(owner, response_id, document):
            _log.warning(
                "response_not_stored",
                response_id=response_id,
                size_bytes=len(document),
                size_bytes_max=limits.DOCUMENT_BYTES_MAX,
                has_store=self._documents.is_on,
            )

    async def load(self, owner: str, response_id: str) -> bytes | None:
        """Return the document of a stored response; None if the owner has none with this id.

        Raises:
            ApiError: 503 when the store is away or does not answer.
        """
        if not self._may_exist(response_id):
            return None
        if not self.is_on:
            raise self.refusal()
        try:
            return await self._documents.load(owner, response_id)
        except UnavailableError as error:
            raise unavailable(str(error), RETRY_S) from None

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a stored response; return whether the owner had one with this id.

        Raises:
            ApiError: as `load`.
        """
        if not self._may_exist(response_id):
            return False
        if not self.is_on:
            raise self.refusal()
        try:
            return await self._documents.delete(owner, response_id)
        except UnavailableError as error:
            raise unavailable(str(error), RETRY_S) from None

    def _may_exist(self, response_id: str) -> bool:
        # The owner has documents of other kinds too, which are no responses.
        is_id = response_id.startswith(RESPONSE_PREFIX) and set(response_id) <= _ID_CHARS
        return self._documents.has_link and is_id and len(response_id) <= NAME_CHARS_MAX
