"""Who may listen where, and who may ask: TLS, tokens, and what is refused without them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from opd.errors import ConfigError
from opd.machine.address import LOOPBACK, Address, parse_address

TOKEN_VARIABLE = "OPD_TEACHERS_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """A server's certificate chain and private key, PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """The address at which a server listens, its TLS and the token that clients need."""

    address: Address
    tls: Tls | None
    token: str | None

    def url(self, port: int) -> str:
        """Return the address as a pipeline's `teachers.address` has it."""
        return f"{'grpc+tls' if self.tls else 'grpc'}://{Address(self.address.host, port)}"


def parse_endpoint(listen: str, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None) -> ListenAddress:
    """Return the checked endpoint of `opd teachers serve`. Raises: ConfigError for no address, half a certificate, an unfit token, or an open door to other machines."""
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
    """Return the token in `file`, else in OPD_TEACHERS_TOKEN, else None.

    Raises: ConfigError for a file that others may read, or a token that does not fit into a header.
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
