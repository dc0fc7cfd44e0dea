"""Certificates of a run verify with ssl, name their process, expire after a year, and cannot be forged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from worldsize.errors import ConfigError
from worldsize.net import signing
from worldsize.net.channel import Channel, LostError
from worldsize.net.credentials import Credentials, create_authority, issue_certificate
from worldsize.net.endpoints import accept_channel, connect_channel, get_listener_address, open_listener
from worldsize.net.frames import CommonOperation, Header, RefusedError


class Operation(IntEnum):
    """Adds no operations."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_authority(tmp_path / "keys")
    return tmp_path / "keys"


class Server:
    """A listening process that accepts one connection."""

    def __init__(self, credentials: Credentials) -> None:
        self.channel: Channel | None = None
        self.error: Exception | None = None
        self._credentials = credentials
        self.listener = open_listener("tcp:127.0.0.1:0", credentials)
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        try:
            self.channel = accept_channel(connection, self._credentials, seconds=60.0, operations=Operation)
            self.channel.send(Header(CommonOperation.DONE))
        except (RefusedError, LostError) as error:
            self.error = error

    def close(self) -> None:
        self._thread.join()
        self.listener.close()
        if self.channel:
            self.channel.close()


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    serving = Server(issue_certificate(keys, "server-0"))
    yield serving
    serving.close()


def certificate(keys: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((keys / f"{name}.pem").read_bytes())


def greeted(server: Server, credentials: Credentials, peer: str = "server-0") -> str | None:
    """Connect, and wait until the server has accepted; return the server's name."""
    address = get_listener_address(server.listener)
    channel = connect_channel(address, credentials, peer=peer, seconds=60.0, operations=Operation)
    try:
        channel.wait_at_most(60.0)
        channel.receive_answer(CommonOperation.DONE)
        return channel.identity
    finally:
        channel.close()


def test_two_processes_of_a_run_know_each_others_names(keys: Path, server: Server) -> None:
    assert greeted(server, issue_certificate(keys, "worker-3")) == "server-0"
    assert server.channel is not None
    assert server.channel.identity == "worker-3"


def test_another_process_than_the_expected_one_is_refused(keys: Path, server: Server) -> None:
    with pytest.raises(RefusedError, match="expected the peer 'server-1', got 'server-0'"):
        greeted(server, issue_certificate(keys, "worker-3"), peer="server-1")


def test_what_certificates_say(keys: Path) -> None:
    issue_certificate(keys, "worker-3")
    authority, process = certificate(keys, "authority"), certificate(keys, "worker-3")
    for each, is_authority in ((authority, True), (process, False)):
        key = each.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        assert each.not_valid_after_utc - each.not_valid_before_utc == timedelta(days=365)
        age = datetime.now(UTC) - each.not_valid_before_utc
        assert timedelta(minutes=5) <= age < timedelta(minutes=10), "a host's clock may be behind"
        assert each.issuer.rfc4514_string() == "CN=authority"
        constraints = each.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (constraints.critical, constraints.value.ca) == (True, is_authority)
        usage = each.extensions.get_extension_for_class(x509.KeyUsage)
        assert (usage.critical, usage.value.key_cert_sign) == (True, is_authority)
        assert usage.value.digital_signature is not is_authority
    assert process.subject.rfc4514_string() == "CN=worker-3"
    process.verify_directly_issued_by(authority)


def test_keys_and_their_folder_are_for_one_user_alone(keys: Path) -> None:
    issue_certificate(keys, "worker-3")
    assert keys.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()}
    assert modes == dict.fromkeys(("authority.key", "authority.pem", "worker-3.key", "worker-3.pem"), 0o600)


def test_a_key_that_others_may_read_is_refused(keys: Path) -> None:
    issue_certificate(keys, "worker-3")
    (keys / "worker-3.key").chmod(0o640)
    with pytest.raises(ConfigError, match="Run `chmod 600"):
        issue_certificate(keys, "worker-3")


def test_what_is_there_is_not_made_again(keys: Path) -> None:
    issue_certificate(keys, "worker-3")
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    create_authority(keys)
    issue_certificate(keys, "worker-3")
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before


def test_without_the_authoritys_key_nothing_is_issued(keys: Path) -> None:
    (keys / "authority.key").unlink()
    with pytest.raises(ConfigError, match="not found: this process is not a member"):
        issue_certificate(keys, "worker-3")


@pytest.mark.parametrize("aside", [-timedelta(days=365, seconds=60), timedelta(hours=1)], ids=["over", "to come"])
def test_a_certificate_is_valid_for_a_year_only(
    keys: Path, server: Server, aside: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "get_signing_time", lambda: datetime.now(UTC) + aside)
    late = issue_certificate(keys, "worker-3")
    with pytest.raises((RefusedError, LostError)):
        greeted(server, late)
    server.close()
    assert isinstance(server.error, RefusedError)


def test_an_authority_that_is_over_vouches_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as then:
        then.setattr(signing, "get_signing_time", lambda: datetime.now(UTC) - timedelta(days=366))
        create_authority(tmp_path / "keys")
    server = Server(issue_certificate(tmp_path / "keys", "server-0"))
    with pytest.raises((RefusedError, LostError)):
        greeted(server, issue_certificate(tmp_path / "keys", "worker-3"))
    server.close()


def test_a_process_cannot_sign_for_another(keys: Path, server: Server, tmp_path: Path) -> None:
    """A member's certificate is not an authority, whatever it signs: here worker-3 signs as if it were."""
    issue_certificate(keys, "worker-3")
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    for suffix in ("key", "pem"):
        (mine / f"authority.{suffix}").write_bytes((keys / f"worker-3.{suffix}").read_bytes())
    forged = issue_certificate(mine, "server-1")
    (mine / "authority.pem").write_bytes((keys / "authority.pem").read_bytes())  # in order to trust the server
    chain = (mine / "server-1.pem").read_bytes() + (keys / "worker-3.pem").read_bytes()
    (mine / "server-1.pem").write_bytes(chain)
    with pytest.raises((RefusedError, LostError)):
        greeted(server, forged)
    server.close()
    assert isinstance(server.error, RefusedError)
