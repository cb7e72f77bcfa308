"""Access to served teachers: TLS certificates and tokens, and the addresses that are refused without them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from opd.errors import ConfigError
from opd.machine.address import LOOPBACK, Address, parse_address

TOKEN_VARIABLE = "OPD_TEACHERS_TOKEN"
"""Environment variable with the token, for a server and a client without a token file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """A server's certificate chain and private key, both as PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """The address at which a server listens, its TLS and the token that clients need."""

    address: Address
    tls: Tls | None
    token: str | None

    def url(self, port: int) -> str:
        """Return the address in the form of `teachers.address` in a pipeline. `port` may differ from the one asked for:
        with port 0 the system chooses one."""
        return f"{'grpc+tls' if self.tls else 'grpc'}://{Address(self.address.host, port)}"


def parse_endpoint(listen: str, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None) -> ListenAddress:
    """Return where `opd teachers serve` listens, from its options.

    Raises: ConfigError if `listen` is no address, if only one of certificate and key is given, if the token is unfit, or if
    other machines can reach the address and TLS or the token is missing.
    """
    address = parse_address(listen)
    if address is None:
        raise ConfigError.at(
            "--listen", found=listen, wanted="HOST:PORT or [IPv6]:PORT", fix="for example --listen 127.0.0.1:8815"
        )
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError.at(
            "--tls-cert and --tls-key", found="one of the two", wanted="both or none", fix="give the other one too"
        )
    tls = (
        Tls(cert=_read_file(tls_cert, "--tls-cert"), key=_read_file(tls_key, "--tls-key"))
        if tls_cert and tls_key
        else None
    )
    token = read_token(token_file)
    if not address.is_loopback and (tls is None or token is None):
        missing = [name for name, value in (("TLS", tls), ("a token", token)) if value is None]
        raise ConfigError.at(
            "--listen",
            found=f"{address} without {' and '.join(missing)}",
            wanted=f"TLS and a token, or one of {', '.join(LOOPBACK)}",
            fix="give --tls-cert, --tls-key and --token-file: other machines can reach this address",
        )
    return ListenAddress(address=address, tls=tls, token=token)


def read_root_certs(file: Path | None) -> bytes | None:
    """Return the certificates that a client trusts; None without TLS. Raises: ConfigError."""
    return None if file is None else _read_file(file, "teachers.tls_root_certs")


def read_token(file: Path | None) -> str | None:
    """Return the token in `file`; without a file that of OPD_TEACHERS_TOKEN; None if the variable is not set either.

    Raises: ConfigError if the file cannot be read or others may read it, or if the token does not fit into a header.
    """
    if file is None:
        source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        source, token = str(file), _read_file(file, "token file").decode(errors="replace").strip()
        mode = file.stat().st_mode & 0o777
        if mode & 0o077:
            raise ConfigError.at(
                file,
                found=f"a token that others may read (mode {mode:o})",
                wanted="a file of mode 600",
                fix=f"chmod 600 {file}, and make a new token: this one may be known",
            )
    if not token or not all("!" <= c <= "~" for c in token):
        raise ConfigError.at(
            source,
            found="an empty token" if not token else "a token with spaces or signs beyond ASCII",
            wanted="one line of printable ASCII",
            fix="make one with `openssl rand -hex 32`",
        )
    return token


def _read_file(file: Path, setting: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError.at(
            setting, found=f"{file}: {error.strerror}", wanted="a file that can be read", fix="correct the path"
        ) from None
