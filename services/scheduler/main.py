"""Scheduler shell. Owns sockets, clock, log and signals around the core; decides nothing.

It uses one thread with blocking sockets, which was measured to be 20 to 70 microseconds per step
faster than an event loop.
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
    AllowSilence,
    DrainRequested,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
    HandOverRequested,
    PeerSilent,
    RankLost,
    RankMessageReceived,
    SaveEvidence,
    SaveWorldFacts,
    SendToGateway,
    SendToRanks,
    Stop,
    TimePassed,
    WriteLog,
)
from services.scheduler.world.world_change import WorldFacts
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
from shared.transport.links import Connected, LinkEvent, LinkSet, Listener, Lost, Quiet, Received

WORLD_FACTS_FILE = "world.json"
"""File in the run folder with the facts about the last world that was ready."""

_TICK_S = limits.ACK_DELAY_S
"""Time between ticks. Waking up more often would disturb the other processes."""


class Shell:
    """Runs the core: receives messages, reads the clock and performs the core's actions."""

    def __init__(self, config: Config) -> None:
        """Bind both addresses.

        Raises:
            ConfigError: when a configured file is invalid or an address cannot be bound.
        """
        self._clock = SystemClock()
        self._config = config
        self._log = log.Log("scheduler")
        # Read at the start, so that a mistake ends the process with a message.
        files = read_world_files(config)
        for detail in [*settings_without_effect(config), *files.ignored_settings]:
            self._log.warning("setting_ignored", detail=detail)
        self._facts_file = config.run_dir / WORLD_FACTS_FILE
        before = self._read_world_facts()
        self._core = SchedulerCore(config, files.jaccl_devices, files.hostfile, before)
        self._gateways: Listener[ToScheduler] = Listener(
            config.gateway_address,
            ToScheduler,
            keys_dir=config.keys_dir,
            roles=("gateway", "status", "operator"),
        )
        self._ranks: Listener[ToScheduler] = Listener(
            config.rank_address, ToScheduler, keys_dir=config.keys_dir, roles=("rank",)
        )
        for link in (self._gateways, self._ranks):
            link.silence_s = config.scheduler.silence_s
        self._links = LinkSet(self._gateways, self._ranks)
        self._exit_code: int | None = None
        self._drains_requested = 0
        self._hand_over_requested = False

    def run(self) -> int:
        """Serve until the core stops; return the exit code."""
        ticked_at_s = 0.0
        drains_taken = 0
        while self._exit_code is None:
            tick_at_s = ticked_at_s + _TICK_S
            due_at_s = self._core.wake_at_s
            if due_at_s is None:
                ready = self._links.wait(_TICK_S)
            else:
                tick_at_s = min(tick_at_s, due_at_s)
                ready = self._links.wait(max(0.0, tick_at_s - self._clock.now()))
            now_s = self._clock.now()
            ticks = now_s >= tick_at_s
            # Ranks first, because the device may wait for the plan that follows a receipt.
            if ticks or self._ranks in ready:
                self._take_ranks(self._ranks.poll(0.0))
            if ticks or self._gateways in ready:
                self._take_gateways(self._gateways.poll(0.0))
            if ticks:
                ticked_at_s = now_s
                self._handle(TimePassed())
            while drains_taken < self._drains_requested:
                drains_taken += 1
                self._handle(DrainRequested())
            if self._hand_over_requested and self._exit_code is None:
                self._handle(HandOverRequested())
        self._ranks.close()
        self._gateways.close()
        return self._exit_code

    def request_drain(self) -> None:
        """Make the loop drain and stop; called by a signal handler."""
        self._drains_requested += 1

    def request_hand_over(self) -> None:
        """Make the loop end at once and leave its requests to another scheduler; for a signal."""
        self._hand_over_requested = True

    def _take_ranks(self, events: list[LinkEvent[ToScheduler]]) -> None:
        for event in events:
            match event:
                case Received():
                    self._handle(RankMessageReceived(event.peer, event.message))
                case Connected():
                    # The process counts once it has sent RankHello.
                    pass
                case Lost():
                    self._handle(RankLost(event.peer, event.cause))
                case Quiet():
                    self._handle(PeerSilent())

    def _take_gateways(self, events: list[LinkEvent[ToScheduler]]) -> None:
        for event in events:
            match event:
                case Received():
                    self._handle(GatewayMessageReceived(event.peer, event.message))
                case Connected():
                    self._handle(GatewayConnected(event.peer))
                case Lost():
                    self._handle(GatewayLost(event.peer))
                case Quiet():
                    self._handle(PeerSilent())

    def _handle(self, event: Event) -> None:
        started = time.perf_counter()
        actions = self._core.handle(event, self._clock.now())
        # Messages to ranks first, because the device may wait for a plan.
        actions.sort(key=_is_for_others)
        for action in actions:
            self._perform(action)
        self._core.add_cpu_time((time.perf_counter() - started) * 1_000.0)

    def _perform(self, action: Action) -> None:
        match action:
            case SendToRanks():
                self._send_to_ranks(action)
            case SendToGateway():
                try:
                    self._gateways.send(action.gateway, action.message)
                except PeerUnknown:
                    # Its Lost event follows and ends its requests.
                    pass
                except LinkFull as error:
                    self._log.warning("gateway_too_slow", peer=action.gateway, detail=str(error))
                    self._gateways.drop(action.gateway)
                    self._handle(GatewayLost(action.gateway))
            case AllowSilence():
                for rank in action.peers:
                    self._ranks.allow_silence(rank, is_allowed=action.is_allowed)
            case WriteLog():
                if action.event == "epoch_begins":
                    log.bind(epoch=action.fields["epoch"])
                getattr(self._log, action.level)(action.event, **action.fields)
            case SaveEvidence():
                self._save_evidence(action)
            case SaveWorldFacts():
                self._save_world_facts(action)
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

    def _save_evidence(self, evidence: SaveEvidence) -> None:
        path = self._config.run_dir / f"evidence-receipts-{unix_seconds()}.json"
        facts: Any = msgspec.to_builtins(evidence.facts)
        try:
            path.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2, default=repr))
        except OSError as error:
            self._log.error("evidence_not_saved", path=str(path), detail=str(error))
        else:
            self._log.error("evidence_saved", path=str(path), cause=facts["difference"])

    def _read_world_facts(self) -> WorldFacts | None:
        """Return the world of the last start; None if it is unknown."""
        try:
            return msgspec.json.decode(self._facts_file.read_bytes(), type=WorldFacts)
        except (OSError, msgspec.MsgspecError):
            return None

    def _save_world_facts(self, action: SaveWorldFacts) -> None:
        temporary = self._facts_file.with_suffix(".new")
        try:
            temporary.write_bytes(orjson.dumps(action.facts))
            temporary.replace(self._facts_file)
        except OSError as error:
            # The next start then cannot name a change.
            self._log.warning("world_facts_not_saved", detail=str(error))


def _is_for_others(action: Action) -> bool:
    return type(action) is not SendToRanks


def run(config: Config) -> int:
    """Run the scheduler until it stops; return the exit code.

    SIGTERM and SIGINT let open requests finish; a second one ends them. SIGUSR1 ends the process at
    once without ending requests, which gateways submit to the next scheduler.

    Raises:
        ConfigError: when a configured file is invalid or an address cannot be bound.
    """
    lifeline.exit_with_parent()
    log.set_up("scheduler", config.log, config.log_directory)
    prepare_run_dir(config)
    shell = Shell(config)
    signal.signal(signal.SIGTERM, lambda *_: shell.request_drain())
    signal.signal(signal.SIGINT, lambda *_: shell.request_drain())
    signal.signal(signal.SIGUSR1, lambda *_: shell.request_hand_over())
    # Excludes the objects created at the start from later garbage collections.
    gc.collect()
    gc.freeze()
    return shell.run()
