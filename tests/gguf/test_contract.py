"""The gguf plugins keep the contracts of their kinds."""

from __future__ import annotations

from frame.testing.quantization_suite import QuantizationSuite
from frame.testing.source_suite import ModelSourceSuite


class TestGgufWeights(QuantizationSuite):
    plugin = "gguf"


class TestGgufSource(ModelSourceSuite):
    plugin = "gguf"
    absent = "frame-tests/absent:Q4_0"


class TestHub(ModelSourceSuite):
    plugin = "hub"
