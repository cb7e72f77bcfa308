"""Doors that other machines can reach have TLS and a token; tokens are kept to oneself."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd.config.teachers import FlightTeachers
from opd.errors import ConfigError
from teachers.flight.access import ListenAddress, parse_endpoint, read_root_certs, read_token


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPD_TEACHERS_TOKEN", raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    file.chmod(0o600)
    return file


Files = tuple[Path, Path]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:8815", "[::1]:8815"])
def test_on_this_machine_everything_is_optional(listen: str, certificate: Files, token_file: Path) -> None:
    bare = parse_endpoint(listen, None, None, None)
    assert (bare.tls, bare.token) == (None, None)
    full = parse_endpoint(listen, *certificate, token_file)
    assert (full.token, full.tls and full.tls.key) == ("s3cret", certificate[1].read_bytes())


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "teachers.example:1", "127.0.0.2:1"])
def test_other_machines_need_tls_and_a_token(listen: str, certificate: Files, token_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"without TLS and a token\n"):
        parse_endpoint(listen, None, None, None)
    with pytest.raises(ConfigError, match=r"without TLS\n"):
        parse_endpoint(listen, None, None, token_file)
    with pytest.raises(ConfigError, match=r"without a token\n"):
        parse_endpoint(listen, *certificate, None)
    assert parse_endpoint(listen, *certificate, token_file).token == "s3cret"


def test_the_token_may_come_from_the_environment(certificate: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEACHERS_TOKEN", "by-env")
    assert parse_endpoint("0.0.0.0:1", *certificate, None).token == "by-env"
    monkeypatch.setenv("OPD_TEACHERS_TOKEN", "")
    with pytest.raises(ConfigError, match="OPD_TEACHERS_TOKEN\n  found:  an empty token"):
        parse_endpoint("0.0.0.0:1", *certificate, None)


@pytest.mark.parametrize("listen", ["", "8815", ":8815", "127.0.0.1", "127.0.0.1:", "::1:8815", "a b:1", "h:65536"])
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen\n"):
        parse_endpoint(listen, None, None, None)


def test_half_a_certificate_is_refused(certificate: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of the two"):
        parse_endpoint("127.0.0.1:0", certificate[0], None, None)
    with pytest.raises(ConfigError, match=r"--tls-key\n.*nowhere"):
        parse_endpoint("127.0.0.1:0", certificate[0], tmp_path / "nowhere", None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620])
def test_a_token_that_others_may_read_is_refused(mode: int, token_file: Path) -> None:
    token_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}"):
        read_token(token_file)
    token_file.chmod(0o400)
    assert read_token(token_file) == "s3cret"


@pytest.mark.parametrize("text", ["", "\n", "two words", "zwei\nzeilen", "schlüssel"])
def test_a_token_that_no_header_can_carry(text: str, token_file: Path) -> None:
    token_file.write_text(text)
    with pytest.raises(ConfigError, match="openssl rand"):
        read_token(token_file)


def test_no_token_and_a_missing_file(tmp_path: Path) -> None:
    assert read_token(None) is None
    with pytest.raises(ConfigError, match="No such file"):
        read_token(tmp_path / "nowhere")


def test_the_url_is_what_a_pipeline_needs(certificate: Files) -> None:
    def url(door: ListenAddress) -> str:
        return door.url(7)

    assert url(parse_endpoint("127.0.0.1:0", None, None, None)) == "grpc://127.0.0.1:7"
    assert url(parse_endpoint("[::1]:0", *certificate, None)) == "grpc+tls://[::1]:7"
    for door in (parse_endpoint("127.0.0.1:0", None, None, None), parse_endpoint("[::1]:0", *certificate, None)):
        roots = certificate[0] if door.tls else None
        FlightTeachers(engine="flight", address=url(door), tls_root_certs=roots)


def test_trusted_certificates(certificate: Files, tmp_path: Path) -> None:
    assert read_root_certs(certificate[0]) == certificate[0].read_bytes()
    assert read_root_certs(None) is None
    with pytest.raises(ConfigError, match=r"teachers\.tls_root_certs\n"):
        read_root_certs(tmp_path / "nowhere")
