"""The scheduler's shell: receives, stamps the time, calls the core, performs its actions.

One thread, two listeners, blocking sockets: measured 20 to 70 microseconds a step cheaper than an
event loop.
"""

import gc
import signal
import time
from typing import Any

import msgspec
import orjson

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    DrainOrdered,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayTold,
    HandOver,
    KeepEvidence,
    RankConnected,
    RankLost,
    RankTold,
    Say,
    SendToGateway,
    SendToRanks,
    Stop,
    TimePassed,
)
from shared import limits, log
from shared.clock import SystemClock, unix_seconds
from shared.configuration.loading import prepare_run_dir, read_world_files
from shared.configuration.setting_rules import settings_without_effect
from shared.configuration.settings import Config
from shared.errors import LinkFull, PeerUnknown
from shared.identifiers import PeerId
from shared.messages import ToScheduler
from shared.os import lifeline
from shared.transport import codec
from shared.transport.links import Connected, LinkEvent, LinkSet, Listener, Lost, Received

_TICK_S = limits.ACK_DELAY_S
"""What waits for nothing but time can wait so long; a process that wakes up disturbs the others."""


class Shell:
    """Two listeners around a core."""

    def __init__(self, config: Config) -> None:
        """Bind both addresses. Raises ConfigError when one cannot be had."""
        self._clock = SystemClock()
        self._config = config
        self._log = log.Log("scheduler")
        # Here rather than when the ranks are there: the process ends and says what to change.
        files = read_world_files(config)
        for detail in [*settings_without_effect(config), *files.left_aside]:
            self._log.warning("setting_ignored", detail=detail)
        self._core = SchedulerCore(config, files.jaccl_devices, files.hostfile)
        self._gateways: Listener[ToScheduler] = Listener(
            config.gateway_address,
            ToScheduler,
            keys_dir=config.keys_dir,
            roles=("gateway", "status", "operator"),
        )
        self._ranks: Listener[ToScheduler] = Listener(
            config.rank_address, ToScheduler, keys_dir=config.keys_dir, roles=("rank",)
        )
        self._links = LinkSet(self._gateways, self._ranks)
        self._exit_code: int | None = None
        self._drains_ordered = 0
        self._is_handed_over = False
        self._cpu_ms = 0.0

    def run(self) -> int:
        """Serve until the core says stop; return the exit code."""
        ticked_at_s = 0.0
        drains_taken = 0
        while self._exit_code is None:
            tick_at_s = ticked_at_s + _TICK_S
            due_at_s = self._core.waits_until_s
            if due_at_s is None:
                ready = self._links.wait(_TICK_S)
            else:
                tick_at_s = min(tick_at_s, due_at_s)
                ready = self._links.wait(max(0.0, tick_at_s - self._clock.now()))
            now_s = self._clock.now()
            ticks = now_s >= tick_at_s
            # Ranks first: a receipt may free the device, a request can wait some microseconds.
            if ticks or self._ranks in ready:
                self._take_ranks(self._ranks.poll(0.0))
            if ticks or self._gateways in ready:
                self._take_gateways(self._gateways.poll(0.0))
            if ticks:
                ticked_at_s = now_s
                self._handle(TimePassed())
            while drains_taken < self._drains_ordered:
                drains_taken += 1
                self._handle(DrainOrdered())
            if self._is_handed_over and self._exit_code is None:
                self._handle(HandOver())
        self._ranks.close()
        self._gateways.close()
        return self._exit_code

    def order_drain(self) -> None:
        """Remember that a signal asked for an end; the loop takes it from there."""
        self._drains_ordered += 1

    def hand_over(self) -> None:
        """Remember that a signal asked to make room for another scheduler."""
        self._is_handed_over = True

    def _take_ranks(self, events: list[LinkEvent[ToScheduler]]) -> None:
        for event in events:
            match event:
                case Received():
                    self._handle(RankTold(event.peer, event.message))
                case Connected():
                    self._handle(RankConnected(event.peer))
                case Lost():
                    self._handle(RankLost(event.peer, event.cause))

    def _take_gateways(self, events: list[LinkEvent[ToScheduler]]) -> None:
        for event in events:
            match event:
                case Received():
                    self._handle(GatewayTold(event.peer, event.message))
                case Connected():
                    self._handle(GatewayConnected(event.peer))
                case Lost():
                    self._handle(GatewayLost(event.peer, event.cause))

    def _handle(self, event: Event) -> None:
        started = time.perf_counter()
        actions = self._core.handle(event, self._clock.now())
        # The device may be waiting for a plan; nobody waits for anything else as dearly.
        actions.sort(key=_is_not_for_ranks)
        for action in actions:
            self._perform(action)
        self._core.note_cpu((time.perf_counter() - started) * 1_000.0)

    def _perform(self, action: Action) -> None:
        match action:
            case SendToRanks():
                self._send_to_ranks(action)
            case SendToGateway():
                try:
                    self._gateways.send(action.gateway, action.message)
                except PeerUnknown:
                    # It left meanwhile; its Lost event is on the way and ends what it owned.
                    pass
                except LinkFull as error:
                    self._log.warning("gateway_too_slow", peer=action.gateway, detail=str(error))
                    self._gateways.drop(action.gateway)
                    self._handle(GatewayLost(action.gateway, str(error)))
            case Say():
                getattr(self._log, action.level)(action.event, **action.fields)
            case KeepEvidence():
                self._keep(action)
            case Stop():
                self._exit_code = action.exit_code

    def _send_to_ranks(self, action: SendToRanks) -> None:
        body = codec.encode(action.message)
        for peer in action.peers:
            try:
                self._ranks.send_body(peer, body, action.epoch)
            except (PeerUnknown, LinkFull) as error:
                self._log.warning("rank_unreachable", peer=peer, detail=str(error))
                self._handle(RankLost(PeerId(peer), str(error)))

    def _keep(self, evidence: KeepEvidence) -> None:
        path = self._config.run_dir / f"evidence-{evidence.name}-{unix_seconds()}.json"
        facts: Any = msgspec.to_builtins(evidence.facts)
        try:
            path.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2, default=repr))
        except OSError as error:
            self._log.error("evidence_not_kept", path=str(path), detail=str(error))
        else:
            self._log.error("evidence_kept", path=str(path), cause=facts["difference"])


def run(config: Config) -> int:
    """Run the scheduler until it is told to stop; return the exit code.

    SIGTERM and SIGINT let what runs finish, a second one ends it. SIGUSR1 ends the process at once
    and no request: gateways keep them for the scheduler that is started next.
    """
    lifeline.exit_with_parent()
    log.set_up("scheduler", config.log)
    prepare_run_dir(config)
    shell = Shell(config)
    signal.signal(signal.SIGTERM, lambda *_: shell.order_drain())
    signal.signal(signal.SIGINT, lambda *_: shell.order_drain())
    signal.signal(signal.SIGUSR1, lambda *_: shell.hand_over())
    # The long-lived objects of start-up need not be looked at again by each collection.
    gc.collect()
    gc.freeze()
    return shell.run()


def _is_not_for_ranks(action: Action) -> bool:
    return not isinstance(action, SendToRanks)
