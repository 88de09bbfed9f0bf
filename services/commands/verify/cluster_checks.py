"""Checks that end nothing. Owns the requests of each check; `judging` owns the verdicts."""

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.commands.verify import judging
from services.commands.verify.gateway import Gateway, HttpAnswer
from services.commands.verify.judging import TimedCheck
from services.supervisor.status.service_queries import ask_status
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.messages import StatusReported

PROMPTS = (
    "The three primary colours are",
    "Once upon a time there was",
    "In 1969 people first",
    "import os\nimport sys\n\ndef main():",
)
"""Prompts of different lengths, so that their rows in a batch differ."""

TEXT_TOKENS = 24
"""Length of compared completions, in tokens."""

ABORT_TOKENS = 4_000
"""Most tokens of the request whose client closes the connection: more than it can receive."""
ABORT_EVENTS = 3
"""Events of the stream that this client reads before it closes the connection."""
ABORT_ROOM = 64
"""Least room for this request in tokens; with less the check is skipped."""
POLL_S = 0.05
"""Seconds between two questions to the scheduler."""

Check = Callable[[], TimedCheck]
"""Makes one check and returns its result."""


class VerifiedCluster:
    """The cluster that `lockstep verify` checks: its settings, gateway and scheduler.

    Args:
        config: settings of this host.
        gateway: client of the gateway under check.
    """

    def __init__(self, config: Config, gateway: Gateway) -> None:
        self.config = config
        self.gateway = gateway
        self._salt = secrets.token_hex(8)
        self._salts = 0

    def status(self) -> StatusReported:
        """Ask the scheduler for its status. Raises: UnavailableError: it does not answer."""
        return ask_status(self.config)

    def fresh_salt(self) -> str:
        """Return a cache salt that no request has used, so that its request reuses no blocks."""
        self._salts += 1
        return f"verify-{self._salt}-{self._salts}"

    def complete(self, prompt: str) -> HttpAnswer:
        """Complete a prompt greedily with TEXT_TOKENS tokens at most, without cached blocks.

        Raises:
            NoAnswer: when the gateway refuses the request or does not complete it.
        """
        return self.gateway.complete(
            prompt=prompt, max_tokens=TEXT_TOKENS, cache_salt=self.fresh_salt()
        )


class ClusterChecks:
    """Checks of a cluster that end no process.

    Later checks use the answers of earlier ones, and send the requests anew if those were not made.
    """

    def __init__(self, cluster: VerifiedCluster) -> None:
        self._cluster = cluster
        self._before: StatusReported | None = None
        self._first: HttpAnswer | None = None
        self._tokens = 0
        """Tokens of requests that ran one after the other, so each needed a step."""

    def by_name(self) -> list[tuple[str, Check]]:
        """Return the name and the function of each check but `ready`, in the order to run them."""
        return [
            (judging.CANARY, self._canary),
            (judging.ONE, self._one),
            (judging.AGAIN, self._again),
            (judging.TOGETHER, self._together),
            (judging.ABORT, self._abort),
            (judging.RANKS, self._took_part),
        ]

    def ready(self) -> TimedCheck:
        """Check that the gateway's /livez and /readyz are 200.

        Raises:
            NoAnswer: when the gateway does not answer.
        """
        alive, _ = self._cluster.gateway.get("/livez")
        code, body = self._cluster.gateway.get("/readyz")
        reason = ""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            reason = str(json.loads(body)["reason"])
        return judging.ready(is_alive=alive == 200, code=code, reason=reason)

    def _canary(self) -> TimedCheck:
        return judging.canary(self._state_before())

    def _one(self) -> TimedCheck:
        self._state_before()
        self._first = self._alone(PROMPTS[0])
        return judging.one_request(self._first)

    def _again(self) -> TimedCheck:
        others = self._cluster.status().running
        first = self._first or self._alone(PROMPTS[0])
        return judging.same_again(first, self._alone(PROMPTS[0]), others)

    def _together(self) -> TimedCheck:
        alone = [self._alone(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            at_once = list(pool.map(self._cluster.complete, PROMPTS))
        return judging.together(alone, at_once)

    def _abort(self) -> TimedCheck:
        """Close a stream early and measure how soon its slot is free."""
        cluster, clock = self._cluster, SystemClock()
        before = cluster.status()
        room = before.context_tokens_max // 2
        if room < ABORT_ROOM:
            detail = f"a context of {before.context_tokens_max} tokens is too short to hang up in"
            return judging.skipped(judging.ABORT, detail)
        # At this temperature all tokens are almost equally likely, so the text does not end early.
        fields = {
            "prompt": PROMPTS[1],
            "max_tokens": min(ABORT_TOKENS, room),
            "temperature": 100.0,
        }
        with cluster.gateway.started(**fields) as events:
            for _ in range(ABORT_EVENTS):
                next(events, None)
            was_running = cluster.status().running > before.running
            began_s = clock.now()
        if not was_running:
            detail = "the request ended before its client could hang up: run this again"
            return judging.skipped(judging.ABORT, detail)
        while (passed_s := clock.now() - began_s) <= judging.ABORT_S:
            if cluster.status().running <= before.running:
                return judging.aborted(passed_s, ABORT_EVENTS)
            time.sleep(POLL_S)
        return judging.aborted(None, ABORT_EVENTS)

    def _took_part(self) -> TimedCheck:
        return judging.took_part(self._state_before(), self._cluster.status(), self._tokens)

    def _state_before(self) -> StatusReported:
        if self._before is None:
            self._before = self._cluster.status()
        return self._before

    def _alone(self, prompt: str) -> HttpAnswer:
        answer = self._cluster.complete(prompt)
        self._tokens += answer.completion_tokens
        return answer
