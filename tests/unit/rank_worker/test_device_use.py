"""What differs between devices in executing plans is said in one place."""

import pytest

from services.rank_worker.device import Device, DeviceKind
from services.rank_worker.device_use import DeviceUse, device_use


@pytest.mark.parametrize(
    ("kind", "has_queue", "pads"),
    [("cpu", False, False), ("metal", True, False), ("cuda", True, True)],
)
def test_devices_are_used_as_they_are(kind: DeviceKind, has_queue: bool, pads: bool) -> None:
    """GPUs take steps ahead; only CUDA prepares attention for each length; a tenth of the memory
    may stay with MLX.
    """
    here = Device(kind=kind, name="any", memory_bytes=100)
    assert device_use(here, 70) == DeviceUse(has_queue, pads_prefill=pads, freed_bytes_max=7)
