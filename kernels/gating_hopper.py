"""What experts compute between their products, in Gluon; the plain twin is `gating`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _logistic(x):
    """1 / (1 + exp(-x)) without overflow."""
    small = gl.exp(-gl.abs(x))
    return gl.where(x >= 0, 1.0, small) / (1.0 + small)


@gluon.jit
def _active(x, FUNCTION: gl.constexpr, ALPHA: gl.constexpr):
    if FUNCTION == "silu":
        x = x * _logistic(x if ALPHA == 1.0 else ALPHA * x)
    elif FUNCTION == "gelu":
        x = x * (0.5 + 0.5 * gl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        x = x * _logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = gl.maximum(x, 0.0)
        if FUNCTION == "relu2":
            x = x * x
    return x


@gluon.jit
def gate_times(gate, up, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr, LIMIT: gl.constexpr):
    """What a `Gating` makes of both, in float32."""
    if LIMIT > 0.0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    if SHIFT != 0.0:
        up += SHIFT
    return _active(gate, FUNCTION, ALPHA) * up


@gluon.jit
def gate_alone(up, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """What a `Gating` without a gate makes of its only values, in float32."""
    if LIMIT > 0.0:
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    return _active(up, FUNCTION, ALPHA)
