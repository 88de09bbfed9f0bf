"""Conditions without any effect on streams: no fault, busy cores, a full disk, open sockets."""

import os
import subprocess
import sys
import time

from tests.chaos.cluster import processes
from tests.chaos.cluster.disk import full_disk
from tests.chaos.faults.fault import Fault, FaultContext

BASELINE_S = 3.0
BUSY_S = 20.0
DISK_FULL_S = 2.0


def _do_nothing(context: FaultContext) -> None:
    time.sleep(BASELINE_S)


def _busy_cores(context: FaultContext) -> None:
    """Run twice as many computing processes as there are cores."""
    before = context.stack.status()
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        time.sleep(BUSY_S)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    context.expect_same_world(before, context.wait_until_served())


def _fill_disk(context: FaultContext) -> None:
    before = context.stack.status()
    began_s = time.monotonic()
    pid = context.stack.pid("store")
    with full_disk(context.stack):
        time.sleep(DISK_FULL_S)
    time.sleep(1.0)
    store_off = context.stack.log.since(began_s, "store_off")
    context.record_figure("store_off lines", len(store_off))
    if not store_off:
        context.add_problem("the store did not notice the full disk: the fault did not happen")
    if context.stack.pid("store") != pid:
        context.add_problem("the store ended")
    context.expect_same_world(before, context.wait_until_served())


def _check_listeners(context: FaultContext) -> None:
    pids = [*context.stack.pids().values(), *processes.pids_naming(context.stack.folder)]
    found = processes.listening_sockets(pids)
    context.record_figure("listening sockets", len(found))
    if not any(port == context.stack.port for _, port in found):
        context.add_problem(f"the gateway's port is not among {found}: the list is incomplete")
    public = [f"{address}:{port}" for address, port in found if not processes.is_loopback(address)]
    if public:
        context.add_problem(f"sockets are open to other machines: {', '.join(public)}")


FAULTS = (
    Fault("none", "the baseline", _do_nothing, phase="mixed", loads=0, extra_s=5.0),
    Fault("busy-cores", "no false alarm", _busy_cores, phase="prefill", loads=0, extra_s=60.0),
    Fault("disk-full", "no effect", _fill_disk, phase="mixed", loads=0),
    Fault("listeners", "127.0.0.1 alone", _check_listeners, phase="decode", loads=0),
)
