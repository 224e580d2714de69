"""`frame serve` over the fake engine: the same flags, parent and API process."""

from __future__ import annotations

import sys
from pathlib import Path

from frame.core.cli.serve import serve_config
from frame.core.config.flag_parser import FlagParser
from frame.core.config.flags import add_config_flags
from frame.core.processes.launcher import launch
from frame.core.startup.logging import configure_logging

if __name__ == "__main__":
    parser = FlagParser(prog="fake serve")
    add_config_flags(parser)
    configure_logging("info")
    config = serve_config(parser.parse_args())
    raise SystemExit(launch(config, [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]))
