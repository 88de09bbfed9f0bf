"""Execution profiles: differences between devices in the execution of plans."""

import pytest

from services.rank_worker.device.description import Device, DeviceKind
from services.rank_worker.device.execution_profile import ExecutionProfile, execution_profile
from shared.messages.rank_link import Backend

_CUDA = ExecutionProfile(
    has_queue=True, grouped_tokens_max=1_024, pads_prefill=True, freed_bytes_max=17
)


@pytest.mark.parametrize(
    ("kind", "backend", "use"),
    [
        ("cpu", "off", ExecutionProfile()),
        ("cpu", "ring", ExecutionProfile()),
        ("metal", "off", ExecutionProfile(has_queue=True, freed_bytes_max=7)),
        ("metal", "jaccl", ExecutionProfile(has_queue=True, freed_bytes_max=7)),
        ("cuda", "off", _CUDA),
        ("cuda", "nccl", _CUDA),
        ("cuda", "ring", ExecutionProfile(has_queue=True, freed_bytes_max=17)),
    ],
)
def test_only_gpus_queue_work_and_only_cuda_pads_prefills(
    kind: DeviceKind, backend: Backend, use: ExecutionProfile
) -> None:
    """GPUs have a queue and may keep a tenth of their memory, with CUDA a quarter; only CUDA pads
    prefills, and joins prompts of more than 512 tokens, where all ranks have CUDA.
    """
    here = Device(kind=kind, name="any", memory_bytes=100)
    assert execution_profile(here, backend, 70) == use


def test_invariant_batch_joins_no_prompts_and_pads_none() -> None:
    """A prompt's numbers must depend neither on the others nor on the room of rows."""
    here = Device(kind="cuda", name="any", memory_bytes=100)
    found = execution_profile(here, "off", 70, batch_invariant=True)
    assert (found.grouped_tokens_max, found.pads_prefill) == (0, False)


def test_gpu_with_much_memory_resizes_more_rows_at_once() -> None:
    """With CUDA a twentieth of the free memory may hold rows twice; on any device 256 MiB may."""
    gpu = Device(kind="cuda", name="any", memory_bytes=2**37)
    assert execution_profile(gpu, "off", 100 << 30).resize_at_once_bytes_max == 5 << 30
    assert execution_profile(gpu, "off", 1 << 30).resize_at_once_bytes_max == 256 << 20
    for kind in ("cpu", "metal"):
        other = Device(kind=kind, name="any", memory_bytes=2**37)
        assert execution_profile(other, "off", 100 << 30).resize_at_once_bytes_max == 256 << 20
