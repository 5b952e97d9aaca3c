"""Images that rows name: paths below roots, urls of allowed hosts, and hostile ones."""

import asyncio
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pipeline.endpoint.images import fetch
from pipeline.endpoint.images.fetch import ImageFetcher, NotAllowed, Unavailable, is_reachable
from pipeline.endpoint.spec import ImageOptions

CONTENT = b"the image"
NAMES = {
    "images.test": ["127.0.0.1"],
    "images.test.": ["127.0.0.1"],
    "other.test": ["127.0.0.1"],
    "private.test": ["10.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "v6.test": ["fd00::1"],
    "mapped.test": ["::ffff:10.0.0.1"],
    "mixed.test": ["10.0.0.1", "127.0.0.1"],
    "localhost": ["127.0.0.2"],
    "0x7f.0.0.2": ["127.0.0.2"],
    "zero.test": ["0.0.0.0"],
}


class ImageServer:
    """Server on 127.0.0.1 in the test's event loop."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/{name:.*}", self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return str(self._runner.addresses[0][1])

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        name = request.match_info["name"]
        if name == "to":
            return web.Response(status=302, headers={"Location": request.query["url"]})
        if name == "loop":
            return web.Response(status=301, headers={"Location": "/loop"})
        if name == "flaky" and self.num_requests % 2:
            return web.Response(status=503)
        if name.isdigit():
            return web.Response(status=int(name))
        if name == "hang":
            await asyncio.sleep(3600)
        if name == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(1 << 16))
                await asyncio.sleep(0)
        return web.Response(body=CONTENT)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RETRY_S", (0.01, 0.01))
    monkeypatch.setattr(fetch, "FETCH_TIMEOUT_S", 1.0)
    monkeypatch.setattr(fetch, "MAX_IMAGE_BYTES", 1 << 20)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Replace DNS by a table, whose addresses a test may change."""
    table = {name: list(addresses) for name, addresses in NAMES.items()}

    async def resolve(self: Any, host: str, port: int = 0, family: Any = 0) -> list[dict[str, Any]]:
        if host not in table:
            raise OSError("no such host")
        found = []
        for address in table[host]:
            kind = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
            found.append({"hostname": host, "host": address, "port": port, "family": kind, "proto": 0, "flags": 0})
        return found

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    return table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A root with links, next to a secret."""
    root = tmp_path / "photos"
    (root / "inner").mkdir(parents=True)
    (root / "a.jpg").write_bytes(CONTENT)
    (root / "inner" / "b.jpg").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "photos2").mkdir()
    (tmp_path / "photos2" / "c.jpg").write_bytes(b"secret")
    (root / "link").symlink_to(root / "inner" / "b.jpg")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to("..")
    (root / "chain").symlink_to("out")
    (root / "circle").symlink_to("circle")
    (root / "proc").symlink_to("/proc/self")
    os.mkfifo(root / "pipe")
    (root / "large.jpg").write_bytes(bytes((1 << 20) + 1))
    return root


GOOD, NO, GONE = "good", "not allowed", "unavailable"
# ROOT, PORT and TMP are filled in
HOSTILE: dict[str, str] = {
    # paths
    "a.jpg": GOOD,
    "ROOT/a.jpg": GOOD,
    "file://ROOT/a.jpg": GOOD,
    "inner/../a.jpg": GOOD,
    "link": GOOD,
    "out": NO,
    "chain": NO,
    "up/secret": NO,
    "up/photos2/c.jpg": NO,
    "../secret": NO,
    "../photos2/c.jpg": NO,
    "inner/../../secret": NO,
    "ROOT/../secret": NO,
    "ROOT2/c.jpg": NO,
    "TMP/secret": NO,
    "file://TMP/secret": NO,
    "/etc/passwd": NO,
    "file:///etc/passwd": NO,
    "//etc/passwd": NO,
    "~/.ssh/id_rsa": GONE,  # a name like any other
    "proc/environ": NO,
    "/proc/self/environ": NO,
    "/dev/zero": NO,
    "a.jpg\0": NO,
    "missing.jpg": GONE,
    "inner": GONE,
    "": GONE,
    "pipe": GONE,
    "circle": GONE,
    "large.jpg": GONE,
    "x" * 5000: GONE,
    # urls of stores
    "s3://bucket/photos/a.jpg": NO,
    "s3://bucket/photos2/a.jpg": NO,
    "gs://bucket/a.jpg": NO,
    "memory://other/a.jpg": NO,
    "memory://photos/../other/a.jpg": NO,
    "memory://photos//other/a.jpg": NO,
    "memory://photos/a.jpg?versionId=1": NO,
    "memory://photos/a.jpg": GOOD,
    "memory://photos/missing.jpg": GONE,
    "ftp://images.test/a.jpg": NO,
    "gopher://images.test/a.jpg": NO,
    # hosts and addresses
    "http://images.test:PORT/a.jpg": GOOD,
    "HTTP://IMAGES.TEST.:PORT/a.jpg": GOOD,
    "http://mixed.test:PORT/a.jpg": GOOD,  # by its other address
    "http://user:pass@images.test:PORT/a.jpg": NO,
    "http://images.test@10.0.0.1/a.jpg": NO,
    "http://images.test\\@10.0.0.1/a.jpg": NO,
    "http://private.test:PORT/a.jpg": NO,
    "http://metadata.test/latest/meta-data": NO,
    "http://v6.test/a.jpg": NO,
    "http://mapped.test/a.jpg": NO,
    "http://zero.test:PORT/a.jpg": NO,
    "http://localhost:PORT/a.jpg": NO,
    "http://169.254.169.254/latest/meta-data": NO,
    "http://127.0.0.2:PORT/a.jpg": NO,
    "http://127.2:PORT/a.jpg": NO,
    "http://2130706434:PORT/a.jpg": NO,
    "http://0x7f.0.0.2:PORT/a.jpg": NO,
    "http://0177.0.0.2:PORT/a.jpg": NO,
    "http://[::1]:PORT/a.jpg": NO,
    "http://[::ffff:127.0.0.2]:PORT/a.jpg": NO,
    "http://[64:ff9b::7f00:2]/a.jpg": NO,
    "http://[fe80::1]/a.jpg": NO,
    "http:///a.jpg": NO,
    "http://": NO,
    "http://unknown.test/a.jpg": GONE,
    "http://images.test:1/a.jpg": GONE,
    # answers
    "http://images.test:PORT/to?url=/a.jpg": GOOD,
    "http://images.test:PORT/to?url=http://private.test/": NO,
    "http://images.test:PORT/to?url=http://169.254.169.254/": NO,
    "http://images.test:PORT/to?url=http://[::1]/": NO,
    "http://images.test:PORT/to?url=file:///etc/passwd": NO,
    "http://images.test:PORT/to?url=//10.0.0.1/": NO,
    "http://images.test:PORT/loop": GONE,
    "http://images.test:PORT/404": GONE,
    "http://images.test:PORT/500": GONE,
    "http://images.test:PORT/204": GONE,
    "http://images.test:PORT/flaky": GOOD,
    "http://images.test:PORT/hang": GONE,
    "http://images.test:PORT/endless": GONE,
}


async def outcome(fetcher: ImageFetcher, name: str) -> str:
    try:
        return GOOD if await fetcher.read(name) == CONTENT else "another file"
    except NotAllowed:
        return NO
    except Unavailable:
        return GONE


def outcomes(options: ImageOptions, wanted: dict[str, str], root: Path | None = None) -> dict[str, str]:
    async def run() -> dict[str, str]:
        server, fetcher = ImageServer(), ImageFetcher(options, {})
        port = await server.start()
        values = {"ROOT2": f"{root}2", "ROOT": str(root), "TMP": str(root and root.parent), "PORT": port}
        found: dict[str, str] = {}
        for name in wanted:
            shown = name
            for key, value in values.items():
                shown = shown.replace(key, value)
            found[name] = await outcome(fetcher, shown)
        await fetcher.close()
        await server.stop()
        return found

    return asyncio.run(run())


@pytest.fixture
def store() -> Iterator[str]:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("/photos/a.jpg", "/other/a.jpg"):
        memory.pipe_file(name, CONTENT if "photos" in name else b"secret")
    yield "memory://photos"
    memory.store.clear()


def test_each_hostile_name_has_its_outcome(folder: Path, names: dict[str, list[str]], store: str):
    options = ImageOptions(hosts=("*", "127.0.0.1"), roots=(str(folder), store))
    assert outcomes(options, HOSTILE, folder) == HOSTILE
    assert len(HOSTILE) >= 60


def test_without_hosts_and_roots_nothing_is_read(folder: Path, names: dict[str, list[str]], store: str):
    assert set(outcomes(ImageOptions(), HOSTILE, folder).values()) == {NO}


def test_only_named_hosts_are_fetched(names: dict[str, list[str]]):
    urls = {"http://images.test:PORT/a": GOOD, "http://other.test:PORT/a": NO,
            "http://images.test:PORT/to?url=http://other.test:PORT/a": NO}  # fmt: skip
    assert outcomes(ImageOptions(hosts=("images.test", "127.0.0.1")), urls) == urls
    assert outcomes(ImageOptions(hosts=("images.test",)), urls) == dict.fromkeys(urls, NO), "a private address"


def test_each_connection_checks_the_addresses_of_its_host_again(names: dict[str, list[str]]):
    async def run() -> list[str]:
        server, fetcher = ImageServer(), ImageFetcher(ImageOptions(hosts=("images.test", "127.0.0.1")), {})
        url = f"http://images.test:{await server.start()}/"
        found = [await outcome(fetcher, url + "a")]
        names["images.test"] = ["127.0.0.2"]
        await fetcher.close()  # its open connection
        fetcher = ImageFetcher(ImageOptions(hosts=("images.test", "127.0.0.1")), {})
        found += [await outcome(fetcher, url + "a")]
        await fetcher.close()
        await server.stop()
        return found

    assert asyncio.run(run()) == [GOOD, NO]


def test_addresses():
    for address in ("8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808"):
        assert is_reachable(address, frozenset())
    for address in (
        "10.1.2.3",
        "100.64.0.1",
        "224.0.0.1",
        "::",
        "fd00::1",
        "2002:a00:1::",
        "64:ff9b::a00:1",
        "fe80::1%eth0",
    ):
        assert not is_reachable(address, frozenset()), address
    assert is_reachable("10.1.2.3", frozenset({"10.1.2.3"}))
