"""Who may look at a dashboard, and what its pages may do."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from qwengyre.dashboard.guard import Guard

HERE = "http://127.0.0.1:8420"


def client(token: str = "") -> TestClient:
    pages = Starlette(routes=[Route("/", lambda request: PlainTextResponse("numbers"))])
    return TestClient(Guard(pages, token), base_url=HERE)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8420", "localhost:1", "LOCALHOST", "[::1]:8420", "127.9.9.9"])
def test_this_machine_is_answered(host):
    assert client().get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8420", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.1.7:8420"),
        *("0.0.0.0", "user@127.0.0.1.evil.example", "127.0.0.1@evil.example", "[::2]", "[bad", "", "a b", "localhost."),
    ],
)
def test_another_name_for_this_machine_is_refused(host):
    """A page of that name could read what its browser fetches from here."""
    found = client().get("/", headers={"host": host})
    assert found.status_code == 403 and "numbers" not in found.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": HERE}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_no_other_page_is_answered(headers, status):
    assert client().get("/", headers=headers).status_code == status


def test_a_token_is_asked_for_and_remembered():
    browser = client("secret-token")
    for path in ("/", "/?token=", "/?token=wrong", "/?token=secret-toke", "/?token=%FF"):
        assert browser.get(path).status_code == 403
    found = browser.get("/?token=secret-token", follow_redirects=False)
    cookie = found.headers["set-cookie"]
    assert found.status_code == 303 and found.headers["location"] == "/" and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert browser.get("/").text == "numbers"
    other = client("another-token")
    other.cookies.update(browser.cookies)
    assert other.get("/").status_code == 403


def test_every_answer_forbids_frames_and_all_scripts_and_files_but_our_own():
    for found in (
        client().get("/"),
        client().get("/nowhere"),
        client("t").get("/"),
        client().get("/", headers={"host": "evil.example"}),
    ):
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert found.headers["x-content-type-options"] == "nosniff" and found.headers["cache-control"] == "no-store"
        assert found.headers["referrer-policy"] == "no-referrer", "else the token would be told to where a link leads"
        assert "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("trainer.example:8420", 200), ("10.0.0.7:8420", 200), ("[fe80::7]:8420", 200), ("localhost", 200)),
        *(("evil.example", 403), ("trainer.example.evil.example", 403), ("evil.example@trainer.example.evil", 403)),
    ],
)
def test_other_machines_are_answered_under_our_names_with_the_token(host: str, status: int):
    pages = Starlette(routes=[Route("/", lambda request: PlainTextResponse("numbers"))])
    browser = TestClient(Guard(pages, "secret-token", {"trainer.example"}), base_url="http://trainer.example:8420")
    assert browser.get("/", headers={"host": host}).status_code == 403, "without the token nobody is"
    assert browser.get("/?token=secret-token").status_code == 200
    assert browser.get("/", headers={"host": host}).status_code == status


def test_other_machines_are_never_let_in_without_a_token():
    with pytest.raises(ValueError, match="token"):
        Guard(Starlette(), "", {"trainer.example"})
