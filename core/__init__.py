"""The core: schedules tokens, owns the KV cache, drives the step loop. Knows no plugin and no kernel."""
