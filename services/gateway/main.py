"""Entry point of the gateway. Owns its start, signals and drain; wires all parts together."""

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import sys

from aiohttp import web

from services.gateway import app
from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.streaming import FlushList
from services.gateway.dialects.responses.stored_responses import StoredResponses
from services.gateway.endpoints.completion_service import CompletionService
from services.gateway.endpoints.model_names import ModelNames
from services.gateway.endpoints.page import endpoints as page
from services.gateway.endpoints.page.assets import load_assets
from services.gateway.endpoints.page.feed import Feed
from services.gateway.endpoints.request_threads import RequestThreads
from services.gateway.http import connection_limits
from services.gateway.http.admission import AdmissionControl
from services.gateway.http.api_keys import ApiKeys
from services.gateway.http.authentication import Authenticator
from services.gateway.http.cors import OriginPolicy
from services.gateway.http.server import GuardedRunner, raise_descriptor_limit
from services.gateway.links.document_client import DocumentClient
from services.gateway.links.scheduler_client import SchedulerClient
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.structured.answer_grammar import AnswerGrammars
from services.gateway.tokenizing import tokenizer
from services.gateway.tokenizing.replay.stored_turns import StoredTurns
from services.gateway.tokenizing.replay.turns import TurnMemory
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tracing.span_export import SpanExport, open_export
from services.gateway.tracing.tracing import Tracing
from shared import limits, log
from shared.clock import Clock, SystemClock, unix_seconds
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.configuration.settings import Config, GatewayConfig
from shared.errors import ConfigError, LockstepError
from shared.os import lifeline
from shared.tenants.fair_share import FairShare

ENCODER_THREADS = 3
"""Threads that encode prompts. One tenant gets at most two; more would starve the event loop on
small machines."""
GRAMMAR_THREADS = 2
"""Threads that make and check grammars. One tenant gets at most one."""
LISTEN_BACKLOG = 1_024
"""Connections waiting to be accepted. Linux caps it at net.core.somaxconn."""
SWITCH_INTERVAL_S = 0.001
"""Time after which a thread that renders a template yields the interpreter to the event loop."""
GARBAGE_THRESHOLD = 50_000
"""Allocations between two garbage collections; the hot path makes no reference cycles."""

ABORT_GRACE_S = 1.0
"""Time in which unfinished requests get their error after a drain."""

_DRAIN_POLL_S = 0.02

_log = log.Log("gateway")


def run(config: Config) -> int:
    """Serve HTTP until SIGINT or SIGTERM.

    Returns:
        The exit code: 0 after a clean stop, 69 when requests were aborted, 78 when a setting is not
        valid.
    """
    lifeline.exit_with_parent()
    log.set_up("gateway", config.log, config.log_directory)
    try:
        keys = ApiKeys(config.gateway, os.environ.get(API_KEYS_VARIABLE, ""), SystemClock())
        export = open_export(config.gateway)
        loaded = tokenizer.load(config.model, _log.info)
        return asyncio.run(_serve(config, loaded, keys, export))
    except LockstepError as error:
        _log.error(str(error))
        return error.exit_code


def build_service(
    config: Config,
    loaded: Tokenizer,
    keys: ApiKeys,
    clock: Clock,
    page_paths: frozenset[str] = frozenset(),
    export: SpanExport | None = None,
) -> CompletionService:
    """Create the parts that all HTTP handlers share and start the link to the scheduler.

    Must be called inside the event loop.

    Args:
        config: the settings.
        loaded: the model's tokenizer.
        keys: the valid API keys.
        clock: source of time.
        page_paths: paths of the page's files, which need no API key.
        export: makes spans of requests; None: none are exported.
    """
    status = StatusBoard(clock)
    documents = DocumentClient(config)
    stored_turns = StoredTurns(documents, loaded.digest())
    turns = TurnMemory(config.gateway.replay_bytes_max, stored_turns.keep)
    flush_list = FlushList()
    metrics = GatewayMetrics(status)
    link = SchedulerClient(
        config.gateway_address, config.keys_dir, silence_s=config.scheduler.silence_s
    )
    call_later = asyncio.get_running_loop().call_later
    tracing = Tracing(link, clock, export)
    open_requests = OpenRequests(link, call_later, clock, status, metrics, flush_list, tracing)
    link.start(open_requests.handle)
    return CompletionService(
        config=config,
        tokenizer=loaded,
        status=status,
        metrics=metrics,
        open_requests=open_requests,
        flush_list=flush_list,
        decoders=RequestThreads("decoder", 1, _waiting(config)),
        encoders=RequestThreads("encoder", ENCODER_THREADS, _waiting(config)),
        grammar_checkers=RequestThreads("grammar", GRAMMAR_THREADS, _waiting(config)),
        authenticator=Authenticator(config.gateway, keys, clock, page_paths),
        origin_policy=OriginPolicy(config.gateway),
        admission=AdmissionControl(config.gateway.open_requests_max, config.tenants.share, status),
        grammars=AnswerGrammars(
            loaded.added_tokens(is_flagged=True),
            loaded.added_tokens(),
            loaded.output_format,
            loaded.stop_ids,
            can_match=loaded.ranks_can_read,
        ),
        started_unix_s=unix_seconds(),
        turns=turns,
        documents=documents,
        stored_turns=stored_turns,
        model_names=ModelNames(config),
        tracing=tracing,
    )


