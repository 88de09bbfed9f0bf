"""Examination of this host. Owns which system commands run for which check; changes nothing."""

import contextlib
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata

from services.commands.doctor.checks import (
    device,
    environment,
    files,
    jobs,
    linux,
    macos,
    ports,
    rdma,
)
from services.commands.doctor.facts import Facts, Findings, HostReport, ThunderboltPort
from services.commands.doctor.reading import linux as linux_output
from services.commands.doctor.reading import macos as macos_output
from services.commands.doctor.reading import thunderbolt
from services.commands.doctor.system_commands import CommandOutcome, RunCommand, run_command
from shared.clock import unix_seconds
from shared.configuration import world_addresses
from shared.configuration.host_addresses import is_loopback
from shared.configuration.host_share import HostShare
from shared.configuration.loading import read_world_files
from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile
from shared.os.cpu_cores import available_cores
from shared.os.process_file import RoleProcess, find_processes
from shared.transport.addresses import is_tcp

PACKAGES = ("lockstep", "mlx", "mlx-lm", "pyzmq", "msgspec", "transformers")
"""Packages whose versions are compared between hosts."""
SHORT_S = 10.0
"""Deadline of every other system command in seconds."""
PROFILER_S = 60.0
"""Deadline of system_profiler in seconds; it scans buses."""
_ROLES = ("gateway", "scheduler", "store", "rank")

Weights = list[WeightFile] | None
"""Weight files of the model; None: it is not on this host, or not needed here."""


class Examiner:
    """Runs the checks of `lockstep doctor` on this host, and collects facts and findings.

    Args:
        share: roles and settings of this host.
        name: name of this host in findings.
        variables: environment variables of this process.
        runner: runs a system command.
        flags: flags with which commands find these settings, for the text of remedies.
    """

    def __init__(
        self,
        share: HostShare,
        name: str,
        variables: Mapping[str, str],
        runner: RunCommand = run_command,
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
        """Run every check for this platform and this host's roles; return facts and findings.

        Call it once: the findings of a second call would be added to those of the first.
        """
        found, config, share = self._found, self._config, self._share
        public, allowed = files.check_keys(
            found, config.required_keys_dir, needed=self._needs_keys(), flags=self._flags
        )
        digest, weights = files.check_model(found, config) if share.roles.ranks else ("", None)
        on_mac = sys.platform == "darwin"
        system, chip, seen, devices = self._mac(weights) if on_mac else self._linux(weights)
        device.check_device(found, device.run_mlx_probe(self._run), config.backend)
        self._check_rdma_uses()
        environment.check_settings(found, share)
        if share.roles.cache_store:
            files.check_disk(found, config)
        variables = environment.watched_variables(self._variables)
        environment.check_variables(found, variables)
        files.check_limits(found, config, gateway=share.roles.gateway)
        ports.check_ports(found, ports.listen_addresses(share), self._owners, self._running)
        script = shutil.which("lockstep") or sys.argv[0]
        jobs.check_jobs(found, jobs.installed_job_files(), script, self._flags)
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
        system = macos.check_system(found, self._ask("/usr/bin/sw_vers"))
        chip = macos.check_chip(found, self._sysctl("machdep.cpu.brand_string"))
        total = macos_output.read_number(self._sysctl("hw.memsize").text)
        macos.check_power(found, self._ask("/usr/bin/pmset", "-g"))
        macos.check_wired_memory(
            found, self._ask("/usr/bin/vm_stat"), total, [one.name for one in self._running]
        )
        limit = self._sysctl("iogpu.wired_limit_mb")
        held = self._part(weights, config.model.dtype)
        ranks = len(self._share.roles.ranks)
        part = min(1.0, ranks * config.rank_worker.memory_share) or 1.0
        macos.check_gpu_limit(found, limit, total, held, part)
        macos.check_free_memory(found, self._ask("/usr/bin/memory_pressure", "-Q"))
        names = thunderbolt.read_hardware_ports(
            self._ask("/usr/sbin/networksetup", "-listallhardwareports").text
        )
        said = self._run(
            ["/usr/sbin/system_profiler", "SPThunderboltDataType", "-json"], PROFILER_S
        )
        seen = thunderbolt.read_thunderbolt(said.text, names) if said.ok else None
        if seen is None:
            found.cannot_check("thunderbolt", f"system_profiler does not show it: {said.why}")
            seen = []
        devices = rdma.check_rdma(
            found, system, self._ask("rdma_ctl", "status"), self._ask("ibv_devices"), seen,
            needed=needed,
        )  # fmt: skip
        interfaces = macos_output.read_interfaces(self._ask("/sbin/ifconfig", "-a").text)
        states = thunderbolt.read_states(self._ask("ibv_devinfo").text)
        rdma.check_links(found, seen, states, interfaces, needed=needed)
        rdma.check_bridge(found, interfaces, [p.interface for p in seen], needed=needed)
        return system, chip, seen, devices

    def _linux(self, weights: Weights) -> tuple[str, str, list[ThunderboltPort], list[str]]:
        found, config = self._found, self._config
        system = f"{_distribution()}, kernel {platform.release()}"
        found.ok("system", system)
        cards = self._run(linux_output.GPU_QUERY, SHORT_S)
        has_gpus = linux.check_gpus(found, cards, needed=config.backend == "nccl")
        linux.check_cores(found, available_cores(), len(self._share.roles.ranks))
        linux.check_blas(found, config.rank_worker.blas)
        # As in the rank worker: on the CPU only float32 uses BLAS.
        dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
        held = None if has_gpus else self._part(weights, dtype)
        ranks = len(self._share.roles.ranks)
        linux.check_memory(found, held, ranks, config.rank_worker.memory_share)
        linux.report_mac_only_checks(found)
        return system, platform.machine(), [], []

    def _check_rdma_uses(self) -> None:
        """Count what jaccl needs of each RDMA device; the scheduler's host has the table."""
        share, config = self._share, self._config
        if config.backend != "jaccl" or not share.roles.scheduler:
            return
        try:
            hosts, devices = "", share.files.get(config.world.jaccl_devices)
            if devices is None:
                files = read_world_files(config)
                hosts, devices = files.hostfile, files.jaccl_devices
            uses = world_addresses.rdma_device_uses(config, hosts, devices)
        except ConfigError as error:
            remedy = "correct it, or let `mlx.distributed_config --backend jaccl` write it"
            self._found.fail("rdma resources", str(error), remedy)
            return
        rdma.check_device_uses(self._found, uses)

    def _ask(self, *command: str) -> CommandOutcome:
        return self._run(command, SHORT_S)

    def _sysctl(self, name: str) -> CommandOutcome:
        return self._ask("/usr/sbin/sysctl", "-n", name)

    def _owners(self, port: int) -> list[tuple[str, int]]:
        if sys.platform == "darwin":
            said = self._ask("/usr/sbin/lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc")
            return macos_output.read_lsof(said.text)
        return linux_output.read_ss(self._ask("ss", "-Hltnp", f"sport = :{port}").text)

    def _needs_keys(self) -> bool:
        config = self._config
        addresses = [config.gateway_address, config.rank_address]
        hosts = [one.removeprefix("tcp://").rpartition(":")[0] for one in addresses if is_tcp(one)]
        return any(not is_loopback(host.strip("[]")) for host in hosts)

    def _part(self, weights: Weights, dtype: str) -> int | None:
        """Return the approximate bytes of weights of this host's ranks, or None."""
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
        # The run folder of another user holds another Lockstep.
        return []
    return list(dict.fromkeys(found))


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        found[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "Linux"
