"""The flags of `frame route`, and what they mean. The HTTP server's are those of `frame serve`."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from frame.core.config.errors import ConfigError
from frame.core.config.flag_parser import FlagParser, read_option
from frame.core.config.flags import add_setting_flags, config_from_arguments
from frame.core.config.leaves import leaves
from frame.quoting import quoted

from .server_list import ListedServer, ServerFile, listed

if TYPE_CHECKING:
    from frame.core.config.tree import FrameConfig

_PORT = 8080
#: Settings of `frame serve` that a front has, too.
_SHARED = (
    "host", "port", "uds", "api_key", "public_metrics", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs",
    "enable_ssl_refresh", "max_body_bytes", "max_upload_bytes", "max_head_bytes", "max_headers", "page",
    "drain_seconds", "log_level", "disable_access_log",
)  # fmt: skip


@dataclass(frozen=True)
class RouteSettings:
    """What a front is to do. `config` holds the settings of its HTTP server and the options of plugins."""

    config: FrameConfig
    servers: list[ListedServer]
    file: ServerFile | None
    policy: str
    server_key: str | None
    max_retries: int
    health_seconds: float
    connect_seconds: float
    clients_params: bool = False
    curve_key: bytes | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags to a parser, which is a `FlagParser`."""
    add = parser.add_argument
    add("server", nargs="*", metavar="URL", help="Addresses of servers, as in http://10.0.0.1:8000.")
    add("--servers", metavar="FILE", help="File with an address a line, which is read again when it changes.")
    add(
        "--prefill", nargs="+", default=[], action="extend", metavar="URL",
        help="Servers that compute prompts only, whose KV the others fetch.",
    )  # fmt: skip
    add(
        "--allow-kv-transfer-params", action="store_true",
        help="Let clients say by kv_transfer_params from where a server fetches KV, where some compute prompts only.",
    )  # fmt: skip
    add(
        "--kv-events", nargs="+", default=[], action="extend", metavar="ADDRESS",
        help="Where each server publishes KV events, in the order of the servers, as in tcp://10.0.0.1:5557.",
    )  # fmt: skip
    add(
        "--kv-events-replay", nargs="+", default=[], action="extend", metavar="ADDRESS",
        help="Where each server sends KV events again that were missed.",
    )  # fmt: skip
    add("--kv-events-ranks", metavar="N", help="Data ranks of each server (default: 1).")
    add("--kv-events-curve-key", metavar="KEY", help="Public CURVE key of servers that encrypt their KV events.")
    add("--policy", default="auto", metavar="NAME", help="Route policy plugin (default: auto, which is least-load).")
    add("--server-key", metavar="KEY", help="Key for the servers, which they get in place of the clients' keys.")
    add("--max-retries", default="2", metavar="N", help="Most further servers for a request (default: %(default)s).")
    add("--health-seconds", default="1", metavar="X", help="Seconds between two looks (default: %(default)s).")
    add(
        "--connect-seconds", default="5", metavar="X", help="Seconds that a connection may take (default: %(default)s)."
    )
    known = {**leaves(), "port": replace(leaves()["port"], default=_PORT)}
    add_setting_flags(parser, [known[name] for name in _SHARED])
    take_plugin_options(parser)


def take_plugin_options(parser: argparse.ArgumentParser) -> None:
    """Has a parser, which is a `FlagParser`, read --plugin.NAME.FIELD VALUE."""
    cast("FlagParser", parser).mappings["plugin"] = read_option


def settings_of(arguments: argparse.Namespace) -> RouteSettings:
    """The settings of parsed arguments; raises `ConfigError`."""
    file, ranks = None, arguments.kv_events_ranks
    if arguments.servers is None:
        servers = listed(
            arguments.server,
            arguments.prefill,
            arguments.kv_events,
            arguments.kv_events_replay,
            "1" if ranks is None else ranks,
        )
        for flag, value in (("--kv-events-ranks", ranks), ("--kv-events-curve-key", arguments.kv_events_curve_key)):
            if value is not None and not arguments.kv_events:
                raise ConfigError(f"{flag} needs --kv-events, the addresses at which servers publish KV events")
    elif arguments.server or arguments.prefill or arguments.kv_events or arguments.kv_events_replay:
        raise ConfigError("--servers FILE and addresses on the command line exclude each other")
    elif ranks is not None:
        raise ConfigError("--servers FILE says how many data ranks a server has, by ranks=N behind its events=ADDRESS")
    else:
        file = ServerFile(arguments.servers)
        servers = file.read()
    key = arguments.server_key
    if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
        raise ConfigError("--server-key must be a key of ASCII characters, and not empty")
    values = {} if hasattr(arguments, "port") else {"port": _PORT}
    return RouteSettings(
        config=config_from_arguments(arguments, **values),
        servers=servers,
        file=file,
        policy=arguments.policy,
        server_key=key,
        max_retries=_whole("--max-retries", arguments.max_retries),
        health_seconds=_seconds("--health-seconds", arguments.health_seconds),
        connect_seconds=_seconds("--connect-seconds", arguments.connect_seconds),
        clients_params=arguments.allow_kv_transfer_params,
        curve_key=_curve_key(arguments.kv_events_curve_key),
    )


def _curve_key(text: str | None) -> bytes | None:
    """The key in the 40 characters of Z85."""
    if text is not None and not (len(text) == 40 and text.isascii() and text.isprintable() and " " not in text):
        raise ConfigError("--kv-events-curve-key must be a public CURVE key of 40 characters")
    return None if text is None else text.encode()


def _whole(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 3):
        raise ConfigError(f"{flag} must be a whole number from 0 to 99, got {quoted(text)}")
    return int(text)


def _seconds(flag: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.05 <= found <= 3600:
        raise ConfigError(f"{flag} must be seconds from 0.05 to 3600, got {quoted(text)}")
    return found
