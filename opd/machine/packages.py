"""Versions of the Python packages that are installed."""

from __future__ import annotations

from importlib import metadata


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
