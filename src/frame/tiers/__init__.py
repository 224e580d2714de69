"""Tiers: memory that keeps KV blocks when the device has given them away. Here is what plugins of theirs implement."""
