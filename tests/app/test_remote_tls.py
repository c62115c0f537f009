"""A server's certificate: who cannot prove to be the named host gets neither key nor chat."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from floe_chat.app.client.interface import PromptTurn, Question
from floe_chat.app.client.remote.address import Address, Key
from floe_chat.app.client.remote.client import Patience, RemoteClient
from floe_chat.engine.events import Failed, Finished, Loaded, Sampling

from .model_server import ANSWER, ModelServer, Reply, models, said, serving
from .test_remote_client import heard, loaded, text

KEY = "sk-very-secret-1234"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")


def certificate(folder: Path, names: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate of one's own for these names, signed by itself, and what serves with it."""
    key, made = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=a test", "-addext", f"subjectAltName={names}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return made, context


def server(tls: ssl.SSLContext) -> ModelServer:
    return ModelServer(models("tiny"), Reply(parts=said({"content": ANSWER})), tls=tls)


@pytest.mark.parametrize(
    ("names", "trusted", "why"),
    [("IP:127.0.0.1", False, "self-signed"), ("DNS:example.org,IP:127.0.0.2", True, "IP address mismatch")],
)
def test_a_wrong_certificate(
    names: str, trusted: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tls = certificate(tmp_path, names)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
    with serving(server(tls)) as asked:
        client = RemoteClient(Address.parse(asked.url), Key(KEY), patience=Patience(30, 0.01))
        client.start()
        failed = heard(client, Failed, Loaded)[-1]
        client.close()
        assert isinstance(failed, Failed) and "cannot prove that it is 127.0.0.1" in failed.title
        assert why in failed.cause and "SSL_CERT_FILE" in failed.hint and failed.exit_code == 1
        assert not asked.asked  # neither the key nor anything else


def test_a_certificate_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tls = certificate(tmp_path, "IP:127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(made))
    with serving(server(tls)) as asked:
        client = RemoteClient(Address.parse(asked.url), Key(KEY))
        client.start()
        assert loaded(client).model == "tiny" and "encrypted on the way" in client.privacy
        client.submit(Question([PromptTurn("user", "Hi")], Sampling(), 8))
        assert text(heard(client, Finished, Failed)) == ANSWER
        client.close()
    assert {one.headers["authorization"] for one in asked.asked} == {f"Bearer {KEY}"}
