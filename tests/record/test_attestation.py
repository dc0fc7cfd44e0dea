"""The signed statement about a run is verified by another tool, and reveals changed files and foreign keys."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer._key import SSlibKey

from tests.observe.run_folders import write_run
from worldsize.errors import WorldsizeError
from worldsize.record.attestation import check_attestation, write_attestation
from worldsize.record.manifest import read_manifest
from worldsize.record.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with a chain and its statement, by a user with a new key."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = RunDirectory(write_run(tmp_path / "run", ranks=1, steps=2))
    run.chain.write_text("chain\n")
    write_attestation(run, read_manifest(run.manifest))
    return run


def get_key() -> Path:
    return Path.home() / ".config" / "worldsize" / "attestation.pub"


def test_another_tool_verifies_the_statement(run: RunDirectory) -> None:
    envelope = Envelope.from_dict(json.loads(run.attestation.read_text()))
    pem = get_key().read_bytes()
    keyid = hashlib.sha256(pem).hexdigest()
    key = SSlibKey.from_crypto(load_pem_public_key(pem), keyid)
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert [*envelope.verify([key], 1)] == [keyid]
    statement = json.loads(envelope.payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    files = {name: (run.path / name).read_bytes() for name in ("run_manifest.json", "chain.jsonl")}
    assert digests == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    envelope.payload = envelope.payload.replace(b"run_manifest", b"run_manifesto")
    with pytest.raises(VerificationError):
        envelope.verify([key], 1)


def test_changed_files_and_other_keys_are_found(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stat.S_IMODE(get_key().with_suffix(".key").stat().st_mode) == 0o600
    assert check_attestation(run, None) == ([], "the signature is valid")
    assert check_attestation(run, get_key()) == ([], "the signature is valid")
    run.chain.write_text("another chain\n")
    assert check_attestation(run, None)[0] == ["chain.jsonl differs from the one in attestation.json."]
    run.chain.write_text("chain\n")
    author = get_key()
    monkeypatch.setenv("HOME", str(tmp_path / "reader"))
    problems, remark = check_attestation(run, None)
    assert (problems, "pass the public key of the run's author with --key" in remark) == ([], True)
    assert check_attestation(run, author) == ([], "the signature is valid")
    other = RunDirectory(write_run(tmp_path / "other", ranks=1, steps=2))
    write_attestation(other, read_manifest(other.manifest))  # creates the reader's own key
    problems, remark = check_attestation(run, get_key())
    assert (len(problems), remark) == (1, "the signature is wrong")
    with pytest.raises(WorldsizeError, match=r"is not a public key in PEM format.*Pass the author's file"):
        check_attestation(run, run.chain)


def test_a_damaged_statement_is_a_problem_and_a_missing_one_a_remark(run: RunDirectory) -> None:
    for text in ("{", "[]", '{"payload": "e30=", "signatures": []}', '{"payload": 3, "signatures": [1]}'):
        run.attestation.write_text(text)
        (problem,), _ = check_attestation(run, None)
        assert "attestation.json is damaged" in problem
    run.attestation.unlink()
    assert check_attestation(run, None)[0] == []
