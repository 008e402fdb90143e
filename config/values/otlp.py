"""`gateway.otlp_traces_endpoint`: where OpenTelemetry's traces go."""

import importlib.util
from urllib.parse import urlsplit

EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def problem_of(endpoint: str) -> str:
    """Why traces can't go there, as a sentence that begins with the key; empty if they can, or if there are none."""
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        return (
            f'gateway.otlp_traces_endpoint: "{endpoint}" is not the URL of a collector: write the whole URL for OTLP '
            'over HTTP, as "http://127.0.0.1:4318/v1/traces"'
        )
    try:
        is_installed = importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:  # of a package above
        is_installed = False
    if not is_installed:
        return "gateway.otlp_traces_endpoint: needs the extra 'otel': pip install 'pipeline-serve[otel]'"
    return ""
