"""Who may come in: the key at every door, Host and Origin, the page's cookie, TLS, and what a bind says."""

from __future__ import annotations

import logging
import ssl
import subprocess
from pathlib import Path

import pytest
import websockets
from serving_stubs import facts, http, refused_status, serving, websocket

from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.errors import ConfigurationError
from pi05_ros.serving.app import Server
from pi05_ros.serving.settings import ServerSettings, read_api_key

KEY = "correct-horse-battery"
ROUTES = ("/healthz", "/health", "/v1/models", "/v1/actions/metadata", "/metrics", "/openapi.json")
SOCKETS = ("/", "/openpi/policy", "/v1/actions/realtime")
FORM = {"Content_Type": "application/x-www-form-urlencoded"}


def test_the_key_is_asked_for_at_every_door_but_liveness() -> None:
    with serving(api_key=KEY) as server:
        assert http(server, "/liveness")[0] == 200
        for path in (*ROUTES, "/page/state", "/page/picture/base_0_rgb"):
            status, headers, body = http(server, path)
            assert status == 401 and body["error"]["code"] == "request.unauthorized", path
            assert "WWW-Authenticate" in headers and KEY not in str(body)
        assert http(server, "/v1/actions/generations", {})[0] == 401
        for path in SOCKETS:
            assert refused_status(server, path) == 401
        for wrong in ("Api-Key nope", f"Basic {KEY}", "Api-Key", f"Api-Key {KEY}x", "Api-Key \xfc", ""):
            assert http(server, "/healthz", Authorization=wrong)[0] == 401


def test_each_spelling_of_the_key_opens() -> None:
    with serving(api_key=KEY) as server:
        for headers in ({"Authorization": f"Api-Key {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"x_api_key": KEY}):
            for path in ROUTES:
                assert http(server, path, **headers)[0] == 200
        for path in SOCKETS:
            with websocket(server, path, additional_headers={"Authorization": f"Api-Key {KEY}"}) as connection:
                assert connection.metadata["object"] == "action.metadata"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1234", "127.0.0.1", "127.8.9.1:80", "[::1]:8000", "0.0.0.0:8000", "robot.lan"]
)
def test_hosts_that_are_taken(host: str) -> None:
    with serving(allowed_hosts=("robot.lan",)) as server:
        assert http(server, "/healthz", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "192.168.1.5", "", "127.0.0.1.nip.io", "[::2]"]
)
def test_hosts_that_are_refused(host: str) -> None:
    with serving() as server:
        for path in ("/healthz", "/", "/v1/actions/metadata"):
            status, _, body = http(server, path, Host=host)
            assert status == 403 and body["error"]["code"] == "request.forbidden"
        assert http(server, "/v1/actions/generations", {}, Host=host)[0] == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost.evil.example", "http://[", "file://"]
)
def test_a_web_page_elsewhere_cannot_drive_the_robot(origin: str) -> None:
    with serving() as server:
        assert http(server, "/v1/actions/generations", {}, Origin=origin)[0] == 403
        for path in SOCKETS:
            assert refused_status(server, path, origin=origin) == 403
    with serving() as server:
        assert http(server, "/healthz", Origin=server.url)[0] == 200


def test_the_address_that_was_connected_to_is_ours() -> None:
    with serving(host="0.0.0.0", api_key=KEY) as server:
        server._address = ("127.0.0.2", server.address[1])
        assert http(server, "/healthz", x_api_key=KEY)[0] == 200


def test_the_page_takes_the_key_once() -> None:
    with serving(api_key=KEY) as server:
        status, _, body = http(server, "/")
        assert status == 401 and b"form" in body and b"aloha" not in body
        assert http(server, "/login", b"key=wrong-key", **FORM)[0] == 401
        status, headers, _ = http(server, "/login", f"key={KEY}".encode(), **FORM)
        cookie = headers["Set-Cookie"]
        assert status == 303 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and KEY not in cookie
        cookie = cookie.partition(";")[0]
        assert b"page.js" in http(server, "/", Cookie=cookie)[2]
        assert http(server, "/page/state", Cookie=cookie)[2]["profile"] == "aloha"
        # The cookie shows; it does not move the robot.
        assert http(server, "/v1/actions/generations", {}, Cookie=cookie)[0] == 401
        assert refused_status(server, "/", additional_headers={"Cookie": cookie}) == 401
        assert http(server, "/page/state", Cookie=cookie.partition("=")[0] + "=guess")[0] == 401
        assert http(server, "/login", b"key=" + b"x" * 5000, **FORM)[0] == 413
        assert http(server, "/login", f"key={KEY}".encode(), Origin="http://evil.example", **FORM)[0] == 403


def test_the_page_without_key_and_switched_off() -> None:
    with serving() as server:
        status, headers, body = http(server, "/")
        assert status == 200 and b"page.js" in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for name in ("page.js", "page.css"):
            status, _, content = http(server, f"/page/{name}")
            assert status == 200 and b"http://" not in content.replace(b"http://www.w3.org/2000/svg", b"")
        assert http(server, "/page/..%2findex.html")[0] == 404
        assert http(server, "/page/picture/base_0_rgb")[0] == 404
    with serving(page=False) as server:
        for path in ("/", "/page/state", "/page/page.js"):
            assert http(server, path)[0] == 404
        with websocket(server):
            pass


def test_binding_elsewhere_without_a_key_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), serving(host="0.0.0.0"):
        pass
    assert "no api_key is set" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), serving(), serving(host="0.0.0.0", api_key=KEY):
        pass
    assert "api_key" not in caplog.text


def test_a_port_that_is_taken_is_named() -> None:
    with serving() as server:
        other = Server(facts(), Scheduler(), ServerSettings(port=server.address[1]))
        with pytest.raises(ConfigurationError) as caught:
            other.start()
        assert caught.value.code == "config.bind" and str(server.address[1]) in caught.value.message


def test_settings_that_cannot_be() -> None:
    for bad in ({"api_key": "short"}, {"api_key": "with space in it"}, {"tls_key": Path("x")}, {"timeout_s": 0.0}):
        with pytest.raises(ConfigurationError):
            ServerSettings(**bad)
    assert KEY not in repr(ServerSettings(api_key=KEY))


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PI05_ROS_API_KEY", raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv("PI05_ROS_API_KEY", "from-environment")
    assert read_api_key(None) == "from-environment"
    (tmp_path / "key").write_text("from-file\n")
    assert read_api_key(tmp_path / "key") == "from-file"
    (tmp_path / "empty").write_text("\n")
    for bad in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(ConfigurationError, match="api_key_file"):
            read_api_key(bad)


def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    making = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*making.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with serving(tls_certificate=certificate, tls_key=key) as server:
        assert server.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        url = f"wss://localhost:{server.address[1]}"
        with websockets.sync.client.connect(url, ssl=trust, compression=None, proxy=None) as connection:
            assert isinstance(connection.recv(timeout=5), bytes)
    with pytest.raises(ConfigurationError) as caught, serving(tls_certificate=key, tls_key=key):
        pass
    assert caught.value.code == "config.tls"
