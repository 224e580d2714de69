"""The options of traces, in a module that needs no OpenTelemetry."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from frame.quoting import quoted

#: Where collectors take traces.
TRACES_PATH = "/v1/traces"


class TraceOptions(BaseModel):
    """`--plugin.otel.NAME VALUE`. Headers for the collector come from OpenTelemetry's own environment variables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str = Field(
        f"http://127.0.0.1:4318{TRACES_PATH}", description="Where the collector takes OTLP over HTTP."
    )
    service_name: str = Field("frame", min_length=1, description="Name of this service in traces.")
    ratio: float = Field(1.0, ge=0, le=1, description="Share of requests traced of those whose client does not say.")

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        url = urlsplit(value if "//" in value else f"http://{value}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"must be an address for OTLP over HTTP, such as http://127.0.0.1:4318, got {quoted(value)}"
            )
        return url._replace(path=url.path if url.path.strip("/") else TRACES_PATH).geturl()
