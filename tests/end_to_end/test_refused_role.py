"""A role that cannot start any more while the others of its `lockstep up` serve."""

import os
import signal
from pathlib import Path

import pytest

from services.gateway.http import api_keys
from tests.end_to_end.running_lockstep import RunningLockstep
from tests.support.waiting import wait_until

SHORT_DELAY = (
    "import sys; from services.commands import main; from services.supervisor import supervisor; "
    "from services.supervisor.children import child; "
    "child.LONGEST_DELAY_S = supervisor.LONGEST_DELAY_S = 1.0; sys.exit(main.main())"
)
"""`lockstep` that tries a refused role again after 1 s."""


@pytest.mark.proof
def test_gateway_with_key_file_writable_for_others_is_tried_again_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is logged with its remedy. When the file is repaired, the gateway serves again
    with the ranks that ran all the time."""
    keys = tmp_path / "keys"
    keys.write_text(api_keys.ApiKey.of("ann", "x" * 32).line() + "\n")
    keys.chmod(0o600)
    monkeypatch.setenv("LOCKSTEP_GATEWAY_API_KEYS_FILE", str(keys))
    running = RunningLockstep(tmp_path / "run", program=("-c", SHORT_DELAY))
    try:
        running.wait_until_ready()
        before = running.children()
        keys.chmod(0o666)
        os.kill(before["gateway"], signal.SIGKILL)
        running.wait_for_line("the others continue; trying again in 1 s")
        assert "run `chmod 600 " in running.text

        keys.chmod(0o600)
        wait_until(lambda: _ready_again(running), 30.0, poll_s=0.1, failure=lambda: running.text)
        after = running.children()
        assert after["rank-worker 0"] == before["rank-worker 0"]
        assert after["gateway"] != before["gateway"]
    finally:
        running.close()


def _ready_again(running: RunningLockstep) -> bool:
    try:
        return running.readiness() == 200
    except OSError:
        return False
