"""The CUDA platform: memory by profile, kernels in place of ops, and captured steps.

Tuned on Hopper; works from compute capability 8.0. Knows no model and no request.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import torch

from frame.interfaces import (
    Collectives,
    HeldMemory,
    HeldPiece,
    Kernels,
    Memory,
    Placement,
    Platform,
    PlatformSetup,
    PlatformSpec,
    Steps,
    Streams,
    TrialRun,
)
from frame.ops import Ops

from ..options import CudaOptions
from .agreement import Agreement, CapturePeers
from .collectives import CudaCollectives
from .compile.compiler import without_lines
from .compile.known_starts import KnownStart
from .compile.rehearsal import can_rehearse, rehearse as compile_kernels
from .compile.triton_files import read_triton
from .graphs.capture import Capturer
from .graphs.cuda_graphs import CudaGraphs
from .graphs.piecewise import PiecewiseGraphs
from .graphs.piecewise_capture import PieceCapturer
from .graphs.shapes import CudaShapes
from .laps import Laps
from .memory import CudaMemory
from .ops import CudaOps
from .streams import CudaStreams

if TYPE_CHECKING:
    from .compile.absent_cuda import CompilingAhead

logger = logging.getLogger("frame.platforms.cuda")

#: Kernels that attention brings, imported while Triton's files are still hashed: the forked process needs them first.
_ATTENTION = ("attention", "cascade", "decode", "prefill")


class CudaPlatform(Platform):
    """One NVIDIA device per worker."""

    device_type = "cuda"
    default_num_seqs = 512
    default_num_batched_tokens = 8192

    def __init__(self, setup: PlatformSetup, options: CudaOptions | None = None) -> None:
        super().__init__(setup, options or CudaOptions())
        self.agreement, self._peers = Agreement(), CapturePeers()
        self._pieces: PiecewiseGraphs | None = None
        self._collectives: CudaCollectives | None = None
        self._ops = CudaOps(self.options.hopper_products, self.options.hopper_experts, self.device)
        self._open()

    def _open(self) -> None:
        """Selects the device without creating a context, which comes with the first memory or stream."""
        if self.local_rank and self.local_rank >= (count := torch.cuda.device_count()):
            raise ValueError(
                f"there is no CUDA device {self.local_rank} for this worker: torch sees {count}; lower "
                "tensor_parallel_size or pipeline_parallel_size, or let CUDA_VISIBLE_DEVICES name more"
            )
        torch.cuda.set_device(self.device)
        # what an earlier engine of this process left must not count against this one
        if torch.cuda.memory_reserved(self.device):
            gc.collect()
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    @classmethod
    def probe(cls) -> str | None:
        if torch.version.cuda is not None:
            read_triton()  # imported while torch initialises the driver
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        capability = torch.cuda.get_device_capability()
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
        return None

    @classmethod
    def num_devices(cls) -> int | None:
        return torch.cuda.device_count()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank)

    def supports(self, spec: PlatformSpec) -> str | None:
        reasons = []
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"dtype {spec.dtype} is not one of float32, bfloat16, float16")
        return "; ".join(reasons) or None

    def ops(self) -> Ops:
        return self._ops

    def streams(self) -> Streams:
        return self._streams

    def memory(self) -> Memory:
        return self._memory

    def held_memory(self, pieces: Sequence[HeldPiece] = ()) -> HeldMemory:
        from .held_memory import CudaHeldMemory

        total = torch.cuda.get_device_properties(self.device).total_memory
        self._memory.held = CudaHeldMemory(self.device, total, pieces)
        return self._memory.held

    def collectives(self, placement: Placement) -> Collectives:
        self._collectives = collectives = CudaCollectives(
            placement,
            self.device,
            self._ops,
            shares_memory=self.options.peer_memory,
            copies_sums=self.options.copied_sums,
        )
        mesh, rank = placement.mesh, placement.rank
        if len(alike := mesh.ranks("tensor", rank)) > 1:  # other stages launch other products
            self.agreement = Agreement(collectives.host("agreement", alike), alike, rank)
        self._peers.stage = self._peers.all = self.agreement
        if len(stage := mesh.stage_ranks(rank)) > len(alike):
            self._peers.stage = self._peers.all = Agreement(collectives.host("stage", stage), stage, rank)
        if mesh.size > len(stage):
            everyone = range(mesh.size)
            self._peers.all = Agreement(collectives.host("captures", everyone), everyone, rank)
        return collectives

    @contextmanager
    def unconnected(self) -> Iterator[None]:
        """Within the context collectives do nothing: what runs there may differ between workers."""
        if self._collectives is not None:
            self._collectives.is_silent = True
        try:
            yield
        finally:
            if self._collectives is not None:
                self._collectives.is_silent = False

    @cached_property
    def _streams(self) -> Streams:
        return CudaStreams(self.device)

    @cached_property
    def _memory(self) -> CudaMemory:
        captured = self.options.capture_prompts and self.options.graph_sizes and not self.setup.enforce_eager
        return CudaMemory(self.device, self._captured_share if captured else lambda: 0.0)

    def _captured_share(self) -> float:
        """Tokens of the largest step with prompts that is captured, as a share of the largest step's."""
        return max(self._pieces.sizes, default=0) / self._max_tokens if self._pieces is not None else 0.0

    @property
    def _max_tokens(self) -> int:
        return self.setup.max_num_batched_tokens

    def settle_products(self) -> None:
        """Chooses the kernels of all products that the warm-up met; called once they are compiled."""
        self._ops.products.settle(self._max_tokens, self.agreement.first)

    def steps(self) -> Steps:
        kernels = CudaKernels(self)
        if self.setup.enforce_eager or not self.options.graph_sizes:
            return Steps(kernels=kernels)
        self._pieces = PiecewiseGraphs(PieceCapturer(self.device), self._peers)
        graphs = CudaGraphs(
            Capturer(self.device),
            self.options,
            min(self.setup.max_num_seqs, self._max_tokens),
            pieces=self._pieces,
            max_tokens=self._max_tokens,
            max_model_len=self.setup.max_model_len,
            deterministic=self.setup.deterministic,
            shares_prefixes=self.setup.shares_prefixes,
            serves_adapters=self.setup.serves_adapters,
            sums=self.setup.placement.mesh.tensor > 1,
            peers=self._peers,
        )
        return Steps(CudaShapes(graphs), graphs, kernels, compiler=graphs)


