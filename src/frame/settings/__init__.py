"""What commands and plugins use of frame's configuration: its errors, flags and checkpoints, and the plugin registry.

The imports below are the list of names; each is done on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.lazy import lazy_names

if TYPE_CHECKING:
    from frame.core.cli.main import commands as commands
    from frame.core.config.checkpoint import (
        Checkpoint as Checkpoint,
        find_folder as find_folder,
        read_checkpoint as read_checkpoint,
    )
    from frame.core.config.errors import (
        ConfigError as ConfigError,
        near as near,
    )
    from frame.core.config.flag_parser import (
        FlagParser as FlagParser,
        read_json as read_json,
        read_mapping as read_mapping,
    )
    from frame.core.config.flags import (
        add_config_flags as add_config_flags,
        config_from_arguments as config_from_arguments,
    )
    from frame.core.config.flat import (
        from_flat as from_flat,
    )
    from frame.core.config.json_file import (
        check_files as check_files,
    )
    from frame.core.config.leaves import (
        leaves as leaves,
    )
    from frame.core.config.model_config import (
        ModelConfig as ModelConfig,
    )
    from frame.core.config.secret_file import (
        read_secret as read_secret,
    )
    from frame.core.config.tree import (
        FrameConfig as FrameConfig,
    )
    from frame.core.interfaces.provider import (
        PluginError as PluginError,
    )
    from frame.core.plugin_host.kinds import (
        KINDS as KINDS,
    )
    from frame.core.plugin_host.model_choice import (
        read_model_config as read_model_config,
    )
    from frame.core.plugin_host.model_sources import (
        fetch_model as fetch_model,
    )
    from frame.core.plugin_host.plugin_settings import (
        ENGINE_PLUGINS as ENGINE_PLUGINS,
        TEXT_PLUGINS as TEXT_PLUGINS,
    )
    from frame.core.plugin_host.registry import (
        Registry as Registry,
    )
    from frame.layout.parts import (
        EngineParts as EngineParts,
        RankPart as RankPart,
        engine_parts as engine_parts,
    )
    from frame.offline.routes import open_routes as open_routes
    from frame.served.folders import stray_link as stray_link
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
