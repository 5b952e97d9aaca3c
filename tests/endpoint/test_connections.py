"""Connections to servers: proxies, TLS, redirects, timeouts, headers, rates, and what ends the start at once."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipeline.endpoint import engine as module
from pipeline.endpoint.connection import proxy_of
from pipeline.endpoint.rate_limit import RateLimit
from pipeline.endpoint.spec import base_url
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError, EngineUnusable, EnvironmentFailed
from tests.endpoint.fake_server import FakeServer
from tests.endpoint.test_engine import assert_right, compute, opened, request, short_waits, steps

__all__ = ["short_waits"]  # a fixture
Handler = Callable[[web.Request], Any]


@contextlib.contextmanager
def answering(handler: Handler, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run a server whose every request is answered by the handler. Yield its host and port."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        async def serve() -> None:
            runner = web.ServerRunner(web.Server(handler))
            await runner.setup()
            await web.SockSite(runner, listener, ssl_context=context).start()
            ready.set()

        def run() -> None:
            loop.run_until_complete(serve())
            loop.run_forever()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        ready.wait(timeout=60)
        yield address
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def tls(folder: Path) -> ssl.SSLContext:
    """Return the context of a server with a certificate that no client knows."""
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "certificate")]
    subprocess.run(["openssl", "req", *options, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    return context


async def html(request: web.Request) -> web.Response:
    status = 403 if request.method == "CONNECT" else 200
    return web.Response(text="<html>Welcome</html>", content_type="text/html", status=status)


def test_what_never_heals_ends_the_start_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begin_s = time.monotonic()
    with answering(html) as page, answering(html, tls(tmp_path)) as secure:
        for url, cause in (
            ("http://no-such-host.invalid/v1", "no-such-host.invalid"),
            (f"https://{secure}/v1", "certificate verify failed"),
            (f"http://{secure}/v1", "the server expects https://"),
            (f"https://{page}/v1", "WRONG_VERSION_NUMBER"),
            (f"http://{page}/v1", "/models: status 200: <html>Welcome"),
        ):
            with pytest.raises(ConfigError, match=r"^server\.base_url: ") as caught:
                compute(url)
            assert cause in str(caught.value)
        monkeypatch.setenv("https_proxy", f"http://user:hidden@{page}")
        with pytest.raises(ConfigError, match=r"^server\.base_url: .*ProxyError: 403") as caught:
            compute("https://api.example.com/v1", requested_model="m")
        assert "hidden" not in str(caught.value)
    assert time.monotonic() - begin_s < 60


def test_proxies_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_of("https://api.example.com/v1") is None
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example.com:3128")
    monkeypatch.setenv("NO_PROXY", "inner.example.com,.local")
    assert proxy_of("https://api.example.com/v1") == "http://proxy.example.com:3128"
    assert proxy_of("http://api.example.com/v1") is None
    assert proxy_of("https://inner.example.com/v1") is None
    monkeypatch.setenv("ALL_PROXY", "http://other.example.com:3128")
    assert proxy_of("http://api.example.com/v1") == "http://other.example.com:3128"
    for host in ("localhost:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "a.localhost"):
        assert proxy_of(f"https://{host}/v1") is None, host


def test_requests_go_through_a_proxy(monkeypatch: pytest.MonkeyPatch):
    """The fake server answers as the proxy: it receives whole urls. No login is read from a netrc file."""
    with FakeServer() as server:
        monkeypatch.setenv("http_proxy", server.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert_right(compute("http://api.example.com/v1", route="chat", num_rows=5))
        assert {one.headers["Host"] for one in server.requests} == {"api.example.com"}
        assert not any("Authorization" in one.headers for one in server.requests)


@pytest.mark.parametrize(
    ("url", "base", "query"),
    [
        ("http://h", "http://h/v1", ""),
        ("http://h/", "http://h/v1", ""),
        ("https://h/v1/", "https://h/v1", ""),
        ("https://h/v1/chat/completions", "https://h/v1", ""),
        ("https://h/api/v1/embeddings/", "https://h/api/v1", ""),
        (
            "https://h/openai/deployments/d/completions?api-version=1",
            "https://h/openai/deployments/d",
            "?api-version=1",
        ),
    ],
)
def test_urls_of_routes_are_cut(url: str, base: str, query: str):
    assert base_url(url) == (base, query)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_followed_with_the_request(status: int):
    with FakeServer() as server:

        async def move(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": f"{server.url}{request.path_qs}"})

        with answering(move) as address:
            assert_right(compute(f"http://{address}/v1", route="chat", requested_model="fake-model", num_rows=5))
            assert len(server.requests) == 2 + 5
            with pytest.raises(ConfigError, match=r"redirects to http://127\.0\.0\.1"):  # it must not get the key
                compute(f"http://localhost:{address.partition(':')[2]}/v1", route="chat", requested_model="fake-model")


def test_headers_are_sent_and_shown_nowhere(capfd: pytest.CaptureFixture[str]):
    secret = "secret-of-a-header"
    error = {"status": 400, "match": "word3.", "body": {"error": {"message": f"no, {secret}"}}}
    with FakeServer(error=error) as server:
        done = compute(server, route="chat", headers={"x-team": secret, "Authorization": "Key abc"}, api_key="other")
        assert {one.headers["x-team"] for one in server.requests} == {secret}
        assert {one.headers["Authorization"] for one in server.requests} == {"Key abc"}
    assert done[3].error_message == "the server rejects the request (status 400): no, ***"
    assert secret not in "".join(capfd.readouterr())


def test_a_silent_connection_costs_its_row_a_retry():
    """Other rows are answered meanwhile, so the server is not down."""
    with FakeServer(hang={"match": "word3.", "first": 1}, seconds_per_request=0.05) as server:
        assert_right(compute(server, route="chat", request_timeout_s=0.5))
        assert len(server.requests) == 2 + 40 + 1 + 2  # the row again, and a probe
    with FakeServer(hang={"match": "word3."}) as server:
        done = compute(server, route="chat", request_timeout_s=0.2, max_retries=1)
    assert "each of 2 tries failed; the last: no answer within 0.2 s (server.request_timeout)" in str(done.pop(3))
    assert_right(done)


def test_a_stream_that_stops_is_sent_again():
    num_begun = 0

    async def stream(request: web.Request) -> web.StreamResponse:
        nonlocal num_begun
        if request.method == "GET":
            return web.Response(status=404)
        num_begun += 1
        piece = b'data: {"choices": [{"index": 0, "delta": {"content": "Yes"}}]}\n\n'
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(piece)
        if num_begun == 3:  # after those of the start
            await asyncio.sleep(60)
        end = b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": '
        await response.write(b"data: " + end + b'{"prompt_tokens": 1, "completion_tokens": 1}}\n\ndata: [DONE]\n\n')
        return response

    with (
        answering(stream) as address,
        opened(
            f"http://{address}", route="chat", requested_model="m", request_timeout_s=60, stall_timeout_s=0.5
        ) as engine,
    ):
        engine.add(request(0, is_chat=True))
        engine.add(request(1, is_chat=True))
        assert {one.text for one in steps(engine).values()} == {"Yes"}
        assert num_begun >= 5


def test_rates_are_limited():
    with FakeServer() as server:
        begin_s = time.monotonic()
        assert_right(compute(server, route="chat", requests_per_minute=1200))
        assert time.monotonic() - begin_s > 0.9  # 40 requests at 20 a second, after a burst of a second
        assert_right(compute(server, route="chat", tokens_per_minute=600_000))
    limit, now_s, sent = RateLimit(None, 600, 0.0), 0.0, 0
    while now_s < 600:
        if limit.allows(now_s):
            limit.sent(100, now_s)
            sent += 1
            limit.settle(60, now_s)  # the answer was short
        now_s += 0.05
    assert 0.97 < sent * 40 / 6000 < 1.03  # tokens of ten minutes


def test_a_gateway_that_fails_for_a_while_costs_no_row():
    for status in (502, 504):
        with FakeServer(error={"status": status, "after": 10, "first": 60}) as server:
            assert_right(compute(server, route="chat"))


def test_a_row_that_a_gateway_always_refuses_ends_once_many_others_are_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_REFUSED_S", 0.3)
    with FakeServer(error={"status": 502, "match": "word3."}, seconds_per_request=0.005) as server:
        done = compute(server, route="chat", num_rows=400, max_retries=1)
    assert done.pop(3).error == "server_error"
    assert_right(done)


def test_a_long_pause_ends_the_run_and_a_short_one_shows_its_reason():
    busy = {"status": 429, "after": 12, "body": {"error": {"message": "monthly limit"}}}
    with (
        FakeServer(error={**busy, "retry_after": 7200}) as server,
        pytest.raises(EngineUnusable, match=r"accepts no request for 7,200 s: status 429: monthly limit"),
    ):
        compute(server, route="chat")
    unpaid = {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}
    with (
        FakeServer(error={"status": 429, "after": 12, "body": unpaid}) as server,
        pytest.raises(EngineUnusable, match="rejects all requests: status 429: You exceeded your quota"),
    ):
        compute(server, route="chat")
    for body, retry_after in (unpaid, None), (busy["body"], 7200):
        with (
            FakeServer(error={"status": 429, "body": body, "retry_after": retry_after}) as server,
            pytest.raises(EnvironmentFailed, match=r"You exceeded your quota|monthly limit"),
        ):
            compute(server, route="chat")
    with FakeServer(error={**busy, "first": 1, "retry_after": 3}) as server, opened(server, route="chat") as engine:
        reasons = set()
        for index in range(40):
            engine.add(request(index, is_chat=True))
        done = []
        while engine.has_unfinished:
            done += engine.step()
            reasons.add(engine.waits_for.partition(" UTC: ")[2])
        assert len(done) == 40
        assert reasons == {"", "status 429: monthly limit"}


SCHEMA = StructuredOutputs.from_config({"json": {"type": "object", "properties": {"a": {"type": "string"}}}})


def test_an_option_that_the_server_refuses_ends_the_start_with_the_line_that_removes_it():
    async def refuse(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        body = await request.json()
        for name in ("max_tokens", "response_format"):
            if name in body:
                problem = f"Unsupported parameter: '{name}' is not supported with this model."
                problem += " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
                return web.json_response({"error": {"message": problem, "param": name}}, status=400)
        choice = {"message": {"content": "Yes"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    with answering(refuse) as address:
        config: dict[str, Any] = {"route": "chat", "requested_model": "m"}
        wanted = r"server\.extra_body: \{max_tokens: null, max_completion_tokens: 64\}"
        with pytest.raises(ConfigError, match=wanted):
            compute(f"http://{address}", params=SamplingParams(max_tokens=64), **config)
        config["extra_body"] = {"max_tokens": None, "max_completion_tokens": 64}
        with pytest.raises(ConfigError, match=r"server\.extra_body: \{response_format: null\}"):
            compute(f"http://{address}", params=SamplingParams(structured_outputs=SCHEMA), **config)
        done = compute(f"http://{address}", num_rows=3, **config)
        assert {one.text for one in done.values()} == {"Yes"}


def test_streams_can_be_turned_off():
    with FakeServer(metrics=False) as server:
        assert_right(compute(server, route="chat", num_rows=5, extra_body={"stream": False}))
        for one in server.requests:
            assert (one.body["stream"], "stream_options" in one.body) == (False, False)
