"""The last prompts that the cache did not have, by tenant. Owns their number and their texts."""

import dataclasses
import functools
from collections import OrderedDict, deque
from typing import Any

from services.gateway.completion.generation import Choice
from services.gateway.http import cache_header
from services.gateway.tokenizing.replay.turns import DecodeTokens
from shared.clock import unix_time_s
from shared.messages import CachedPrefix

MISSES_KEPT = 16
"""Misses of a tenant."""
TENANTS_MAX = 256
"""Tenants with misses; beyond it the one that has been quiet longest is forgotten."""


@dataclasses.dataclass(frozen=True)
class CacheMiss:
    """A prompt of which a part was computed, and why. Holds few tokens, no whole prompt."""

    request_id: str
    at_s: float
    """When it was admitted, in seconds since 1970."""
    prompt_tokens: int
    cached: CachedPrefix
    ids: tuple[list[int], list[int]] | None
    """Token ids before and after the place where it diverged; None without one."""
    decode: DecodeTokens | None
    """Makes text of token ids; None: no text is reported."""

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """The miss as fields of a JSON object. Its text is decoded when it is first needed."""
        texts = cache_header.texts_at_divergence(self.ids, self.decode)
        fields = cache_header.body_fields(self.cached, self.prompt_tokens, texts)
        return {"request_id": self.request_id, "at_s": self.at_s, **(fields or {})}


class CacheMisses:
    """The last misses of each tenant, bounded in number."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[CacheMiss]] = OrderedDict()

    def note(self, choice: Choice) -> None:
        """Note the cache lookup of a choice that was admitted, if a part was missing."""
        cached, generation = choice.cached, choice.generation
        if cached is None or cached.miss in ("", "off") or choice.index:
            return
        miss = CacheMiss(
            request_id=choice.request_id,
            at_s=unix_time_s(),
            prompt_tokens=choice.submit_request.prompt_tokens,
            cached=cached,
            ids=cache_header.ids_at_divergence(generation.prompts[0].ids, cached),
            decode=generation.decode,
        )
        misses = self._by_tenant.setdefault(generation.tenant, deque(maxlen=MISSES_KEPT))
        misses.append(miss)
        self._by_tenant.move_to_end(generation.tenant)
        if len(self._by_tenant) > TENANTS_MAX:
            self._by_tenant.popitem(last=False)

    def of(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return the last misses, the newest first, as fields of JSON objects.

        Args:
            tenant: the tenant whose misses they are; None: of all.
        """
        if tenant is not None:
            found = list(self._by_tenant.get(tenant, ()))
        else:
            found = [one for misses in self._by_tenant.values() for one in misses]
        newest = sorted(found, key=lambda one: -one.at_s)[:MISSES_KEPT]
        return [one.description for one in newest]
