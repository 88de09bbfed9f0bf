"""The gateway's shell: wires tokenizer, bus and HTTP, handles signals, drains."""

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from services.gateway import app
from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.streaming import FlushList
from services.gateway.endpoints.completion_service import Service
from services.gateway.http.admission import AdmissionControl
from services.gateway.http.api_keys import ApiKeys
from services.gateway.http.authentication import Authenticator
from services.gateway.http.connection_limits import ACCEPTED_AT_ONCE, bound_sending, connections_max
from services.gateway.http.cors import OriginPolicy
from services.gateway.http.server import GuardedRunner, raise_descriptor_limit
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.scheduler_client.link import SchedulerLink
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from services.gateway.tokenizing import tokenizer
from services.gateway.tokenizing.tokenizer import Tokenizer
from shared import limits, log
from shared.clock import Clock, SystemClock, unix_seconds
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.configuration.settings import Config
from shared.errors import ConfigError, LockstepError
from shared.os import lifeline

ENCODER_THREADS = 2
"""Prompts are encoded beside the event loop; more threads would starve it on small machines."""
LISTEN_BACKLOG = 1_024
"""Connections that wait to be accepted. Linux caps it at net.core.somaxconn."""
SWITCH_INTERVAL_S = 0.001
"""A thread that renders a template hands the interpreter to the event loop after so long."""
GARBAGE_THRESHOLD = 50_000
"""Allocations between two collections; objects on the hot path are freed without one."""

CUT_OFF_S = 1.0
"""What is cut off at the end gets its error event within so long."""

_DRAIN_LOOK_S = 0.02

_log = log.Log("gateway")


def run(config: Config) -> int:
    """Serve HTTP until a signal says stop.

    Returns:
        The exit code: 0 after a clean stop, 69 when answers were cut off, 78 when a setting is
        wrong.
    """
    lifeline.exit_with_parent()
    log.set_up("gateway", config.log)
    try:
        keys = ApiKeys(config.gateway, os.environ.get(API_KEYS_VARIABLE, ""), SystemClock())
        loaded = tokenizer.load(config.model, _log.info)
        return asyncio.run(_serve(config, loaded, keys))
    except LockstepError as error:
        _log.error(str(error))
        return error.exit_code


def build_service(config: Config, loaded: Tokenizer, keys: ApiKeys, clock: Clock) -> Service:
    """Wire everything but the HTTP server; call inside the event loop."""
    status = StatusBoard(clock)
    flush_list = FlushList()
    metrics = GatewayMetrics(status)
    link = SchedulerLink(config.gateway_address, config.keys_dir)
    later = asyncio.get_running_loop().call_later
    requests = OpenRequests(link, later, clock, status, metrics, flush_list)
    link.start(requests.handle)
    return Service(
        config=config,
        tokenizer=loaded,
        status=status,
        metrics=metrics,
        requests=requests,
        flush_list=flush_list,
        encoders=ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="encoder"),
        access=Authenticator(config.gateway, keys, clock),
        origins=OriginPolicy(config.gateway),
        door=AdmissionControl(config.gateway.open_requests_max, status),
        started_unix_s=unix_seconds(),
    )


def bind(config: Config) -> socket.socket:
    """Return a socket bound to the configured address.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    host, port = config.gateway.host, config.gateway.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets may bind one port with SO_REUSEADDR; only one may listen.
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        cause = (
            "another program listens there; set gateway.port"
            if error.errno == errno.EADDRINUSE
            else error.strerror
        )
        raise ConfigError(f"Cannot listen on {host}:{port}: {cause}.") from None
    return listener


async def _serve(config: Config, loaded: Tokenizer, keys: ApiKeys) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    forced = asyncio.Event()

    def on_signal() -> None:
        (forced if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    listener = bind(config)
    bound_sending(listener)
    most = connections_max(raise_descriptor_limit())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    service = build_service(config, loaded, keys, SystemClock())
    runner = GuardedRunner(app.build(service), config.gateway, most)
    try:
        await runner.setup()
        await web.SockSite(runner, listener, backlog=ACCEPTED_AT_ONCE).start()
        # asyncio has given the system its own number, which bounds one turn of the loop.
        listener.listen(LISTEN_BACKLOG)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        _log.info("gateway_listens", host=config.gateway.host, port=config.gateway.port)
        await stopping.wait()
        cut_off = await _drain(config, service, runner, forced)
    finally:
        await runner.cleanup()
        service.requests.shut()
        service.encoders.shutdown(wait=False, cancel_futures=True)
    return limits.EXIT_UNAVAILABLE if cut_off else limits.EXIT_OK


async def _drain(
    config: Config, service: Service, runner: GuardedRunner, forced: asyncio.Event
) -> int:
    """Let requests that are here be answered; take nothing new. Return how many were cut off."""
    service.status.is_draining = True
    _log.info("gateway_drains", open=service.door.unanswered)
    await _until_answered(service, runner, config.scheduler.drain_s, forced)
    cut_off = service.door.unanswered
    service.requests.fail_all("The server is shutting down.")
    # The handlers answer with the error before their connections are closed.
    await _until_answered(service, runner, CUT_OFF_S, None)
    (_log.warning if cut_off else _log.info)("gateway_stops", cut_off=cut_off)
    return cut_off


async def _until_answered(
    service: Service, runner: GuardedRunner, timeout_s: float, forced: asyncio.Event | None
) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while service.door.unanswered or runner.unsent_bytes:
                if forced is not None and forced.is_set():
                    return
                await asyncio.sleep(_DRAIN_LOOK_S)
