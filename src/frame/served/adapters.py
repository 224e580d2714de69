"""The adapters that requests may name as their model: those that are loaded, and those that a resolver finds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from frame.core.interfaces.adapters import AdapterResolver, AdapterSource
from frame.core.interfaces.client import EngineDeadError
from frame.core.interfaces.errors import RequestError
from frame.core.interfaces.serving import AdapterCard
from frame.core.interfaces.setup import AdapterResolverSetup
from frame.core.plugin_host.registry import Registry
from frame.core.server.bodies import JSON_BODY
from frame.quoting import quoted

from .folders import stray_link
from .modules import read_module
from .news import AdapterNews

if TYPE_CHECKING:
    from frame.core.server.serving import ServingHost

#: The scope key of the adapter that a request named as its model.
ADAPTER = "frame.adapter"
#: Seconds for which it is remembered that there is no adapter of a name, of how many names, and of how long ones.
UNKNOWN_SECONDS, MOST_UNKNOWN, LONGEST_UNKNOWN = 10.0, 1024, 1024
_POLL_SECONDS = 0.01


async def _no_parent(news: AdapterNews) -> None:
    """There is no other process that should know."""


class HostAdapters:
    """One for each API process; the others are told what it loads and unloads. The engine knows what is loaded."""

    def __init__(self, host: ServingHost) -> None:
        self._host = host
        self._settings = host.config.adapters
        self.known: dict[str, AdapterCard] = {}
        self._searches: dict[str, asyncio.Task[None]] = {}
        self._unknown: dict[str, tuple[float, RequestError | None]] = {}  # until when, and what is wrong with it
        self._resolver: AdapterResolver | None = None
        self._unloaded: set[str] = set()  # what was unloaded in any process, and not loaded again
        #: tells the parent, which tells all API processes
        self.tell: Callable[[AdapterNews], Awaitable[None]] = _no_parent

    async def start(self, registry: Registry) -> None:
        """Loads what the configuration names; raises `ValueError` with the reason against one."""
        names, settings = self._host.models.names, self._settings
        if settings.lora_resolver is not None:
            setup = AdapterResolverSetup(base_model=names[0])
            self._resolver = registry.make("adapter-resolver", settings.lora_resolver, setup, self._host.config)
        for name, path, parent in map(read_module, settings.lora_modules):
            if name in names:
                raise ValueError(f"lora_modules: {quoted(name)} is the name of the model itself")
            if name in self._unloaded or name in self.known:  # since the server began
                continue
            try:
                await self._have_loaded(name, str(Path(path).absolute()), parent=parent)  # as every process does
            except RequestError as error:
                raise ValueError(f"lora_modules: {error}") from None

    def hear(self, news: AdapterNews) -> None:
        """What any process of the server loaded or unloaded, this one as well; called in the order of the news."""
        if news.path:
            self._unloaded.discard(news.name)
            self._unknown.pop(news.name, None)
            self._note(news.name, news.path)
        else:
            self._unloaded.add(news.name)
            self.known.pop(news.name, None)

    def source(self, name: str) -> AdapterSource | None:
        """The adapter of a name, None if there is none that is known here."""
        card = self.known.get(name)
        return None if card is None else AdapterSource(name, card.path)

    async def cards(self) -> list[AdapterCard]:
        """The adapters that can be used."""
        if self._settings.enable_lora:
            await self._ask_engine()
        return list(self.known.values())

    async def find(self, name: str) -> None:
        """Makes an adapter known if there is one of that name; requests that name it at the same time share the work.

        Raises `RequestError` where it is there and does not fit.
        """
        if name in self.known or name in self._host.models.names:
            return
        until, wrong = self._unknown.get(name, (0.0, None))
        if until > time.monotonic():
            if wrong is not None:
                raise RequestError(wrong.status, str(wrong), param="model")
            return
        search = self._searches.get(name)
        if search is None:
            search = self._searches[name] = asyncio.create_task(self._find(name))
            search.add_done_callback(lambda _: self._searches.pop(name, None))
        await asyncio.shield(search)

    async def _find(self, name: str) -> None:
        await self._ask_engine()
        folder, wrong = None, None
        if name not in self.known and self._resolver is not None:
            folder = await asyncio.to_thread(self._resolver.resolve, name)
        if folder is not None:
            try:
                await self._load(name, str(folder))
            except RequestError as error:
                wrong = error
        answered = wrong is None or wrong.status != 503  # by an engine
        if name not in self.known and answered and len(name) <= LONGEST_UNKNOWN:
            while len(self._unknown) >= MOST_UNKNOWN:
                del self._unknown[next(iter(self._unknown))]
            self._unknown[name] = time.monotonic() + UNKNOWN_SECONDS, wrong
        if wrong is not None:
            raise wrong

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """As `ServedModels.load_adapter`."""
        root = self._settings.lora_root
        if root is None:
            raise RequestError(403, "no folder for adapters is set: start with --enable-lora and --lora-root")
        if name in self._host.models.names:
            raise RequestError(400, f"{quoted(name)} is the name of the model itself", param="lora_name")
        try:
            folder = (Path(root) / path).resolve()
            if not folder.is_relative_to(Path(root).resolve()):
                raise RequestError(403, f"lora_path must lie under --lora-root, got {quoted(path)}", param="lora_path")
            if not folder.is_dir():
                raise RequestError(404, f"there is no folder {quoted(path)}", param="lora_path")
            if (stray := await asyncio.to_thread(stray_link, folder, Path(root))) is not None:
                text = f"{quoted(stray.name)} in {quoted(path)} is a link that leads out of --lora-root"
                raise RequestError(403, text, param="lora_path")
        except (OSError, ValueError, RuntimeError):  # the last one of a link that leads to itself
            raise RequestError(400, "lora_path is not the path of a folder", param="lora_path") from None
        await self._ask_engine()
        if name in self.known and not replace:
            raise RequestError(
                400, f"the adapter {quoted(name)} is loaded already; load_inplace replaces it", param="lora_name"
            )
        await self._load(name, str(folder), replace=replace)

    async def unload(self, name: str) -> None:
        """As `ServedModels.unload_adapter`."""
        await self._ask_engine()
        if self.known.pop(name, None) is None:
            text = f"no adapter {quoted(name)} is loaded; there are: {', '.join(self.known) or 'none'}"
            raise RequestError(404, text, param="lora_name")
        self._unloaded.add(name)
        await self.tell(AdapterNews(name))
        await self._call("unload_adapter", {"name": name})

    async def _load(self, name: str, path: str, *, replace: bool = False) -> None:
        await self._have_loaded(name, path, replace=replace)
        await self.tell(AdapterNews(name, path))

    async def _have_loaded(self, name: str, path: str, *, parent: str | None = None, replace: bool = False) -> None:
        arguments = {"name": name, "path": path, "replace": secrets.token_hex(8) if replace else ""}
        while not await self._call("load_adapter", arguments):
            await asyncio.sleep(_POLL_SECONDS)
        self._unloaded.discard(name)
        self._unknown.pop(name, None)
        self._note(name, path, parent)

    async def _ask_engine(self) -> None:
        """Learns what other API processes loaded. A new engine reads adapters when they are needed."""
        try:
            answer = await self._call("list_adapters", {})
        except RequestError:
            return
        for one in answer:
            if one["name"] not in self._unloaded:  # while an engine is yet to be told
                self._note(one["name"], one["path"])

    async def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._host.client.call(method, arguments)
        except EngineDeadError as error:
            raise RequestError(503, str(error)) from None
        except (ValueError, RuntimeError) as error:
            raise RequestError(400, str(error)) from None

    def _note(self, name: str, path: str, parent: str | None = None) -> None:
        before = self.known.get(name)
        if before is None or before.path != path:
            parent = parent or self._host.models.names[0]
            self.known[name] = AdapterCard(name, path, parent, int(time.time()))


class AdapterNames:
    """ASGI middleware: before a route sees a request, looks for the adapter that its body names as model."""

    def __init__(self, app: ASGIApp, adapters: HostAdapters) -> None:
        self._app, self._adapters = app, adapters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; what is wrong with an adapter that was found is raised where the route asks for it."""
        body = scope.get(JSON_BODY)
        name = body.get("model") if isinstance(body, dict) else None
        if isinstance(name, str):
            try:
                await self._adapters.find(name)
            except RequestError as error:
                scope[ADAPTER] = error
        await self._app(scope, receive, send)
