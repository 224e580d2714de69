"""Settings of data parallelism: how many engines serve the model, and which of them this server starts."""

from __future__ import annotations

from collections.abc import Iterator

from .section import Section, setting

#: Ranks of an axis, above which a number is a mistake, and engines of one server.
MOST_RANKS, MOST_LOCAL = 4096, 64


class DataParallelConfig(Section):
    """Engines that serve the same model, each with devices, a KV cache and requests of its own.

    An engine is one data rank; engines that this server starts are numbered from `first_rank` on.
    """

    data_parallel_size: int = setting(1, "Engines that serve the model.", ge=1, le=MOST_RANKS)
    data_parallel_size_local: int | None = setting(
        None, "How many of the engines this server starts; default: all, or one with data_parallel_rank.", ge=1
    )
    data_parallel_start_rank: int | None = setting(
        None, "Number of the first engine that this server starts, counted from 0; default: 0.", ge=0
    )
    data_parallel_rank: int | None = setting(
        None,
        "Start only the engine of this number; a load balancer in front of the servers of all engines divides the "
        "requests.",
        ge=0,
    )
    data_parallel_rank_local: int | None = setting(
        None,
        "Place of that engine on this machine, counted from 0: its devices follow those of the engines before it; "
        "default: 0.",
        ge=0,
    )
    data_parallel_external_lb: bool = setting(
        False, "A load balancer in front of one server for each engine divides the requests; needs data_parallel_rank."
    )
    data_parallel_hybrid_lb: bool = setting(
        False,
        "A load balancer in front of several servers divides the requests, and each server divides its part among "
        "its own engines; needs data_parallel_size_local.",
    )

    @property
    def first_rank(self) -> int:
        """The rank of the first engine that this server starts."""
        return self.data_parallel_rank if self.data_parallel_rank is not None else self.data_parallel_start_rank or 0

    def engine(self, rank: int) -> DataParallelConfig:
        """These settings for the engine of one of `local_ranks`."""
        local = (self.data_parallel_rank_local or 0) + rank - self.first_rank
        kept = {"data_parallel_size": self.data_parallel_size}
        return DataParallelConfig(**kept, data_parallel_rank=rank, data_parallel_rank_local=local)

    @property
    def local_ranks(self) -> range:
        """The ranks of the engines that this server starts."""
        count = 1 if self.data_parallel_rank is not None else self.data_parallel_size_local or self.data_parallel_size
        return range(self.first_rank, self.first_rank + count)

    def contradictions(self) -> Iterator[str]:
        size, ranks = self.data_parallel_size, self.local_ranks
        if ranks.stop > size:
            named = f"{ranks.start}" if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"
            yield f"data_parallel_size {size} has no rank {named}: ranks are numbered from 0"
        elif len(ranks) > MOST_LOCAL:
            yield f"a server starts at most {MOST_LOCAL} engines, and would start {len(ranks)}"
        if self.data_parallel_rank is not None:
            for name in ("data_parallel_start_rank", "data_parallel_hybrid_lb"):
                if getattr(self, name):
                    yield f"{name} is for a server of several engines, and data_parallel_rank for one: give one of them"
            if (self.data_parallel_size_local or 1) > 1:
                yield f"data_parallel_size_local {self.data_parallel_size_local}: data_parallel_rank starts one engine"
        elif self.data_parallel_rank_local is not None:
            yield "data_parallel_rank_local needs data_parallel_rank, the number of this server's engine"
        elif self.data_parallel_external_lb:
            yield "data_parallel_external_lb needs data_parallel_rank, the number of this server's engine"
        elif self.data_parallel_hybrid_lb and self.data_parallel_size_local is None:
            yield "data_parallel_hybrid_lb needs data_parallel_size_local, the number of this server's engines"
        elif len(ranks) < size and not self.data_parallel_hybrid_lb:
            yield (
                f"{len(ranks)} of {size} engines would be started here; set data_parallel_hybrid_lb where a load "
                "balancer stands in front of several servers, or data_parallel_rank for one engine a server"
            )
