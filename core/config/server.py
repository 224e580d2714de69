"""The settings of the HTTP server: addresses, keys, bounds of requests, parsers, limits per key, ends and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from frame.quoting import quoted

from .section import Section, setting

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

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on.", ge=0, le=65535)
    uds: str | None = setting(None, "Unix socket to listen on in place of host and port.")
    api_key: list[str] = setting([], "Keys, of which each request must have one; default: requests need none.")
    ssl_certfile: str | None = setting(None, "Certificate (PEM) to serve https with; default: http.")
    ssl_keyfile: str | None = setting(None, "The certificate's private key (PEM), if that is a file of its own.")
    ssl_ca_certs: str | None = setting(
        None, "Certificates (PEM) of the authorities that sign clients' certificates; needs ssl_cert_reqs."
    )
    ssl_cert_reqs: int = setting(
        0, "Whether clients must show a certificate: 0 no, 1 only valid ones if any, 2 always.", ge=0, le=2
    )
    enable_ssl_refresh: bool = setting(False, "Read certificates, keys and ssl_ca_certs again when their files change.")
    cache_salt_per_key: bool = setting(
        False,
        "Give each API key a prefix cache of its own, so that none learns from timing what another sends; needs "
        "api_key.",
    )
    admin_uds: str | None = setting(
        None, "Unix socket for admin routes; default: no such routes, unless admin_port is set."
    )
    admin_port: int | None = setting(None, "Port of 127.0.0.1 for admin routes; needs admin_key.", ge=0, le=65535)
    admin_key: list[str] = setting([], "Keys for the admin routes, which do not accept the keys of api_key.")
    rpc_methods: list[str] = setting([], "Worker methods that the admin route /collective_rpc may call.")
    weights_root: str | None = setting(
        None, "Folder from which /update_weights may read other checkpoints; default: only the model's own folder."
    )
    allowed_origins: list[str] = setting([], "Origins whose pages may call the server from a browser.")
    allowed_methods: list[str] = setting(["*"], "HTTP methods that pages of other origins may use.")
    allowed_headers: list[str] = setting(["*"], "Request headers that pages of other origins may send.")
    allow_credentials: bool = setting(
        False, "Let pages of other origins send cookies; allowed_origins must then name them."
    )
    middleware: list[str] = setting(
        [], "ASGI middleware, by import path: classes, or functions of (request, call_next)."
    )
    root_path: str = setting("", "Path under which a proxy serves this server.")
    public_metrics: bool = setting(False, "Answer /metrics without a key.")
    tokens_only: bool = setting(
        False,
        "Load no tokenizer, and serve only POST /inference/v1/generate, which takes and gives token ids, and "
        "operators' routes.",
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, "Answer GET /tokenizer_info with the tokenizer's settings and the chat template."
    )
    openapi: bool = setting(True, "Describe the routes in /openapi.json.")
    page: bool = setting(True, "Serve the web page at /.")
    max_body_bytes: int = setting(8 << 20, "Largest request body in bytes.", ge=1024)
    max_head_bytes: int = setting(64 << 10, "Most bytes of a request's line and headers.", ge=4096, le=16 << 20)
    max_headers: int = setting(256, "Most headers of a request.", ge=16, le=4096)
    max_upload_bytes: int = setting(100 << 20, "Largest file that a client may send, in bytes.", ge=1024)
    max_messages: int = setting(2048, "Most messages of a chat.", ge=1)
    max_prompts: int = setting(256, "Most prompts in a completion request.", ge=1)
    max_inputs: int = setting(2048, "Most inputs of one embedding, pooling, score or rerank request.", ge=1)
    max_n: int = setting(64, "Most outputs of one prompt (n).", ge=1)
    max_outputs: int = setting(1024, "Most outputs of one completion request: its prompts times n (or best_of).", ge=1)
    max_stop: int = setting(16, "Most stop strings of a request.", ge=1)
    max_stop_length: int = setting(256, "Most characters of a stop string or bad word.", ge=1)
    strict_fields: bool = setting(False, "Refuse unknown request fields instead of ignoring them.")
    trust_request_chat_template: bool = setting(False, "Let requests bring their own chat template.")
    isolate_chat_template: bool = setting(
        False,
        "Render the model's own chat template in a bounded process, as those of requests are; for models that you do "
        "not trust.",
    )
    chat_template_seconds: float = setting(5.0, "Seconds that a chat template in a bounded process may take.", gt=0)
    chat_template_bytes: int = setting(
        256 << 20, "Bytes of memory that a chat template in a bounded process may take.", ge=1 << 24
    )
    return_tokens_as_token_ids: bool = setting(
        False, 'Show tokens as "token_id:N" in log-probabilities, whatever a request asks for.'
    )
    response_role: str = setting("assistant", "Role of the messages that the model generates.")
    enable_auto_tool_choice: bool = setting(True, "Let the model decide whether it calls tools (tool_choice auto).")
    tool_call_parser: str = setting(
        "auto",
        "Tool parser plugin, named after the model's format of calls; auto: chosen by model type or chat template; "
        "none: calls stay text.",
    )
    reasoning_parser: str | None = setting(None, "Reasoning parser plugin; default: none.")
    forced_call_parser: str = setting(
        "json", "Tool parser plugin for tool calls that a request demands where the model's own parser has no grammar."
    )
    tool_parser_plugin: str | None = setting(None, "Python file whose hooks offer tool parsers.")
    reasoning_parser_plugin: str | None = setting(None, "Python file whose hooks offer reasoning parsers.")
    exclude_tools_when_tool_choice_none: bool = setting(True, "Leave tools out of the prompt when tool_choice is none.")
    enable_prompt_tokens_details: bool = setting(False, "Report cached prompt tokens in usage.")
    enable_force_include_usage: bool = setting(False, "Report usage in every stream.")
    enable_request_id_headers: bool = setting(
        False, "Send the header X-Request-Id with each response: the request's own, else a new one."
    )
    tool_server: list[str] = setting(
        [], "MCP servers for built-in tools of /v1/responses: LABEL=URL, or HOST:PORT; default: no such tools."
    )
    api_server_count: int = setting(1, "API processes that share the port.", ge=1, le=64)
    max_requests_per_key: int | None = setting(
        None, "Most requests of one API key that are under way at once; more are refused with 429.", ge=1
    )
    max_requests_per_minute: int | None = setting(
        None, "Most requests of one API key in a minute; more are refused with 429.", ge=1
    )
    max_outputs_per_key: int | None = setting(
        None,
        "Most outputs of one API key that are under way at once, n for each prompt; more are refused with 429.",
        ge=1,
    )
    max_tokens_per_minute: int | None = setting(
        None,
        "Most tokens of prompts and outputs of one API key in a minute, counted when they are computed; while none "
        "are left, requests are refused with 429.",
        ge=1,
    )
    max_request_seconds: float | None = setting(
        None, "Seconds after which a request ends with 504; clients may ask for fewer.", gt=0
    )
    drain_seconds: float = setting(30.0, "Seconds that running requests have to end after a stop signal.", ge=0)
    ready_seconds: float = setting(600.0, "Seconds that the engine may take to start.", gt=0)
    max_engine_restarts: int = setting(
        3, "Most restarts of an engine that dies again and again; when it dies once more, the server ends.", ge=0
    )
    standby_engine: bool = setting(
        True,
        "Keep a second process with its libraries loaded (about 200 MB of memory, none on the device), which "
        "becomes the engine when the first one dies.",
    )
    hang_seconds: float = setting(
        300.0, "Seconds without a finished step after which a working engine counts as hung and is restarted.", gt=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severity of frame's log lines.")
    uvicorn_log_level: Literal["trace", "debug", "info", "warning", "error", "critical"] | None = setting(
        None, "Least severity of the HTTP server's own lines, such as the one per request; default: log_level."
    )
    disable_access_log: bool = setting(False, "Log no line for each request.")

    def contradictions(self) -> Iterator[str]:
        for name in ("api_key", "admin_key"):
            # an unset variable on a command line makes an empty key, which any empty header would match
            if any(not key.strip() for key in getattr(self, name)):
                yield f"{name} must not be empty; leave it out where none is needed"
        if self.cache_salt_per_key and not self.api_key:
            yield "cache_salt_per_key needs api_key: without keys all clients are one"
        if self.admin_port is not None and not self.admin_key:
            yield "admin_port is open to every user of this machine; set admin_key, or use admin_uds"
        if self.admin_port is not None and self.admin_uds is not None:
            yield "admin_port and admin_uds exclude each other"
        wrong = next((name for name in self.rpc_methods if name in _ENGINE_ONLY or name.startswith("_")), None)
        if wrong is not None:
            yield f"rpc_methods may not name {quoted(wrong)}: only the engine calls it"
        if self.rpc_methods and self.admin_port is None and self.admin_uds is None:
            yield "rpc_methods needs admin_uds or admin_port, where /collective_rpc is"
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            yield "allow_credentials needs allowed_origins that name the origins, not '*'"
        yield from self._contradictions_of_tls()

    def _contradictions_of_tls(self) -> Iterator[str]:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh"):
            if getattr(self, name) and self.ssl_certfile is None:
                yield f"{name} needs ssl_certfile"
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            yield "ssl_cert_reqs needs ssl_ca_certs, to check clients' certificates against"
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            yield (
                "ssl_ca_certs needs ssl_cert_reqs, which is 0 (clients are asked for no certificate): set it to 2 "
                "(all must show one) or 1 (those that show one are checked)"
            )
