"""Certificates of authorities that the tests make up."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import trustme

__all__ = ["certify", "trust"]


def certify(folder: Path, authority: trustme.CA, *names: str, **more: datetime.datetime) -> tuple[Path, Path]:
    """Write cert.pem and key.pem, of a server that is called `names`. A second call replaces them."""
    issued = authority.issue_cert(*names, **more)
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return cert, key


def trust(file: Path, authority: trustme.CA) -> ssl.SSLContext:
    """Write the CA's certificate; a client's context that trusts it."""
    file.write_bytes(authority.cert_pem.bytes())
    return ssl.create_default_context(cafile=file)
