"""The settings of the HTTP server: addresses, keys, bounds of requests, parsers, limits per key, ends and restarts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .section import Section

#: Worker methods that only the engine may call: called from outside they would evade the scheduler or a route's checks.
_ENGINE_ONLY = frozenset(
    (
        "call",
        "allocate",
        "check",
        "check_weights",
        "close",
        "execute",
        "load",
        "run",
        "sample",
        "sleep",
        "update_weights",
        "wake_up",
    )
)


class ServerConfig(Section):
    """The HTTP server."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    uds: str | None = Field(None, description="Unix socket to listen on in place of host and port.")
    api_key: list[str] = Field(
        default_factory=list, description="Keys of which clients must send one; default: everybody is served."
    )
    ssl_certfile: str | None = Field(None, description="Certificate (PEM) to serve https with; default: http.")
    ssl_keyfile: str | None = Field(
        None, description="The certificate's private key (PEM), if that is a file of its own."
    )
    ssl_ca_certs: str | None = Field(
        None, description="Certificates (PEM) of the authorities that sign clients' certificates; needs ssl_cert_reqs."
    )
    ssl_cert_reqs: int = Field(
        0, ge=0, le=2, description="Whether clients must show a certificate: 0 no, 1 only valid ones if any, 2 always."
    )
    enable_ssl_refresh: bool = Field(
        False, description="Read certificates, keys and ssl_ca_certs again when their files change."
    )
    cache_salt_per_key: bool = Field(
        False,
        description="Give each API key a prefix cache of its own, so that none learns from timing what another sends; "
        "needs api_key.",
    )
    admin_uds: str | None = Field(
        None, description="Unix socket for admin routes; without it and admin_port there are none."
    )
    admin_port: int | None = Field(
        None, ge=0, le=65535, description="Port of 127.0.0.1 for admin routes; needs an admin key."
    )
    admin_key: list[str] = Field(
        default_factory=list, description="Keys for the admin routes, which do not accept the keys of api_key."
    )
    rpc_methods: list[str] = Field(
        default_factory=list, description="Worker methods that the admin route /collective_rpc may call."
    )
    weights_root: str | None = Field(
        None,
        description="Folder from which /update_weights may read other checkpoints; default: only the model's "
        "own folder.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list, description="Origins whose pages may call the server from a browser."
    )
    allowed_methods: list[str] = Field(["*"], description="HTTP methods that pages of other origins may use.")
    allowed_headers: list[str] = Field(["*"], description="Request headers that pages of other origins may send.")
    allow_credentials: bool = Field(
        False, description="Let pages of other origins send cookies; allowed_origins must then name them."
    )
    middleware: list[str] = Field(
        default_factory=list,
        description="ASGI middleware, by import path: classes, or functions of (request, call_next).",
    )
    root_path: str = Field("", description="Path under which a proxy serves this server.")
    public_metrics: bool = Field(False, description="Answer /metrics without a key.")
    tokens_only: bool = Field(
        False,
        description="Load no tokenizer, and serve only POST /inference/v1/generate, which takes and gives token "
        "ids, and "
        "operators' routes.",
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="Answer GET /tokenizer_info with the tokenizer's settings and the chat template."
    )
    openapi: bool = Field(True, description="Describe the routes at /openapi.json.")
    page: bool = Field(True, description="Serve the web page at /.")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Largest request body in bytes.")
    max_head_bytes: int = Field(
        64 << 10, ge=4096, le=16 << 20, description="Most bytes of a request's line and headers."
    )
    max_headers: int = Field(256, ge=16, le=4096, description="Most headers of a request.")
    max_upload_bytes: int = Field(100 << 20, ge=1024, description="Largest file that a client may send, in bytes.")
    max_messages: int = Field(2048, ge=1, description="Most messages of a chat.")
    max_prompts: int = Field(256, ge=1, description="Most prompts in a completion request.")
    max_inputs: int = Field(2048, ge=1, description="Most inputs of one embedding, pooling, score or rerank request.")
    max_n: int = Field(64, ge=1, description="Most outputs of one prompt (n).")
    max_outputs: int = Field(
        1024, ge=1, description="Most outputs of one completion request: its prompts times n (or best_of)."
    )
    max_stop: int = Field(16, ge=1, description="Most stop strings of a request.")
    max_stop_length: int = Field(256, ge=1, description="Most characters of a stop string or bad word.")
    strict_fields: bool = Field(False, description="Refuse unknown request fields instead of ignoring them.")
    trust_request_chat_template: bool = Field(False, description="Let requests bring their own chat template.")
    isolate_chat_template: bool = Field(
        False,
        description="Render the model's own chat template in a bounded process as well; for models that you do "
        "not trust.",
    )
    chat_template_seconds: float = Field(
        5.0, gt=0, description="Seconds that a chat template in a bounded process may take."
    )
    chat_template_bytes: int = Field(
        256 << 20, ge=1 << 24, description="Bytes of memory that a chat template in a bounded process may take."
    )
    return_tokens_as_token_ids: bool = Field(
        False, description='Show tokens as "token_id:N" in log-probabilities, whatever a request asks for.'
    )
    response_role: str = Field("assistant", description="Role of the messages that the model generates.")
    enable_auto_tool_choice: bool = Field(
        True, description="Let the model decide whether it calls tools (tool_choice auto)."
    )
    tool_call_parser: str = Field(
        "auto",
        description="Tool parser plugin, named after the model's format of calls; auto: chosen by model type or "
        "template; none: none.",
    )
    reasoning_parser: str | None = Field(None, description="Reasoning parser plugin; default: none.")
    forced_call_parser: str = Field(
        "json",
        description="Tool parser plugin for calls that a request demands, if the model's own parser has no grammar.",
    )
    tool_parser_plugin: str | None = Field(None, description="Python file with hooks that offer tool parsers.")
    reasoning_parser_plugin: str | None = Field(
        None, description="Python file with hooks that offer reasoning parsers."
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        True, description="Leave tools out of the prompt when tool_choice is none."
    )
    enable_prompt_tokens_details: bool = Field(False, description="Report cached prompt tokens in usage.")
    enable_force_include_usage: bool = Field(False, description="Report usage in every stream.")
    enable_request_id_headers: bool = Field(
        False, description="Answer with X-Request-Id: the request's own, else a new one."
    )
    tool_server: list[str] = Field(
        default_factory=list,
        description="MCP servers for built-in tools of /v1/responses: LABEL=URL, or HOST:PORT; none: no such tools.",
    )
    api_server_count: int = Field(1, ge=1, le=64, description="API processes that share the port.")
    max_requests_per_key: int | None = Field(
        None, ge=1, description="Most requests of one API key that are under way at once; more are refused with 429."
    )
    max_requests_per_minute: int | None = Field(
        None, ge=1, description="Most requests of one API key in a minute; more are refused with 429."
    )
    max_outputs_per_key: int | None = Field(
        None,
        ge=1,
        description="Most outputs of one API key that are under way at once, n for each prompt; more are "
        "refused with 429.",
    )
    max_tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Most tokens of prompts and outputs of one API key in a minute, counted as they are "
        "computed; while none "
        "are left, requests are refused with 429.",
    )
    max_request_seconds: float | None = Field(
        None, gt=0, description="Seconds after which a request ends with 504; clients may ask for fewer."
    )
    drain_seconds: float = Field(
        30.0, ge=0, description="Seconds that running requests have to end after a stop signal."
    )
    ready_seconds: float = Field(600.0, gt=0, description="Seconds within which the engine must be ready.")
    max_engine_restarts: int = Field(
        3, ge=0, description="Deaths of the engine in a row after which it is started again; one more ends the server."
    )
    standby_engine: bool = Field(
        True,
        description="Keep a second process with its libraries loaded (about 200 MB of memory, none on the device), "
        "which becomes the engine when the first one dies.",
    )
    hang_seconds: float = Field(
        300.0,
        gt=0,
        description="Seconds without a finished step after which a working engine counts as hung and is restarted.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity that is logged."
    )
    uvicorn_log_level: Literal["trace", "debug", "info", "warning", "error", "critical"] | None = Field(
        None,
        description="Least severity of the HTTP server's own lines, such as the one per request; default: log_level.",
    )
    disable_access_log: bool = Field(False, description="Log no line for each request.")

    @model_validator(mode="after")
    def _check_admin(self) -> Self:
        if self.admin_port is not None and not self.admin_key:
            raise ValueError("admin_port is open to every user of this machine; set admin_key, or use admin_uds")
        if self.admin_port is not None and self.admin_uds is not None:
            raise ValueError("admin_port and admin_uds exclude each other")
        return self

    @model_validator(mode="after")
    def _check_rpc_methods(self) -> Self:
        wrong = next((name for name in self.rpc_methods if name in _ENGINE_ONLY or name.startswith("_")), None)
        if wrong is not None:
            raise ValueError(f"rpc_methods may not name {wrong!r}: only the engine calls it")
        if self.rpc_methods and self.admin_port is None and self.admin_uds is None:
            raise ValueError("rpc_methods needs admin_uds or admin_port, where /collective_rpc is")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        needy = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh")
        alone = next((name for name in needy if getattr(self, name)), None)
        if alone is not None and self.ssl_certfile is None:
            raise ValueError(f"{alone} needs ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("ssl_cert_reqs needs ssl_ca_certs, to check clients' certificates against")
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            raise ValueError(
                "ssl_ca_certs needs ssl_cert_reqs, which is 0 (clients are asked for no certificate): set it to 2 "
                "(all must show one) or 1 (those that show one are checked)"
            )
        return self

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ValueError("allow_credentials needs allowed_origins that name the origins, not '*'")
        return self

    @model_validator(mode="after")
    def _check_salt(self) -> Self:
        if self.cache_salt_per_key and not self.api_key:
            raise ValueError("cache_salt_per_key needs api_key: without keys all clients are one")
        return self

    @field_validator("api_key", "admin_key")
    @classmethod
    def _refuse_empty_keys(cls, keys: list[str], info: ValidationInfo) -> list[str]:
        """Refuses an empty key (an unset variable on a command line), which any empty header would match."""
        if any(not key.strip() for key in keys):
            raise ValueError(f"{info.field_name} must not be empty; leave it out where none is needed")
        return keys
