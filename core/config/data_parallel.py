"""Settings of data parallelism: how many engines serve the model, and which of them this machine starts."""

from __future__ import annotations

from collections.abc import Iterator

from .secret_file import read_secret
from .section import Section, setting

#: Ranks of an axis, above which a number is a mistake, and engines of one server.
MOST_RANKS, MOST_LOCAL = 4096, 64


class DataParallelConfig(Section):
    """Engines that serve the same model, each with devices, a KV cache and requests of its own.

    An engine is one data rank; engines that this server starts are numbered from `first_rank` on.
    """

    data_parallel_size: int = setting(1, "Engines that serve the model.", ge=1, le=MOST_RANKS)
    data_parallel_size_local: int | None = setting(
        None, "Engines that this server starts; default: all, or one with data_parallel_rank.", ge=1, le=MOST_RANKS
    )
    data_parallel_start_rank: int | None = setting(
        None, "Number of the first engine that this server starts, counted from 0; default: 0.", ge=0, le=MOST_RANKS
    )
    data_parallel_rank: int | None = setting(
        None,
        "Start only the engine of this number; a load balancer in front of the servers of all engines divides the "
        "requests.",
        ge=0,
        le=MOST_RANKS,
    )
    data_parallel_rank_local: int | None = setting(
        None,
        "Place of that engine on this machine, counted from 0: its devices follow those of the engines before it; "
        "default: 0.",
        ge=0,
        le=MOST_RANKS,
    )
    data_parallel_external_lb: bool = setting(
        False, "A load balancer in front of one server for each engine divides the requests; needs data_parallel_rank."
    )
    data_parallel_hybrid_lb: bool = setting(
        False,
        "A load balancer in front of several servers divides the requests, and each server divides its part among "
        "its own engines; needs data_parallel_size_local.",
    )
    data_parallel_address: str = setting(
        "", "Address of the machine that serves HTTP, at which other machines offer it their engines."
    )
    data_parallel_rpc_port: int = setting(
        29550, "Port at which it waits for them; workers that share experts meet at the next one.", ge=1, le=65535
    )
    data_parallel_secret_file: str | None = setting(
        None,
        "File with a secret of 16 characters at least, the same on all machines of data_parallel_address: only who "
        "knows it may offer engines or use them.",
    )
    data_parallel_own_address: str = setting(
        "", "This machine's own address, at which its engines listen; default: the one it reaches the other from."
    )
    headless: bool = setting(
        False, "Serve no HTTP: start engines for the server at data_parallel_address, which sends them requests."
    )

    @property
    def remote_ranks(self) -> list[int]:
        """The ranks of engines that other machines start for this server."""
        alone = self.data_parallel_rank is not None or self.data_parallel_external_lb or self.data_parallel_hybrid_lb
        if alone or self.headless or not self.data_parallel_address:
            return []
        return [rank for rank in range(self.data_parallel_size) if rank not in self.local_ranks]

    @property
    def over_machines(self) -> bool:
        """Whether one server has engines on several machines, of which this is one."""
        return bool(self.remote_ranks) or (self.headless and self.data_parallel_size > 1)

    @property
    def served_ranks(self) -> range:
        """The ranks of all engines among which this server divides requests."""
        return range(self.data_parallel_size) if self.remote_ranks else self.local_ranks

    def key(self) -> bytes:
        """What machines prove to know, "" where there is one; raises `ValueError` for a file that holds no secret."""
        path = self.data_parallel_secret_file
        return b"" if path is None else b"data parallel " + read_secret(path)

    @property
    def first_rank(self) -> int:
        """The rank of the first engine that this server starts."""
        return self.data_parallel_rank if self.data_parallel_rank is not None else self.data_parallel_start_rank or 0

    def engine(self, rank: int) -> DataParallelConfig:
        """These settings for the engine of one of `local_ranks`."""
        local = (self.data_parallel_rank_local or 0) + rank - self.first_rank
        names = ("data_parallel_own_address", "data_parallel_secret_file") if self.headless else ()
        kept = {name: getattr(self, name) for name in ("data_parallel_size", *names)}
        return DataParallelConfig(**kept, data_parallel_rank=rank, data_parallel_rank_local=local)

    @property
    def local_ranks(self) -> range:
        """The ranks of the engines that this server starts."""
        count = 1 if self.data_parallel_rank is not None else self.data_parallel_size_local or self.data_parallel_size
        return range(self.first_rank, self.first_rank + count)

    def contradictions(self) -> Iterator[str]:
        size, ranks = self.data_parallel_size, self.local_ranks
        yield from self._contradictions_of_machines()
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
        elif len(ranks) < size and not (self.data_parallel_hybrid_lb or self.data_parallel_address):
            yield (
                f"{len(ranks)} of {size} engines would be started here; set data_parallel_address where other machines "
                "start the rest for this server, data_parallel_hybrid_lb where a load balancer stands in front of "
                "several servers, or data_parallel_rank for one engine a server"
            )

    def _contradictions_of_machines(self) -> Iterator[str]:
        if self.headless and self.over_machines:
            for name in ("data_parallel_external_lb", "data_parallel_hybrid_lb"):
                if getattr(self, name):
                    yield f"headless is for engines of a server elsewhere, and {name} for a server: give one of them"
            if self.data_parallel_rank is not None:
                yield "headless goes with data_parallel_start_rank and data_parallel_size_local, not data_parallel_rank"
            needed = ("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_address")
            if missing := [name for name in needed if getattr(self, name) in (None, "")]:
                yield f"headless needs {', '.join(missing)}"
        if self.over_machines and not self.data_parallel_secret_file:
            yield (
                f"data_parallel_address {self.data_parallel_address} needs data_parallel_secret_file, a file with a "
                "secret of 16 characters at least that all machines share: who knows it may use the engines"
            )
