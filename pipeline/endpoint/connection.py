"""Connections to servers: sockets that notice a lost peer, and proxies of the environment."""

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

CONNECT_TIMEOUT_S = 30.0
READ_BYTES = 1 << 23  # the longest line of a stream: some servers send a whole answer in one
# A firewall or a load balancer may forget a silent connection: probes keep it known, and notice its loss in 2 minutes.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}


def open_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """Return a session without limits of its own, except for connecting. Call it in an event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers=headers,
        read_bufsize=READ_BYTES,
    )


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a url; None for this machine and the hosts of NO_PROXY."""
    parts = urlsplit(url)
    host, proxies = parts.hostname or "", getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found or _is_loopback(host) or proxy_bypass(host):
        return None
    return found if "://" in found else f"http://{found}"


def lost_because(error: Exception) -> str:
    """Return why a request has no answer, in plain words where the cause is common."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return f"no address found for host {error.host!r}"
        case aiohttp.ClientProxyConnectionError():
            return f"the proxy {error.host}:{error.port} cannot be used: {_os_text(error.os_error)}"
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return f"TLS failed: {error.args[1]}"
        case aiohttp.ClientConnectorError():
            return _os_text(error.os_error)
        case aiohttp.ConnectionTimeoutError():
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection without an answer"
        case aiohttp.ClientOSError():
            return _os_text(error)
    return f"{type(error).__name__}: {error}"


def _os_text(error: OSError) -> str:
    match error.errno:
        case errno.ECONNREFUSED:
            return "it refuses connections"
        case errno.ECONNRESET | None:  # aiohttp gives no number if the request cannot be written
            return "it reset the connection"
    return os.strerror(error.errno).lower()


async def speaks_tls(url: str) -> bool:
    """Return whether the port of a url answers in TLS."""
    parts = urlsplit(url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _socket(address: "aiohttp.AddrInfoType") -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on each system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
