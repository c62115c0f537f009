"""Who may ask the server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from floe_chat.models.catalog import asset

from .serving import Served, serving

PAGE = "https://page.example"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(asset("demo", "packed"), key="a-long-secret", origins=(PAGE,)) as served:
        yield served


WRONG = "", "Bearer", "Bearer wrong", "Basic a-long-secret", "Bearer a-long-secret2", "Bearer \xe9"
FOREIGN = "evil.example", "evil.example:80", "localhost.evil.example", "[::1", "127.0.0.1.nip.io"


@pytest.mark.parametrize("given", WRONG)
def test_only_the_key_opens(locked: Served, given: str) -> None:
    headers = {b"Authorization": given.encode("latin-1")}
    for path in ("/models", "/nothing"):
        reply = httpx2.get(locked.url + path, headers=headers)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx2.get(f"{locked.root}/metrics", headers=headers).status_code == 401
    assert httpx2.get(f"{locked.root}/health", headers=headers).status_code == 200


def test_the_key_opens(locked: Served) -> None:
    assert [model.id for model in locked.client().models.list()] == ["demo"]


def test_only_pages_that_are_allowed_may_ask(locked: Served, demo: Served) -> None:
    key = {"Authorization": "Bearer a-long-secret"}
    allowed = httpx2.get(f"{locked.url}/models", headers={**key, "Origin": PAGE})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    before = httpx2.options(f"{locked.url}/chat/completions", headers=asked)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == PAGE
    for origin in ("https://evil.example", "null", "http://[", "http://evil.example]"):
        refused = httpx2.get(f"{demo.url}/models", headers={"Origin": origin})
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert httpx2.get(f"{demo.url}/models", headers={"Origin": demo.root}).status_code == 200


def test_a_name_that_is_no_address_is_no_fault_of_the_server(locked: Served) -> None:
    key = {"Authorization": "Bearer a-long-secret", "Host": "[::1"}
    assert httpx2.get(f"{locked.root}/nothing", headers=key).status_code == 404
    assert httpx2.get(f"{locked.url}/models", headers=key).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_another_name_for_this_machine_is_refused(demo: Served, host: str) -> None:
    assert httpx2.get(f"{demo.url}/models", headers={"Host": host}).status_code == 403


def test_names_of_this_machine(demo: Served) -> None:
    for host in ("localhost", "127.0.0.1:1234", "[::1]:80", "LOCALHOST:8080"):
        assert httpx2.get(f"{demo.url}/models", headers={"Host": host}).status_code == 200
