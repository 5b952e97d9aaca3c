"""Images that rows name by a path or a url: read only below the job's roots, and fetched only from its hosts.

A row's text is data of strangers. A path is checked after links are resolved. A url is checked by its host's name, and
each address of the host before a connection to it: private ones are refused, also after a redirect, so that no row
reaches what only this machine can reach.
"""

import asyncio
import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.abc import ResolveResult
from yarl import URL

from pipeline.data.image_columns import MAX_IMAGE_BYTES
from pipeline.endpoint.spec import ImageOptions
from pipeline.errors import PipelineError
from pipeline.stores.filesystem import filesystem, is_url, storage_for
from pipeline.stores.redaction import shown_url

FETCH_TIMEOUT_S = 60.0
MAX_REDIRECTS = 5
RETRY_S = (0.5, 2.0, 8.0)  # before the next tries
ANY_HOST = "*"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = (301, 302, 303, 307, 308)
_LASTING = (400, 401, 403, 404, 405, 410, 451)  # no wait is likely to help


class NotAllowed(Exception):
    """The job does not let rows read this path or url."""


class Unavailable(Exception):
    """The image cannot be read."""


class _AddressRefused(OSError):
    """All addresses of a host are refused."""


class _Resolver(aiohttp.ThreadedResolver):
    """Resolver without the addresses that rows may not reach. Connections are opened to its answers only."""

    def __init__(self, hosts: frozenset[str]) -> None:
        super().__init__()
        self._hosts = hosts

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        allowed = [each for each in found if is_reachable(each["host"], self._hosts)]
        if found and not allowed:
            raise _AddressRefused(f"{host} has the address {found[0]['host']}")
        return allowed


