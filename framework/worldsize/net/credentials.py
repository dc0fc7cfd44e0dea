"""The secrets of a run: the key that authenticates its hosts, and the certificates of its processes.

The launching process makes the key and a certificate authority, and every process gets a certificate and a key of its
own. They are in a private folder of the run, every key with mode 0600. Whoever can read that folder is a member of the
run and can issue further certificates; nobody else can connect to a server that asks for credentials.
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
    """The certificate and key by which one process proves that it is a member of the run.

    Attributes:
        folder: The run's private folder of certificates, see :func:`create_authority`.
        name: The process's name, such as "worker-0" or "server-1". It is the common name of the certificate, so that
            peers know which process they talk to, and the stem of the two files.
    """

    folder: Path
    name: str

    def check(self) -> None:
        """Raise ConfigError if a file is missing, or if users other than its owner may read the key."""
        for path in (self._authority, self._certificate, self._key):
            if not path.is_file():
                raise ConfigError(f"{path} is missing, so this process is not a member of the run.")
        if self._key.stat().st_mode & 0o077:
            raise ConfigError(f"others may read {self._key}. Run chmod 600 on it.")

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Make a TLS context for the listening (``server=True``) or the connecting side.

        It allows TLS 1.3 only, and both sides must show a certificate that this run's authority has signed. Host names
        are not checked, since a certificate names a process: compare ``Channel.identity`` with the expected name.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # connect() compares the process's name instead
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
    """Create the run's own certificate authority in ``folder``, unless it is there already.

    Call it in the launching process (``Strategy.prepare``). The folder is created with mode 0700.
    """
    from worldsize.net.signing import sign_authority  # takes 0.1 s, which runs on one host do not need

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / f"{_AUTHORITY}.pem").exists():
        sign_authority(folder, _AUTHORITY)


def issue_certificate(folder: Path, name: str) -> Credentials:
    """Return the credentials of the process ``name``, and sign a certificate for it if it has none yet.

    Raises:
        ConfigError: There is no authority in ``folder``, its key cannot be read, or others may read the key of
            ``name``.
    """
    from worldsize.net.signing import sign_process

    credentials = Credentials(folder, name)
    if not (folder / f"{name}.pem").exists() and (folder / f"{_AUTHORITY}.key").exists():
        sign_process(folder, name, authority=_AUTHORITY)
    credentials.check()
    return credentials


_FILE = "agents.key"
_SHORTEST, _LONGEST = 32, 1 << 10  # bytes


@final
@dataclass(frozen=True)
class RunKey:
    """The run's id and the secret that its hosts share."""

    run_id: str
    secret: bytes = field(repr=False)


def write_key(run_dir: Path) -> None:
    """Create the run's key unless it exists; only the run's user may read it."""
    with suppress(FileExistsError):
        descriptor = os.open(run_dir / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def read_key(run_dir: Path) -> RunKey:
    """Return the key that :func:`write_key` created.

    Raises:
        ConfigError: the run folder has no key, or is not visible here.
    """
    try:
        secret = read_regular(run_dir / _FILE, at_most=_LONGEST)
    except OSError as error:
        raise ConfigError(f"the run's key cannot be read: {error}. All hosts need the run folder {run_dir}.") from error
    if len(secret) < _SHORTEST:  # an empty key would be known to everybody
        raise ConfigError(f"the run's key {run_dir / _FILE} is cut off. Remove it, and launch the run again.")
    return RunKey(run_dir.name, secret)
