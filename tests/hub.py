"""Stand-in of the Hugging Face Hub on loopback: what `huggingface_hub` needs to create, fill and read a repository."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_token_of_the_test"
ACCOUNT = "me"


@dataclass
class Repository:
    """Content of a repository after its last commit."""

    is_private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    n_commits: int = 0

    @property
    def sha(self) -> str:
        return f"{self.n_commits:040d}"


class Hub:
    """Server of repositories, each of which only the holder of `TOKEN` may create, and read if it is private.

    Attributes:
        repositories: by `account/name`.
        requests: method and path of all requests, in the order of their arrival.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.uploads: dict[str, bytes] = {}  # by SHA-256
        self.url = ""

    # --- the parts of the API, which return a status and a body ---------------------------------------------------

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/validate-yaml":
            front_matter = json.loads(body)["content"].split("---\n")[1]
            if not isinstance(yaml.safe_load(front_matter), dict):
                return 400, {"errors": [{"message": "no metadata"}], "warnings": []}
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{self.url}/uploads/{entry['oid']}"}}
            return 200, {"transfer": "basic", "objects": objects}

        # /api/models/<owner>/<name>/<kind>/<revision>
        owner, name, kind, _ = path.removeprefix("/api/models/").split("/")
        if kind == "preupload":
            files = []
            for file in json.loads(body)["files"]:
                mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
                files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            return 200, {"files": files}
        assert kind == "commit", path
        return self.commit(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])

    def create(self, body: dict[str, Any]) -> tuple[int, Any]:
        repo_id = f"{body.get('organization') or ACCOUNT}/{body['name']}"
        answer = {"url": f"{self.url}/{repo_id}"}
        if repo_id in self.repositories:
            return 409, answer
        self.repositories[repo_id] = Repository(body["visibility"] == "private")
        return 200, answer

    def commit(self, repo_id: str, operations: list[dict[str, Any]]) -> tuple[int, Any]:
        repository = self.repositories[repo_id]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                repository.files[value["path"]] = self.uploads[value["oid"]]
            elif operation["key"] == "deletedFile":
                del repository.files[value["path"]]
        repository.n_commits += 1
        return 200, {"commitUrl": f"{self.url}/{repo_id}/commit/{repository.sha}", "commitOid": repository.sha}

    def get(self, path: str, has_token: bool) -> tuple[int, Any, dict[str, str]]:
        """Return status, body and headers for the page of a repository or one of its files."""
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        repository = self.repositories.get(f"{owner}/{name}")
        if repository is None or (repository.is_private and not has_token):
            return 401, {}, {"X-Error-Code": "RepoNotFound"}
        if path.startswith("/api/models"):
            if rest and rest[0] == "tree":
                return 404, {}, {"X-Error-Code": "EntryNotFound"}
            siblings = [{"rfilename": file} for file in repository.files]
            about = {"id": f"{owner}/{name}", "private": repository.is_private, "sha": repository.sha}
            return 200, {**about, "siblings": siblings, "tags": [], "downloads": 0}, {}

        # <owner>/<name>/resolve/<revision>/<file>
        file = "/".join(rest[2:])
        headers = {"X-Repo-Commit": repository.sha}
        if file not in repository.files:
            return 404, {}, headers | {"X-Error-Code": "EntryNotFound"}
        content = repository.files[file]
        return 200, content, headers | {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve an empty hub within the context."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        @property
        def has_token(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def body(self) -> bytes:
            hub.requests.append(f"{self.command} {self.path}")
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_POST(self) -> None:
            body = self.body()
            if not self.has_token:
                self.answer(401, {"error": "Invalid username or password."})
                return
            self.answer(*hub.post(unquote(urlsplit(self.path).path), body))

        def do_PUT(self) -> None:
            content = self.body()
            oid = self.path.rpartition("/")[2]
            assert hashlib.sha256(content).hexdigest() == oid
            hub.uploads[oid] = content
            self.answer(200, {})

        def do_GET(self) -> None:
            self.body()
            self.answer(*hub.get(unquote(urlsplit(self.path).path), self.has_token))

        do_HEAD = do_GET  # noqa: N815  (the name is that of the base class)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
