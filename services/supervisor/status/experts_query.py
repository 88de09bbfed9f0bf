"""Query of the scheduler for the assignments to routed experts."""

import contextlib

from services.supervisor.status.service_queries import ANSWER_DEADLINE_S, no_answer_error
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.messages import ExpertsReported, QueryExperts, ToGateway
from shared.transport.links import Connected, Dialer, Received


def ask_experts(config: Config) -> ExpertsReported:
    """Open a link, ask the scheduler how often each expert was used, and return the answer.

    Args:
        config: contains the scheduler's address.

    Raises:
        UnavailableError: when it does not answer in time.
    """
    clock = SystemClock()
    until_s = clock.now() + ANSWER_DEADLINE_S
    link: Dialer[ToGateway] = Dialer(
        config.gateway_address, "status", ToGateway, keys_dir=config.keys_dir
    )
    with contextlib.closing(link):
        while (left_s := until_s - clock.now()) > 0.0:
            for event in link.poll(left_s):
                match event:
                    case Connected():
                        link.send(QueryExperts())
                    case Received(message=ExpertsReported() as report):
                        return report
    raise no_answer_error(config, link.refusal)
