"""Execution profiles: differences between devices in the execution of plans."""

import pytest

from services.rank_worker.device.description import Device, DeviceKind
from services.rank_worker.device.execution_profile import ExecutionProfile, execution_profile
from shared.messages.rank_link import Backend


@pytest.mark.parametrize(
    ("kind", "backend", "use"),
    [
        ("cpu", "off", ExecutionProfile()),
        ("cpu", "ring", ExecutionProfile()),
        ("metal", "off", ExecutionProfile(has_queue=True, freed_bytes_max=7)),
        ("metal", "jaccl", ExecutionProfile(has_queue=True, freed_bytes_max=7)),
        ("cuda", "off", ExecutionProfile(has_queue=True, pads_prefill=True, freed_bytes_max=7)),
        ("cuda", "nccl", ExecutionProfile(has_queue=True, pads_prefill=True, freed_bytes_max=7)),
        ("cuda", "ring", ExecutionProfile(has_queue=True, freed_bytes_max=7)),
    ],
)
def test_only_gpus_queue_work_and_only_cuda_pads_prefills(
    kind: DeviceKind, backend: Backend, use: ExecutionProfile
) -> None:
    """GPUs have a queue and may keep a tenth of their memory; only CUDA pads prefills.

    Prefills are padded only where all ranks have CUDA.
    """
    here = Device(kind=kind, name="any", memory_bytes=100)
    assert execution_profile(here, backend, 70) == use
