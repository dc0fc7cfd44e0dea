"""Secrets of a run: the key of its hosts, and the certificates of its processes.

The launching process creates the key and a certificate authority. Each process gets its own certificate and private
key. All are stored in a private folder of the run, keys with mode 0600. A user who can read this folder can issue
certificates and join the run; other users cannot connect to servers that require credentials.
"""

from __future__ import annotations

import os
import secrets
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from worldsize.errors import ConfigError
from worldsize.files import read_regular

_AUTHORITY = "authority"


@final
@dataclass(frozen=True)
class Credentials:
    """Certificate and private key that authenticate a process as a member of the run.

    Attributes:
        folder: The run's private folder for certificates, see :func:`create_authority`.
        name: Name of the process, such as "worker-0" or "server-1". It is the certificate's common name, by which
            peers identify the process, and the stem of the names of both files.
    """

    folder: Path
    name: str

    def check_files(self) -> None:
        """Raise ConfigError if a file is missing, or if other users may access the key."""
        for path in (self._authority, self._certificate, self._key):
            if not path.is_file():
                raise ConfigError(f"{path} not found: this process is not a member of the run.")
        if self._key.stat().st_mode & 0o077:
            raise ConfigError(f"{self._key} is accessible to other users. Run `chmod 600 {self._key}`.")

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Create a TLS context for the listening (``server=True``) or the connecting side.

        It requires TLS 1.3, and certificates signed by this run's authority on both sides. Host names are not checked,
        since certificates name processes: the caller must compare ``Channel.identity`` with the expected name.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # connect_channel compares the process's name instead
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._authority)
        context.load_cert_chain(self._certificate, self._key)
        return context

    @property
    def _authority(self) -> Path:
        return self.folder / f"{_AUTHORITY}.pem"

    @property
    def _certificate(self) -> Path:
        return self.folder / f"{self.name}.pem"

    @property
    def _key(self) -> Path:
        return self.folder / f"{self.name}.key"


def create_authority(folder: Path) -> None:
    """Create the run's own certificate authority in ``folder`` unless it exists.

    Call it in the launching process (``Strategy.prepare``). The folder is created with mode 0700.
    """
    from worldsize.net.signing import sign_authority  # takes 0.1 s; not needed by runs on one host

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / f"{_AUTHORITY}.pem").exists():
        sign_authority(folder, _AUTHORITY)


def issue_certificate(folder: Path, name: str) -> Credentials:
    """Return the credentials for process ``name``; sign its certificate if it is missing.

    Raises:
        ConfigError: ``folder`` does not contain an authority, the authority's key cannot be read, or other users may
            access the process's key.
    """
    from worldsize.net.signing import sign_process

    credentials = Credentials(folder, name)
    if not (folder / f"{name}.pem").exists() and (folder / f"{_AUTHORITY}.key").exists():
        sign_process(folder, name, authority=_AUTHORITY)
    credentials.check_files()
    return credentials


_FILE = "agents.key"
_SHORTEST, _LONGEST = 32, 1 << 10  # minimum and maximum bytes of a key


@final
@dataclass(frozen=True)
class RunKey:
    """The run's ID, and the secret shared by its hosts."""

    run_id: str
    secret: bytes = field(repr=False)


def write_key(run_dir: Path) -> None:
    """Create the run's key unless it exists, readable only by the run's user."""
    with suppress(FileExistsError):
        descriptor = os.open(run_dir / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def read_key(run_dir: Path) -> RunKey:
    """Read the key written by :func:`write_key`.

    Raises:
        ConfigError: the key is missing, unreadable or truncated, or the run folder is not visible on this host.
    """
    try:
        secret = read_regular(run_dir / _FILE, at_most=_LONGEST)
    except OSError as error:
        raise ConfigError(f"failed to read the run's key: {error}. All hosts require access to {run_dir}.") from error
    if len(secret) < _SHORTEST:  # anybody could guess an empty key
        raise ConfigError(f"the run's key {run_dir / _FILE} is truncated. Delete it, and launch the run again.")
    return RunKey(run_dir.name, secret)
