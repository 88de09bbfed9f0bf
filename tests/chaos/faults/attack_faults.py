"""Attacks of another client, which has an address of its own because there are no API keys.

Linux serves the whole network 127.0.0.0/8 on its loopback interface; elsewhere these faults need
the address to be added to the interface first.
"""

import functools
import time

from tests.attacks.attack import Attack
from tests.attacks.attacker import Attacker
from tests.attacks.catalog import ATTACKS
from tests.chaos.faults.fault import Fault, FaultContext

ATTACKER_ADDRESS = "127.0.0.2"
ATTACK_S = 4.0


def _run(attack: Attack, context: FaultContext) -> None:
    attacker = Attacker(context.stack.port, time.monotonic() + ATTACK_S, ATTACKER_ADDRESS)
    before = context.stack.status()
    attack.run(attacker)
    context.expect_same_world(before, context.wait_until_served())


FAULTS = tuple(
    Fault(
        f"attack-{attack.name}",
        "pause up to 0.5 s",
        functools.partial(_run, attack),
        phase="mixed",
        loads=0,
    )
    for attack in ATTACKS
)