def bind(host: str, port: int, setting: str) -> socket.socket:
    """Return a socket that listens on an address.

    Args:
        host: the host or address.
        port: the port.
        setting: name of the port's setting, for errors.

    Raises:
        ConfigError: when the port is taken, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets may bind one port with SO_REUSEADDR; only one may listen.
        listener.listen(LISTEN_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        if isinstance(error, (socket.gaierror, UnicodeError)):
            cause = "gateway.host is not an address and no name that resolves"
        elif error.errno == errno.EADDRINUSE:
            cause = f"another program uses the port; set {setting}"
        else:
            cause = str(error.strerror)
        raise ConfigError(f"Cannot listen on {host}:{port}: {cause}.") from None
    connection_limits.limit_send_buffers(listener)
    return listener


def _bind_all(config: GatewayConfig) -> list[socket.socket]:
    """Return the sockets of the API and, if it has a port of its own, of the page."""
    listeners = [bind(config.host, config.port, "gateway.port")]
    if config.dashboard and config.dashboard_port not in (0, config.port):
        listeners.append(bind(config.host, config.dashboard_port, "gateway.dashboard_port"))
    return listeners


def _waiting(config: Config) -> FairShare:
    """Return the bound on work that waits for a thread: every request has one piece at a time."""
    return FairShare(config.gateway.open_requests_max, config.tenants.share)


async def _serve(
    config: Config, loaded: Tokenizer, keys: ApiKeys, export: SpanExport | None
) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    forced = asyncio.Event()

    def on_signal() -> None:
        (forced if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    listeners = _bind_all(config.gateway)
    connections_max = connection_limits.connections_max(raise_descriptor_limit())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    assets, clock = load_assets(config.gateway.dashboard), SystemClock()
    service = build_service(config, loaded, keys, clock, frozenset(assets), export)
    stored_responses = StoredResponses(service.documents)
    connections = FairShare(connections_max, config.tenants.share)
    application = app.build(service, stored_responses)
    feed = Feed(service.open_requests, service.status, service.metrics, clock)
    page.add_routes(application, config.gateway, assets, feed)
    runner = GuardedRunner(application, config.gateway, connections)
    try:
        service.documents.start()
        await runner.setup()
        for listener in listeners:
            await web.SockSite(runner, listener, backlog=connection_limits.ACCEPTS_PER_TURN).start()
            # asyncio has set its backlog, which limits the accepts of one turn; set ours again.
            listener.listen(LISTEN_BACKLOG)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        _log.info("gateway_listening", address=config.gateway.host, port=config.gateway.port)
        await stopping.wait()
        aborted = await _drain(config, service, runner, forced)
    finally:
        await runner.cleanup()
        service.open_requests.close_link()
        service.documents.close()
        service.decoders.shutdown()
        service.encoders.shutdown()
        service.grammar_checkers.shutdown()
        service.grammars.close()
        if export is not None:
            export.close()
    return limits.EXIT_UNAVAILABLE if aborted else limits.EXIT_OK


async def _drain(
    config: Config, service: CompletionService, runner: GuardedRunner, forced: asyncio.Event
) -> int:
    """Refuse new requests until all others are answered; return how many had to be aborted."""
    service.status.is_draining = True
    _log.info("gateway_draining", open=service.admission.unanswered)
    await _until_answered(service, runner, config.scheduler.drain_s, forced)
    aborted = service.admission.unanswered
    service.open_requests.fail_all("The server is shutting down.")
    # The handlers answer with the error before their connections are closed.
    await _until_answered(service, runner, ABORT_GRACE_S, asyncio.Event())
    (_log.warning if aborted else _log.info)("gateway_stopped", aborted=aborted)
    return aborted


async def _until_answered(
    service: CompletionService,
    runner: GuardedRunner,
    timeout_s: float,
    forced: asyncio.Event,
) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while service.admission.unanswered or runner.unsent_bytes:
                if forced.is_set():
                    return
                await asyncio.sleep(_DRAIN_POLL_S)
