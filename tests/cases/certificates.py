"""Certificates for TLS: all valid for a century, but the one that has expired."""

import shutil
from pathlib import Path

FOLDER = Path(__file__).with_name("tls")


def certificates(folder):
    """Copy them to the folder, with keys that nobody else reads, and return `tls(name, authority)`, a setting."""
    shutil.copytree(FOLDER, folder / "tls")
    for key in (folder / "tls").glob("*.key"):
        key.chmod(0o600)

    def tls(name="rank", authority="authority"):
        return ",".join(str(folder / "tls" / each) for each in (f"{name}.pem", f"{name}.key", f"{authority}.pem"))

    return tls
