"""Export of spans to an OpenTelemetry collector. Owns its interface, and loading it when needed."""

from typing import Protocol

from services.gateway.tracing.traced_request import TracedRequest
from shared.configuration.settings import GatewayConfig
from shared.errors import ConfigError


class SpanExport(Protocol):
    """Makes a span of each request, and sends it from a thread of its own."""

    def begin(self, traced: TracedRequest, method: str, route: str) -> None:
        """Begin the span of a request, and put it into a trace: the client's or a new one.

        Args:
            traced: gets the span, and its trace if the client has none.
            method: HTTP method.
            route: path of the endpoint, with names in place of values.
        """
        ...

    def end(self, traced: TracedRequest) -> None:
        """End the span of a request that has ended; it is exported later."""
        ...

    def close(self) -> None:
        """Send the last spans, within a bounded time, and end the thread."""
        ...


def open_export(config: GatewayConfig) -> SpanExport | None:
    """Return the export to `gateway.otlp_endpoint`; None if it is not set.

    Raises:
        ConfigError: when OpenTelemetry is not installed.
    """
    if not config.otlp_endpoint:
        return None
    try:
        # Only here, because it is optional and takes a quarter of a second and 15 MB.
        from services.gateway.tracing.otlp import OtlpExport  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"gateway.otlp_endpoint is set, but {error.name} is not installed: install "
            "lockstep[otlp], or remove the setting."
        ) from None
    return OtlpExport(config)
