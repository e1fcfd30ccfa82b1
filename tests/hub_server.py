"""A stand-in for the model hub on the loopback interface, for tests that push, pull and load.

It speaks what `huggingface_hub` asks for: create a repository, ask how files are uploaded, commit, list, describe and
fetch, with the hub's headers and error codes; writing takes any token. Files go into the commit itself; those that
it is told to keep apart go by git's large-file protocol, as weights do on the real hub, and come from another host name
(`hub_lfs`: a client that sends so must not have hf_xet). `python -m tests.hub_server` serves until it is stopped.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.hub_lfs import LargeFiles, pointer

_NAME = r"(?P<repo>[^/]+/[^/]+)"
_OWNER = "somebody"
#: What is asked of an owner only; the parts of large files go to addresses that only he was told.
_WRITES = r"/api/(repos|models)/|.+\.git/info/lfs/objects/batch"


class Repository:
    """Commits of one repository: id -> files, and where its branches stand."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit({}, "main", "initial commit")

    def commit(self, files: dict[str, bytes], branch: str, message: str) -> str:
        """Put a new state on a branch; return its id."""
        content = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        oid = hashlib.sha1(json.dumps([len(self.commits), message, content]).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch or an id names."""
        return self.branches.get(revision, revision if revision in self.commits else None)


class Hub(ThreadingHTTPServer):
    """All repositories and a log of the requests.

    Args:
        lfs: patterns of the names of files that are kept in the large-file store.
    """

    daemon_threads = True

    def __init__(self, lfs: Sequence[str] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lfs = lfs
        self.large = LargeFiles()
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT has to be."""
        return f"{'http'}://127.0.0.1:{self.server_port}"

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """What a repository holds."""
        found = self.repositories[repo]
        return found.commits[found.resolve(revision) or ""]


@contextmanager
def serve(lfs: Sequence[str] = ()) -> Iterator[Hub]:
    """A hub that lives as long as the block."""
    hub = Hub(lfs)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def git_oid(data: bytes) -> str:
    """The name git gives to a file's content, which the client compares with its own."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        # Read before anything is answered: what is left unread would be taken for the next request.
        self.body = self._read()
        with self.server.lock:
            self.server.requests.append((self.command, path))
            if self.command == "POST" and re.match(_WRITES, path) and not self.headers.get("Authorization"):
                return self._answer(401, {"error": "Invalid username or password."})
            for method, pattern, action in _ROUTES:
                found = re.fullmatch(pattern, path)
                if found is not None and self.command in method:
                    action(self, **found.groupdict())
                    return
            self._answer(404, {"error": f"the stand-in hub does not know {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _route

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if not isinstance(content, bytes):
            self.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: str, message: str, status: int = 404) -> None:
        self._answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def _commit_of(self, repo: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and its commit; None after a refusal."""
        found = self.server.repositories.get(repo)
        if found is None:
            self._refuse("RepoNotFound", "Repository not found")
            return None
        oid = found.resolve(revision)
        if oid is None:
            self._refuse("RevisionNotFound", "Invalid rev id")
            return None
        return found, oid

    def create(self) -> None:
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or _OWNER}/{wanted['name']}"
        is_new = name not in self.server.repositories
        self.server.repositories.setdefault(name, Repository())
        answer = {"url": f"{self.server.endpoint}/{name}", "name": name, "id": name}
        self._answer(200 if is_new else 409, answer)

    def validate_yaml(self) -> None:
        content = json.loads(self.body)["content"]
        errors = [] if re.match(r"---\n.*?\n---\n", content, re.DOTALL) else [{"message": "no metadata"}]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        found = self._commit_of(repo, revision)
        if found is None:
            return
        present = found[0].commits[found[1]]
        answers = []
        for file in json.loads(self.body)["files"]:
            data = present.get(file["path"])
            mode = "lfs" if any(fnmatch(file["path"], pattern) for pattern in self.server.lfs) else "regular"
            oid = None if data is None else self.server.large.oid_of(data) or git_oid(data)
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": answers})

    def commit(self, repo: str, revision: str) -> None:
        found = self._commit_of(repo, revision)
        if found is None:
            return
        files, message = dict(found[0].commits[found[1]]), ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            kind, value = entry["key"], entry["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile" and self.server.large.has(value) and value["algo"] == "sha256":
                files[value["path"]] = self.server.large.objects[value["oid"]]
            elif kind in ("deletedFile", "deletedFolder"):
                files = {n: d for n, d in files.items() if n != value["path"] and not n.startswith(value["path"] + "/")}
            else:
                self._answer(400, {"error": f"the stand-in hub does not know the entry {kind!r}"})
                return
        oid = found[0].commit(files, revision, message)
        url = f"{self.server.endpoint}/{repo}/commit/{oid}"
        self._answer(200, {"commitUrl": url, "commitOid": oid, "success": True, "hookOutput": ""})

    def lfs_batch(self, repo: str) -> None:
        self._answer(200, self.server.large.batch(json.loads(self.body), f"{self.server.endpoint}/{repo}"))

    def lfs_put(self, repo: str, oid: str) -> None:
        self._answer(200 if self.server.large.put(oid, self.body) else 400, {})

    def lfs_put_part(self, repo: str, oid: str, number: str) -> None:
        self._answer(200, {}, ETag=f'"{self.server.large.put_part(oid, int(number), self.body)}"')

    def lfs_complete(self, repo: str) -> None:
        self._answer(200 if self.server.large.complete(json.loads(self.body)) else 400, {})

    def lfs_verify(self, repo: str) -> None:
        self._answer(200 if self.server.large.has(json.loads(self.body)) else 404, {})

    def lfs_fetch(self, oid: str) -> None:
        # The address is all that opens this door: a client that showed its token here would show it to a stranger.
        if self.headers.get("Authorization") is not None:
            self._answer(400, {"error": "a token was sent to the store of large files"})
            return
        self._send(self.server.large.objects[oid], ETag=f'"{oid}"')

    def branch(self, repo: str, revision: str) -> None:
        found = self._commit_of(repo, "main")
        if found is None:
            return
        if revision in found[0].branches:
            self._answer(409, {"error": "Reference already exists"})
            return
        found[0].branches[revision] = found[1]
        self._answer(200, {})

    def describe(self, repo: str, revision: str = "main") -> None:
        found = self._commit_of(repo, revision)
        if found is None:
            return
        files = [{"rfilename": name} for name in sorted(found[0].commits[found[1]])]
        self._answer(
            200, {"id": repo, "modelId": repo, "sha": found[1], "siblings": files, "tags": [], "private": False}
        )

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        found = self._commit_of(repo, revision)
        if found is None:
            return
        files = [
            self._entry(name, data)
            for name, data in sorted(found[0].commits[found[1]].items())
            if not folder or name.startswith(folder + "/")
        ]
        if folder and not files:
            self._refuse("EntryNotFound", f"{folder} does not exist")
            return
        self._answer(200, files)

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        oid = self.server.large.oid_of(data)
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data)}
        if oid is None:
            return {**entry, "oid": git_oid(data)}
        text = pointer(oid, len(data))
        return {**entry, "oid": git_oid(text), "lfs": {"oid": oid, "size": len(data), "pointerSize": len(text)}}

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._commit_of(repo, revision)
        if found is None:
            return
        data = found[0].commits[found[1]].get(name)
        if data is None:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=found[1])
            return
        oid = self.server.large.oid_of(data)
        if oid is None:
            self._send(data, ETag=f'"{git_oid(data)}"', X_Repo_Commit=found[1])
            return
        # By another name, so that for the client it is another host.
        place = f"{self.server.endpoint.replace('127.0.0.1', 'localhost')}/large/{oid}"
        about = {"X_Linked_ETag": f'"{oid}"', "X_Linked_Size": str(len(data)), "X_Repo_Commit": found[1]}
        self._answer(302, {}, Location=place, ETag=f'"{git_oid(pointer(oid, len(data)))}"', **about)

    def _send(self, data: bytes, **common: str) -> None:
        """Answer with a file, or with the part of it that was asked for."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            self._answer(200, data, Accept_Ranges="bytes", **common)
            return
        start, stop = int(wanted[1]), int(wanted[2] or len(data) - 1) + 1
        place = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206, data[start:stop], Accept_Ranges="bytes", Content_Range=place, **common)


_ROUTES = (
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), rf"/api/models/{_NAME}/preupload/(?P<revision>.+)", _Handler.preupload),
    (("POST",), rf"/api/models/{_NAME}/commit/(?P<revision>.+)", _Handler.commit),
    (("POST",), rf"/api/models/{_NAME}/branch/(?P<revision>.+)", _Handler.branch),
    (("GET",), rf"/api/models/{_NAME}", _Handler.describe),
    (("GET",), rf"/api/models/{_NAME}/revision/(?P<revision>.+)", _Handler.describe),
    (("GET",), rf"/api/models/{_NAME}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    (("POST",), rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), rf"/{_NAME}\.git/info/lfs/objects/(?P<oid>[0-9a-f]{{64}})", _Handler.lfs_put),
    (("PUT",), rf"/{_NAME}\.git/info/lfs/objects/(?P<oid>[0-9a-f]{{64}})/(?P<number>\d+)", _Handler.lfs_put_part),
    (("POST",), rf"/{_NAME}\.git/info/lfs/complete", _Handler.lfs_complete),
    (("POST",), rf"/{_NAME}\.git/info/lfs/verify", _Handler.lfs_verify),
    (("GET", "HEAD"), r"/large/(?P<oid>[0-9a-f]{64})", _Handler.lfs_fetch),
    (("GET", "HEAD"), rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
)

if __name__ == "__main__":
    with serve() as hub:
        print(hub.endpoint, flush=True)
        threading.Event().wait()