def is_reachable(address: str, hosts: frozenset[str]) -> bool:
    """Return whether rows may reach an address: a public one, or one that the job names."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if str(found) in hosts:
        return True
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            found = ipaddress.ip_address(int(found) & 0xFFFFFFFF)
        elif inner := found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1]):
            found = inner
    return found.is_global and not found.is_multicast


class ImageFetcher:
    """Reader of paths and urls. All methods run in one event loop."""

    def __init__(self, options: ImageOptions, storage: Mapping[str, Mapping[str, Any]]) -> None:
        """storage: fsspec options by url prefix, for roots in object stores."""
        self._hosts = frozenset(host.lower() for host in options.hosts)
        self._storage = storage
        self._folders = [os.path.realpath(root) for root in options.roots if not is_url(root)]
        self._stores = [root.rstrip("/") + "/" for root in options.roots if is_url(root)]
        self._session: aiohttp.ClientSession | None = None
        self._filesystems: dict[str, Any] = {}

    async def read(self, name: str) -> bytes:
        """Return the content of a path, relative ones from each root, or of a url. Raises NotAllowed and
        Unavailable."""
        kind = name.partition(":")[0].lower()
        if kind in ("http", "https"):
            return await self._fetched(name)
        if "://" in name and kind != "file":
            return await asyncio.to_thread(self._of_store, name)
        return await asyncio.to_thread(self._of_folder, name.removeprefix("file://"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # -- paths

    def _of_folder(self, path: str) -> bytes:
        candidates = [] if "\0" in path else [os.path.realpath(os.path.join(root, path)) for root in self._folders]
        inside = [each for root, each in zip(self._folders, candidates) if Path(each).is_relative_to(root)]
        if not inside:
            raise NotAllowed(f"{path[:200]!r} is in no folder of images.roots")
        found = next(filter(os.path.lexists, inside), inside[0])
        try:
            file = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(file, "rb") as opened:
                kind = os.fstat(file)
                if not stat.S_ISREG(kind.st_mode):
                    raise Unavailable(f"{found!r} is no file")
                if os.path.realpath(f"/proc/self/fd/{file}") != found:  # a folder became a link
                    raise NotAllowed(f"{path[:200]!r} changed while it was opened")
                _check_size(kind.st_size, found)
                return opened.read()
        except OSError as error:
            raise Unavailable(f"{found!r}: {error.strerror}") from None

    def _of_store(self, url: str) -> bytes:
        root = next((root for root in self._stores if url.startswith(root)), None)
        key = url.removeprefix(root or "")
        if root is None or "?" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
            raise NotAllowed(f"{shown_url(url)[:200]!r} is below no url of images.roots")
        try:
            if root not in self._filesystems:
                self._filesystems[root] = filesystem(root, storage_for(root, self._storage))
            fs, path = self._filesystems[root]
            path = f"{path.rstrip('/')}/{key}"
            _check_size(fs.info(path)["size"], url)
            return fs.cat_file(path)
        except (OSError, PipelineError) as error:
            raise Unavailable(f"{shown_url(url)[:200]!r}: {error}") from None

    # -- urls

    async def _fetched(self, text: str) -> bytes:
        for wait_s in (*RETRY_S, None):
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    return await self._followed(text)
            except TimeoutError:
                reason = f"no whole answer within {FETCH_TIMEOUT_S:g} s"
            except aiohttp.ClientConnectorDNSError as error:
                if isinstance(error.os_error, _AddressRefused):
                    raise _refused_address(error.os_error) from None
                reason = f"no address found for host {error.host!r}"
            except (aiohttp.ClientError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
            except _TryAgain as error:
                reason = str(error)
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        raise Unavailable(f"{shown_url(text)[:200]!r}: each of {len(RETRY_S) + 1} tries failed; the last: {reason}")

    async def _followed(self, text: str) -> bytes:
        """Return the content of a url after its redirects."""
        if self._session is None:
            connector = aiohttp.TCPConnector(resolver=_Resolver(self._hosts), use_dns_cache=False, limit=64)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
            )
        url = self._checked(text, None)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._session.get(url, allow_redirects=False) as response:
                status, shown = response.status, shown_url(str(url))[:200]
                if status in _REDIRECTS and "Location" in response.headers:
                    url = self._checked(response.headers["Location"], url)
                    continue
                if status in _LASTING:
                    raise Unavailable(f"{shown!r}: status {status}")
                if status != 200:
                    raise _TryAgain(f"status {status}")
                _check_size(response.content_length or 0, shown)
                content = bytearray()
                async for piece in response.content.iter_any():
                    content += piece
                    _check_size(len(content), shown)
                return bytes(content)
        raise Unavailable(f"{shown_url(text)[:200]!r}: more than {MAX_REDIRECTS} redirects")

    def _checked(self, text: str, before: URL | None) -> URL:
        """Return a url that may be requested. before: the one that redirects to it. Raises NotAllowed."""
        shown = f"{shown_url(text)[:200]!r}" if before is None else f"a redirect to {shown_url(text)[:200]!r}"
        try:
            url = URL(text) if before is None else before.join(URL(text))
            host = (url.host or "").rstrip(".").lower()
        except ValueError:
            raise NotAllowed(f"{shown} is not a valid url") from None
        if url.scheme not in ("http", "https") or not host or url.user is not None:
            raise NotAllowed(f"{shown}: expected an http or https url without a user")
        if host not in self._hosts and ANY_HOST not in self._hosts:
            raise NotAllowed(f"{shown}: the host {host!r} is not in images.hosts")
        if ":" in host or host.replace(".", "").isdigit():  # aiohttp passes these on without the resolver
            try:
                is_allowed = is_reachable(host, self._hosts)
            except ValueError:
                raise NotAllowed(f"{shown}: {host!r} is no address") from None
            if not is_allowed:
                raise _refused_address(_AddressRefused(f"{shown} is at {host}"))
        return url


class _TryAgain(Exception):
    """The server may answer the next try."""


def _refused_address(error: _AddressRefused) -> NotAllowed:
    return NotAllowed(f"{error}, which is not public; to allow it, name the address in images.hosts")


def _check_size(size: int, name: str) -> None:
    if size > MAX_IMAGE_BYTES:
        raise Unavailable(f"{name!r} has {size} bytes, expected at most {MAX_IMAGE_BYTES}")
