"""What differs between devices in executing plans is said in one place."""

import pytest

from services.rank_worker.device.description import Device, DeviceKind
from services.rank_worker.device.execution_profile import DeviceUse, device_use
from shared.messages.rank_link import Backend


@pytest.mark.parametrize(
    ("kind", "backend", "use"),
    [
        ("cpu", "off", DeviceUse()),
        ("cpu", "ring", DeviceUse()),
        ("metal", "off", DeviceUse(has_queue=True, freed_bytes_max=7)),
        ("metal", "jaccl", DeviceUse(has_queue=True, freed_bytes_max=7)),
        ("cuda", "off", DeviceUse(has_queue=True, pads_prefill=True, freed_bytes_max=7)),
        ("cuda", "nccl", DeviceUse(has_queue=True, pads_prefill=True, freed_bytes_max=7)),
        ("cuda", "ring", DeviceUse(has_queue=True, freed_bytes_max=7)),
    ],
)
def test_devices_are_used_as_they_are(kind: DeviceKind, backend: Backend, use: DeviceUse) -> None:
    """GPUs take steps ahead, and a tenth of their memory may stay with MLX; only CUDA prepares
    attention for each length, and pads where all ranks do.
    """
    here = Device(kind=kind, name="any", memory_bytes=100)
    assert device_use(here, backend, 70) == use
