"""The default plugins: one folder for each kind, each with its hookimpl and Providers.

The entry point `defaults` in pyproject.toml names this module. Importing it imports descriptions only, no torch.
"""

from __future__ import annotations

from .adapters import frame_adapter_resolvers, frame_adapters
from .attention import frame_attention_backends
from .balancers import frame_expert_balancers
from .commands import frame_commands
from .connectors import frame_kv_connectors
from .endpoints import frame_endpoints
from .exchanges import frame_expert_exchanges
from .executors import frame_executors
from .grammars import frame_grammars
from .loaders import frame_weight_loaders
from .models import frame_models
from .parsers import frame_reasoning_parsers, frame_tool_parsers
from .platforms import frame_platforms
from .poolers import frame_poolers
from .processors import frame_logits_processors
from .quantization import frame_quantizations
from .routing import frame_route_policies
from .schedulers import frame_schedulers
from .sinks import frame_metrics_sinks
from .sources import frame_model_sources
from .speculators import frame_speculators
from .tiers import frame_tier_policies
from .tokenizers import frame_tokenizers

__all__ = [
    "frame_adapter_resolvers",
    "frame_adapters",
    "frame_attention_backends",
    "frame_commands",
    "frame_endpoints",
    "frame_executors",
    "frame_expert_balancers",
    "frame_expert_exchanges",
    "frame_grammars",
    "frame_kv_connectors",
    "frame_logits_processors",
    "frame_metrics_sinks",
    "frame_model_sources",
    "frame_models",
    "frame_platforms",
    "frame_poolers",
    "frame_quantizations",
    "frame_reasoning_parsers",
    "frame_route_policies",
    "frame_schedulers",
    "frame_speculators",
    "frame_tier_policies",
    "frame_tokenizers",
    "frame_tool_parsers",
    "frame_weight_loaders",
]
