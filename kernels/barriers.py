"""Gluon's barrier by either of its names: of the threads of a warpgroup, or of a program that is not specialised."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

#: Triton 3.7 gave it another name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
