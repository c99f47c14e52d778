"""A Hugging Face hub on 127.0.0.1: it serves local folders as model repositories, with the faults that a test asks for,
and takes what is pushed to it.

Start the program under test as a subprocess with HF_ENDPOINT=hub.url (huggingface_hub reads it when imported) and an
HF_HOME of its own. There is no Xet: files come over plain HTTP, whether or not HF_HUB_DISABLE_XET is set.
"""

import hashlib
import json
import re
from base64 import b64decode
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self
from urllib.parse import unquote

COMMIT = "5eed" * 10  # the one revision of every repository, also called main
TOKEN = "hf_test"  # what opens the gated repositories

COMMIT_ROUTE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>preupload|commit)/main")
REPO = r"(?P<repo>[^/]+(?:/[^/]+)?)"
API_ROUTE = re.compile(rf"/api/models/{REPO}(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
FILE_ROUTE = re.compile(rf"(?P<cdn>/cdn)?/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class HubServer(ThreadingHTTPServer):
    """The hub as a context manager: `with HubServer({"org/tiny": folder}) as hub`, at hub.url."""

    request_queue_size = 64  # snapshot_download opens many connections at once

    def __init__(
        self, repos: Mapping[str, Path], gated: Collection[str] = (), cut_once: Mapping[str, int] | None = None
    ) -> None:
        """Serve `repos`; of a file in `cut_once` the first GET gets only that many bytes of what it is promised."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = dict(repos)
        self.gated = set(gated)  # like the hub's, they list their files to anyone and keep what is in them
        self.gated_api = False  # True: they keep the listings too
        self.cut_once = dict(cut_once or {})  # an entry goes when it has been used
        self.requests: list[tuple[str, str, str | None, str | None]] = []  # (method, path, Range, Authorization)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pushed: dict[str, dict[str, bytes]] = {}  # the files of each repository that was made
        self.cdn_url = f"http://localhost:{self.server_port}/cdn"  # another origin, as the hub's: no token goes there

    def __enter__(self) -> Self:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one request and closes the connection."""

    server: HubServer

    def do_GET(self) -> None:
        """Log the request, then answer it by its route."""
        hub, token, path = self.server, self.headers["Authorization"], self.path.partition("?")[0]
        hub.requests.append((self.command, self.path, self.headers["Range"], token))
        asked_file = FILE_ROUTE.fullmatch(path)
        route = asked_file or API_ROUTE.fullmatch(path)
        if route is None:
            return self.fail(404, "NoRoute", "The hub of the tests has no such route")
        repo, revision = route["repo"], unquote(route["revision"] or "main")
        locked = repo in hub.gated and token != f"Bearer {TOKEN}"
        if repo in hub.pushed:
            listing = [tree_entry(name, data) for name, data in hub.pushed[repo].items()]
            return self.answer_listing(repo, listing, tree=route["what"] == "tree")
        if repo not in hub.repos:
            return self.fail(404 if token else 401, "RepoNotFound", "Repository not found")
        if locked and (not asked_file["cdn"] if asked_file else hub.gated_api):
            return self.fail(403 if token else 401, "GatedRepo", f"Access to model {repo} is restricted.")
        if revision not in ("main", COMMIT):
            return self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        folder = hub.repos[repo]
        files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        if asked_file is None:
            listing = [tree_entry(name, path.read_bytes()) for name, path in files.items()]
            return self.answer_listing(repo, listing, tree=route["what"] == "tree")
        name, redirect = unquote(asked_file["file"]), None if asked_file["cdn"] else hub.cdn_url + path
        if name not in files:
            return self.fail(404, "EntryNotFound", "Entry not found")
        return self.answer_file(name, files[name].read_bytes(), redirect)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """Make a repository, or take files into one; all of them inline, none as LFS."""
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        hub.requests.append((self.command, self.path, None, self.headers["Authorization"]))
        route = COMMIT_ROUTE.fullmatch(path)
        answer: Any = {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.pushed.setdefault(name, {})
            answer = {"url": f"{hub.url}/{name}", "private": asked.get("private")}
        elif route and route["what"] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif route:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del hub.pushed[route["repo"]][line["value"]["path"]]
                elif line["key"] == "file":
                    hub.pushed[route["repo"]][line["value"]["path"]] = b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{hub.url}/{route['repo']}/commit/{COMMIT}", "commitOid": COMMIT}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def answer_listing(self, repo: str, listing: Any, tree: bool) -> None:
        """The listing of a repository's files, or what model_info reads."""
        if not tree:
            siblings = [{"rfilename": entry["path"], "size": entry["size"]} for entry in listing]
            listing = {"id": repo, "sha": COMMIT, "gated": repo in self.server.gated and "manual", "siblings": siblings}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(listing).encode())

    def answer_file(self, name: str, data: bytes, redirect: str | None) -> None:
        """A file's bytes, all or the range asked for; of weights first the redirect to them."""
        entry = tree_entry(name, data)
        etag = f'"{entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]}"'
        headers = {"X-Repo-Commit": COMMIT, "ETag": etag}
        if redirect and "lfs" in entry:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": etag, "Location": redirect}
            return self.send(302, headers)
        cut = self.server.cut_once.pop(name, None) if self.command == "GET" else None
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if asked is None:
            return self.send(200, headers, data, cut)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if first > last:
            return self.send(416, {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.send(206, headers, data[first : last + 1], cut)

    def fail(self, status: int, code: str, message: str) -> None:
        """An error; huggingface_hub tells them apart by `code`."""
        self.send(status, {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": COMMIT})

    def send(self, status: int, headers: Mapping[str, str], body: bytes = b"", cut: int | None = None) -> None:
        """One response; a body that is cut breaks off after `cut` bytes, and the connection is closed."""
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""


def tree_entry(name: str, data: bytes) -> dict[str, Any]:
    """A file as a tree listing gives it; *.safetensors are LFS files, known by their sha256."""
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # git's
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": oid}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
