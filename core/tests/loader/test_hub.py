"""The hub path against a small server that speaks the hub's file API; each case runs in a child process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save

COMMIT = "a" * 40
FILES = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4}).encode(),
    "generation_config.json": b'{"eos_token_id": 5}',
    "model.safetensors": save({"x": torch.arange(200_000, dtype=torch.float32)}),
    "pytorch_model.bin": b"never fetched",
    "modeling.py": b"raise SystemExit('code of a repository was run')",
    "onnx/model.safetensors": b"never fetched",
}
CHILD = """
import json, sys
from vllm_core.config import ModelConfig
from vllm_core.errors import VLLMCoreError
from vllm_core.loader.source import open_model
try:
    source = open_model(ModelConfig(model=sys.argv[1], revision=sys.argv[2] or None))
    tensors = {name: float(tensor.sum()) for name, tensor in source.weights()} if sys.argv[3] else {}
    files = sorted(path.relative_to(source.path).as_posix() for path in source.path.rglob("*") if path.is_file())
    print(json.dumps({"config": source.config, "tensors": tensors, "files": files}))
except VLLMCoreError as error:
    print(json.dumps({"error": type(error).__name__, "found": error.found, "fix": error.fix, "what": error.what}))
"""


class Hub(ThreadingHTTPServer):
    """Repositories `owner/name` (its files as `FILES`), `owner/gated`; anything else is unknown."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, str]] = []
        self.cut_once = False
        self.files = dict(FILES)


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        """Quiet."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Range", "")))
        path = self.path.split("?")[0]
        if "/gated" in path:
            return self.reply(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, body)
        match = re.fullmatch(r"(?:/api/models)?/owner/name(/.*)?", path)
        if match is None and not path.startswith("/blobs/"):
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, body)
        if path.startswith("/blobs/"):
            return self.blob(path.removeprefix("/blobs/"), body)
        revision = re.search(r"/(?:revision|resolve|tree)/([^/]+)", path)
        if revision and revision[1] not in ("main", COMMIT):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev"}, body)
        if "/resolve/" in path:
            return self.resolve(path.split("/resolve/")[1].partition("/")[2], body)
        return self.listing("/tree/" in path, body)

    def listing(self, tree: bool, body: bool) -> None:
        if tree:
            content = [
                {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                for name, raw in self.server.files.items()
            ]
        else:
            content = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.server.files]}
        self.reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, body)

    def resolve(self, name: str, body: bool) -> None:
        raw = self.server.files.get(name)
        if raw is None:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, body)
        etag = {"ETag": f'"{hashlib.sha256(raw).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if name.endswith(".safetensors"):
            # Large files lie elsewhere.
            elsewhere = f"http://localhost:{self.server.server_port}/blobs/{name}"
            linked = {"X-Linked-ETag": etag["ETag"], "X-Linked-Size": str(len(raw)), "Location": elsewhere}
            return self.reply(302, b"", {**etag, **linked}, body)
        return self.reply(200, raw, etag, body)

    def blob(self, name: str, body: bool) -> None:
        raw = self.server.files[name]
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(first[1]) if first else 0
        headers = {"Content-Range": f"bytes {start}-{len(raw) - 1}/{len(raw)}"} if first else {}
        cut, self.server.cut_once = self.server.cut_once and body, self.server.cut_once and not body
        self.reply(206 if first else 200, raw[start:], headers, body, cut=len(raw) * 3 // 4 if cut else None)

    def reply(self, status: int, raw: bytes, headers: dict[str, str], body: bool, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(raw[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def ask(hub, tmp_path):
    """Open a model in a child process whose hub is the test's server, with a cache of its own."""

    def call(name="owner/name", revision="", weights=True, **environ):
        base = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        settings = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        done = subprocess.run(
            [sys.executable, "-c", CHILD, name, revision, "yes" if weights else ""],
            env={**base, **settings, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return call


SUM = float(torch.arange(200_000, dtype=torch.float32).sum())


def test_only_what_is_needed_is_fetched(ask, hub):
    got = ask()
    assert got["config"]["hidden_size"] == 4
    assert got["tensors"] == {"x": SUM}
    assert got["files"] == ["config.json", "generation_config.json", "model.safetensors"]
    assert not [path for _, path, _ in hub.requests if path.endswith((".bin", ".py")) or "onnx" in path]


def test_weights_are_not_fetched_until_asked_for(ask, hub):
    assert ask(weights=False)["files"] == ["config.json", "generation_config.json"]
    assert not [path for _, path, _ in hub.requests if "safetensors" in path]


def test_cut_download_is_resumed_where_it_stopped(ask, hub):
    # The client counts what it has in pieces of 10 MiB.
    hub.files["model.safetensors"] = save({"x": torch.ones(5_000_000)})
    hub.cut_once = True
    assert ask()["tensors"] == {"x": 5e6}
    ranges = [found for _, path, found in hub.requests if path.startswith("/blobs/") and found]
    assert any(int(re.findall(r"\d+", found)[0]) > 0 for found in ranges), hub.requests


def test_offline_with_cache_asks_nobody(ask, hub):
    ask()
    hub.requests.clear()
    assert ask(HF_HUB_OFFLINE="1")["tensors"] == {"x": SUM}
    assert hub.requests == []


def test_offline_without_cache_says_so(ask, hub):
    got = ask(HF_HUB_OFFLINE="1")
    assert got["error"] == "ModelNotFoundError"
    assert "HF_HUB_OFFLINE" in got["found"]
    assert hub.requests == []


def test_cache_serves_where_the_hub_cannot_be_reached(ask):
    ask()
    assert ask(HF_ENDPOINT="http://127.0.0.1:9")["tensors"] == {"x": SUM}


def test_no_hub_and_no_cache_is_an_error(ask):
    got = ask(HF_ENDPOINT="http://127.0.0.1:9")
    assert got["error"] == "ModelNotFoundError"
    assert "cannot be reached" in got["found"]


def test_gated_repository_says_what_to_do(ask):
    got = ask("owner/gated")
    assert got["error"] == "ModelNotFoundError"
    assert "HF_TOKEN" in got["fix"]
    assert "licence" in got["fix"]


def test_unknown_repository_is_an_error(ask):
    got = ask("owner/nobody")
    assert got["error"] == "ModelNotFoundError"
    assert "no repository of that name" in got["found"]


def test_unknown_revision_is_an_error(ask):
    assert "no such revision" in ask(revision="v9")["found"]


def test_repository_without_safetensors_is_a_weights_error(ask, hub):
    del hub.files["model.safetensors"], hub.files["onnx/model.safetensors"]
    assert ask()["error"] == "WeightsError"


def test_repository_of_one_gguf_is_opened(ask, hub, write_gguf):
    import numpy as np

    raw = write_gguf(tensors=[("token_embd.weight", np.ones((2, 64), np.float32), None)]).read_bytes()
    hub.files = {"README.md": b"", "model-q8.gguf": raw}
    assert ask()["tensors"] == {"model.embed_tokens.weight": 128.0}