class CudaKernels(Kernels):
    """Triton's kernels, compiled many at a time."""

    #: Whether an engine of this process has begun to, or had no need to.
    _compiled_ahead: ClassVar[bool] = False

    def __init__(self, platform: CudaPlatform) -> None:
        self._platform = platform
        self._ahead: CompilingAhead | None = None
        self._start: KnownStart | None = None
        self._known = False

    def compile_ahead(self, rehearse: Callable[[Platform], None]) -> None:
        """Starts compiling in a process of its own, before there is a context on the device that it would inherit.

        Only for the first engine of a process: where an engine had a context, torch fails in a fork ("initialization
        error"), and most kernels are in Triton's cache by then. Nor where an earlier start was as this one.
        """
        if not can_rehearse():
            return
        self._start = KnownStart(self._platform.setup.steps_key, self._platform.device)
        self._known = self._start.is_noted()
        first, CudaKernels._compiled_ahead = not CudaKernels._compiled_ahead, True
        if first and not self._known:
            from .compile.absent_cuda import CompilingAhead

            for name in _ATTENTION:
                with suppress(ImportError):  # Gluon is experimental: another Triton may lack what is imported
                    import_module(f"frame.kernels.{name}")
            read_triton()()  # so that the forked process has the hash too
            properties = torch.cuda.get_device_properties(self._platform.device)
            self._ahead = CompilingAhead(self._platform, properties, rehearse)

    def prepare(self, run: TrialRun) -> None:
        """Compiles the kernels of all steps at once, then runs the steps, so that libraries choose their algorithms.

        While another process compiles, the steps run without Triton's kernels. Where it has done so by now, or an
        earlier start was as this one, kernels are loaded when they are launched. Last, products are measured that no
        earlier start has measured.
        """
        ahead, self._ahead = self._ahead, None
        found = " of an earlier start" if self._known else ""
        if ahead is not None and ahead.has_ended() and ahead.wait():
            found = " compiled while weights were loaded"
        laps, whole = Laps(), bool(found)
        with without_lines():
            if found:
                read_triton()()  # else two threads would hash the files
                laps.end("hash of Triton's files")
            else:
                with self._platform.unconnected():
                    whole = compile_kernels(run, None if ahead is None else ahead.wait)
                laps.end("compiled")
            run(brief=bool(found))
            laps.end("steps")
            self._platform.settle_products()
            laps.end("products")
        logger.info("kernels%s: %s", found, laps)
        if whole and self._start is not None:
            self._start.note()
