"""Which build of torch pip would install, and how much it would download; asked before anything is downloaded."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Distributions that come with an accelerator build and with no other.
ACCELERATOR_PREFIXES = ("nvidia-", "cuda-", "intel-", "onemkl", "rocm", "triton", "pytorch-triton")
SIZE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class TorchChoice:
    """What the user said about torch."""

    index: str | None = None
    find_links: str | None = None
    accept_accelerator: bool = False

    def pip_options(self) -> list[str]:
        """Options of pip that make it prefer what the user named."""
        options = ["--extra-index-url", self.index] if self.index else []
        return options + (["--find-links", self.find_links] if self.find_links else [])


@dataclass(frozen=True)
class Download:
    """One wheel that pip would install."""

    name: str
    version: str
    url: str
    size_bytes: int | None = None

    @property
    def is_accelerator(self) -> bool:
        """Whether only accelerator builds of torch bring it."""
        return self.name.lower().startswith(ACCELERATOR_PREFIXES)


def resolve(python: Path, requirement: str, options: list[str]) -> list[Download]:
    """Ask pip what it would install for `requirement`, dependencies included; reads metadata only.

    Raises subprocess.CalledProcessError with pip's words in `stderr`.
    """
    command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    result = subprocess.run([*command, *options, requirement], check=True, capture_output=True, text=True)
    return parse_report(json.loads(result.stdout))


def parse_report(report: dict[str, Any]) -> list[Download]:
    """Read pip's installation report (format version 1)."""
    return [
        Download(item["metadata"]["name"], item["metadata"]["version"], item["download_info"]["url"])
        for item in report["install"]
    ]


def accelerator_part(downloads: list[Download]) -> list[Download]:
    """Torch and its accelerator packages with their sizes, or nothing if this is a CPU build."""
    heavy = [download for download in downloads if download.is_accelerator]
    if not heavy:
        return []
    torch = [download for download in downloads if download.name == "torch"]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(_with_size, torch + heavy))


def _with_size(download: Download) -> Download:
    return Download(download.name, download.version, download.url, size_of(download.url))


def size_of(url: str) -> int | None:
    """Bytes behind a URL, by a HEAD request or the file's size; None if nobody says."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        path = Path(urllib.request.url2pathname(parts.path))
        return path.stat().st_size if path.is_file() else None
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=SIZE_TIMEOUT_S, context=context
        ) as answer:
            length = answer.headers.get("Content-Length")
    except (urllib.error.URLError, TimeoutError, OSError):
        return None
    return int(length) if length and length.isdecimal() else None


def describe_size(downloads: list[Download]) -> str:
    """The sum in GB, as a lower bound where a size is unknown."""
    known = [download.size_bytes for download in downloads if download.size_bytes is not None]
    if not known:
        return "several GB (the index gives no sizes)"
    bound = "at least " if len(known) < len(downloads) else ""
    return f"{bound}{sum(known) / 1e9:.1f} GB in {len(downloads)} packages"
