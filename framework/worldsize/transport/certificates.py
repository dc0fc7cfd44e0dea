"""Certificates of one run: an authority that the launching process makes, and a key for every process.

All of it lies in a private folder of the run, every key with mode 0600. Whoever may read that folder is a member.
"""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import final

from worldsize.errors import ConfigError

_AUTHORITY_KEY = "authority.key"
_DAYS = 365
_CONFIG = """[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign
subjectKeyIdentifier = hash
[process]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@final
@dataclass(frozen=True)
class Keys:
    """The keys of the process ``name`` ("worker-0", "server-1") in ``folder``."""

    folder: Path
    name: str

    def check(self) -> None:
        """Raise ConfigError if a file is missing, or if others than its owner may read the key."""
        for path in (self._authority, self._certificate, self._key):
            if not path.is_file():
                raise ConfigError(f"{path} is missing, so that this process is no member of the run.")
        if self._key.stat().st_mode & 0o077:
            raise ConfigError(f"others may read {self._key}. Run chmod 600 on it.")

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 only; both sides must show a certificate of this run's authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate names a process, not a host; see connect()
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._authority)
        context.load_cert_chain(self._certificate, self._key)
        return context

    @property
    def _authority(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def _certificate(self) -> Path:
        return self.folder / f"{self.name}.pem"

    @property
    def _key(self) -> Path:
        return self.folder / f"{self.name}.key"


def mint_authority(folder: Path) -> None:
    """Make the run's own authority, unless it is there.

    Raises:
        ConfigError: there is no openssl, version 3 or later, or it fails.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / _AUTHORITY_KEY).exists():
        extensions = ["-extensions", "authority", "-subj", "/CN=authority"]
        _run(folder, extensions, folder / _AUTHORITY_KEY, folder / "authority.pem")


def mint(folder: Path, name: str) -> Keys:
    """The keys of one process, made if they are missing. Raises ConfigError as above, or if there is no authority."""
    keys = Keys(folder, name)
    if not (folder / f"{name}.pem").exists() and (folder / _AUTHORITY_KEY).exists():
        issuer = ["-CA", str(folder / "authority.pem"), "-CAkey", str(folder / _AUTHORITY_KEY)]
        extensions = ["-extensions", "process", "-subj", f"/CN={name}"]
        _run(folder, [*issuer, *extensions], folder / f"{name}.key", folder / f"{name}.pem")
    keys.check()
    return keys


def _run(folder: Path, options: list[str], key: Path, certificate: Path) -> None:
    config = folder / f".{certificate.stem}.config"
    config.write_text(_CONFIG)
    command = ["openssl", "req", "-x509", "-config", str(config), "-days", str(_DAYS), "-nodes", *options]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", str(key)]
    try:
        subprocess.run([*command, "-out", str(certificate)], check=True, capture_output=True, umask=0o077)
    except FileNotFoundError:
        raise ConfigError("keys are made by the command openssl, which is not installed.") from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"openssl (version 3 or later) could not make {certificate}: {error.stderr}") from None
    finally:
        config.unlink()
