"""Examines this host: runs what the system offers, reads it, checks it. Changes nothing."""

import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from services.commands.doctor.checks import (
    device,
    environment,
    files,
    jobs,
    linux,
    mac,
    ports,
    rdma,
)
from services.commands.doctor.facts import Facts, Findings, HostReport, ThunderboltPort
from services.commands.doctor.outputs import Output, Run, run
from services.commands.doctor.reading import linux as linux_output
from services.commands.doctor.reading import macos, thunderbolt
from shared.clock import unix_seconds
from shared.configuration.host_share import HostShare
from shared.configuration.loading import is_loopback
from shared.model.checkpoint_files import WeightFile
from shared.os.cpu_cores import available_cores
from shared.os.process_file import RoleProcess, find_processes
from shared.transport.addresses import is_tcp

PACKAGES = ("lockstep", "mlx", "mlx-lm", "pyzmq", "msgspec", "transformers")
SHORT_S = 10.0
PROFILER_S = 60.0
"""system_profiler looks at buses and takes its time."""
_ROLES = ("gateway", "scheduler", "store", "rank")

Weights = list[WeightFile] | None
"""The model's files; None: it is not on this host, or not needed here."""


class Examiner:
    """One examination of this host."""

    def __init__(
        self,
        share: HostShare,
        name: str,
        variables: Mapping[str, str],
        runner: Run = run,
        flags: str = "",
    ) -> None:
        self._share = share
        self._config = share.config
        self._run = runner
        self._variables = variables
        self._flags = flags
        self._found = Findings(name)
        self._running = _running(share)

    def examine(self) -> HostReport:
        """Run every check that can be run here."""
        found, config, share = self._found, self._config, self._share
        public, allowed = files.check_keys(
            found, config.keys_dir, needed=self._needs_keys(), flags=self._flags
        )
        digest, weights = files.check_model(found, config) if share.roles.ranks else ("", None)
        on_mac = sys.platform == "darwin"
        system, chip, seen, devices = self._mac(weights) if on_mac else self._linux(weights)
        device.check_device(found, device.ask(self._run), config.backend)
        if share.roles.cache_store:
            files.check_disk(found, config)
        variables = environment.watched(self._variables)
        environment.check_here(found, variables)
        files.check_limits(found, config, gateway=share.roles.gateway)
        ports.check_ports(found, ports.listened_on(share), self._owners, self._running)
        script = shutil.which("lockstep") or sys.argv[0]
        jobs.check_jobs(found, jobs.installed(), script, self._flags)
        roles = share.roles
        named = {"gateway": roles.gateway, "scheduler": roles.scheduler, "store": roles.cache_store}
        facts = Facts(
            host=found.host,
            platform="macOS" if on_mac else "Linux",
            system=system,
            chip=chip,
            versions=_versions(),
            environment=variables,
            time_s=float(unix_seconds()),
            public_key=public,
            allowed=allowed,
            listens_on_tcp=is_tcp(config.rank_address),
            model=config.model.path,
            model_digest=digest,
            ports=seen,
            rdma_devices=devices,
            backend=config.backend,
            ranks=len(roles.ranks),
            roles=[role for role, is_here in named.items() if is_here],
        )
        return HostReport(facts=facts, findings=found.all)

    def _mac(self, weights: Weights) -> tuple[str, str, list[ThunderboltPort], list[str]]:
        found, config = self._found, self._config
        needed = config.backend == "jaccl"
        system = mac.check_system(found, self._ask("/usr/bin/sw_vers"))
        chip = mac.check_chip(found, self._sysctl("machdep.cpu.brand_string"))
        total = macos.read_number(self._sysctl("hw.memsize").text)
        mac.check_power(found, self._ask("/usr/bin/pmset", "-g"))
        mac.check_wired(
            found, self._ask("/usr/bin/vm_stat"), total, [one.name for one in self._running]
        )
        limit = self._sysctl("iogpu.wired_limit_mb")
        mac.check_limit(found, limit, total, self._part(weights, config.model.dtype))
        mac.check_free(found, self._ask("/usr/bin/memory_pressure", "-Q"))
        names = thunderbolt.read_hardware_ports(
            self._ask("/usr/sbin/networksetup", "-listallhardwareports").text
        )
        said = self._run(
            ["/usr/sbin/system_profiler", "SPThunderboltDataType", "-json"], PROFILER_S
        )
        seen = thunderbolt.read_thunderbolt(said.text, names) if said.ok else None
        if seen is None:
            found.cannot_check("thunderbolt", f"system_profiler does not say: {said.why}")
            seen = []
        devices = rdma.check_rdma(
            found, system, self._ask("rdma_ctl", "status"), self._ask("ibv_devices"), seen,
            needed=needed,
        )  # fmt: skip
        interfaces = macos.read_interfaces(self._ask("/sbin/ifconfig", "-a").text)
        states = thunderbolt.read_states(self._ask("ibv_devinfo").text)
        rdma.check_links(found, seen, states, interfaces, needed=needed)
        rdma.check_bridge(found, interfaces, [p.interface for p in seen], needed=needed)
        return system, chip, seen, devices

    def _linux(self, weights: Weights) -> tuple[str, str, list[ThunderboltPort], list[str]]:
        found, config = self._found, self._config
        name = linux_output.read_os_release(_read("/etc/os-release"))
        system = f"{name or 'Linux'}, kernel {platform.release()}"
        found.ok("system", system)
        cards = self._run(linux_output.GPU_QUERY, SHORT_S)
        has_gpus = linux.check_gpus(found, cards, needed=config.backend == "nccl")
        linux.check_cores(found, available_cores(), len(self._share.roles.ranks))
        linux.check_blas(found, config.rank_worker.blas)
        # As the rank worker casts: on the CPU only float32 goes through BLAS.
        dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
        held = None if has_gpus else self._part(weights, dtype)
        linux.check_memory(found, _read("/proc/meminfo"), held)
        linux.only_on_macs(found)
        return system, platform.machine(), [], []

    def _ask(self, *command: str) -> Output:
        return self._run(command, SHORT_S)

    def _sysctl(self, name: str) -> Output:
        return self._ask("/usr/sbin/sysctl", "-n", name)

    def _owners(self, port: int) -> list[tuple[str, int]]:
        if sys.platform == "darwin":
            said = self._ask("/usr/sbin/lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc")
            return macos.read_lsof(said.text)
        return linux_output.read_ss(self._ask("ss", "-Hltnp", f"sport = :{port}").text)

    def _needs_keys(self) -> bool:
        config = self._config
        addresses = [config.gateway_address, config.rank_address]
        hosts = [one.removeprefix("tcp://").rpartition(":")[0] for one in addresses if is_tcp(one)]
        return any(not is_loopback(host.strip("[]")) for host in hosts)

    def _part(self, weights: Weights, dtype: str) -> int | None:
        """Return about how much of the weights this host's ranks hold; None: not known."""
        if weights is None:
            return None
        total = files.bytes_in_memory(weights, dtype)
        return total * len(self._share.roles.ranks) // self._config.world.size


def _running(share: HostShare) -> list[RoleProcess]:
    folder = share.config.run_dir
    found: list[RoleProcess] = []
    try:
        for name in _ROLES if folder.is_dir() else []:
            found += find_processes(folder, name)
    except OSError:
        # Another user's: what they run is not this Lockstep.
        return []
    return list(dict.fromkeys(found))


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
