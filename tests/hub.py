"""A small server with the part of the Hub's API that huggingface_hub and datasets use for models and data sets.

It keeps repositories in memory (a data set under `datasets/owner/name`), knows some tokens, fails where a test asks it
to, and disappears for some seconds. It has no xet storage, as mirrors of the Hub have none; files go the older way, git
LFS.
"""

import base64
import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, Timer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".png")  # what goes through LFS
METADATA = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)


@dataclass
class Repo:
    """A repository: its files at the newest commit, the messages of all commits, and its earlier states by tag."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    tags: dict[str, "Repo"] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        """The newest commit."""
        content = [self.commits, {name: name_blob(data) for name, data in sorted(self.files.items())}]
        return hashlib.sha1(json.dumps(content).encode()).hexdigest()

    def find(self, name: str) -> str | None:
        """Return the id by which the Hub compares a file: SHA-256 for LFS files, otherwise git's id."""
        if name not in self.files:
            return None
        data = self.files[name]
        return hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else name_blob(data)


@dataclass
class Fault:
    """A fault: the next `times` requests of this kind get `status`, or an answer that is cut off.

    sent: bytes of the answer before that; stall: seconds of silence before it is cut off; gone: seconds for which the
    server then refuses connections.
    """

    method: str
    path: str
    status: int = 0
    times: int = 1
    sent: int = 0
    stall: float = 0.0
    gone: float = 0.0


class Hub(ThreadingHTTPServer):
    """The server. users: token -> name, role of the token and organizations of its owner."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.users: dict[str, tuple[str, str, list[str]]] = {
            "hf_ada": ("ada", "write", ["engines"]),
            "hf_reader": ("ada", "read", []),
            "hf_fine": ("ada", "fineGrained", []),
        }
        self.repos: dict[str, Repo] = {"eve/taken": Repo()}
        self.stored: dict[str, bytes] = {}  # LFS objects by SHA-256
        self.faults: list[Fault] = []
        self.asked: list[str] = []  # method and path of every request
        self.is_gone = False

    def fail(self, method: str, path: str, **what: float) -> None:
        """Make the next requests of this method fail whose path contains the pattern."""
        self.faults.append(Fault(method, path, **what))

    def start(self) -> Thread:
        thread = Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        return thread

    def leave(self, seconds: float) -> None:
        """Refuse connections, and break off open ones at their next request, for some seconds."""
        self.is_gone = True
        self.shutdown()
        self.server_close()
        timer = Timer(seconds, self.come_back)
        timer.daemon = True
        timer.start()

    def come_back(self) -> None:
        """Answer again, at the same address."""
        self.socket = socket.socket(self.address_family, self.socket_type)
        self.server_bind()
        self.server_activate()
        self.is_gone = False
        self.start()

    def take_fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == method and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a Hub until the end of the block."""
    hub = Hub()
    hub.start()
    try:
        yield hub
    finally:
        if not hub.is_gone:
            hub.shutdown()
            hub.server_close()


def name_blob(data: bytes) -> str:
    """Return git's id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def check_metadata(card: str) -> list[str]:
    """Return the errors that the Hub would report in a card's metadata, according to its documentation."""
    found = METADATA.match(card)
    if not found:
        return ["no metadata"]
    data = yaml.safe_load(found[1])
    words = ("library_name", "pipeline_tag", "license")
    errors = [f"{key} must be text" for key in words if not isinstance(data.get(key, ""), str)]
    data["language"] = [data["language"]] if isinstance(data.get("language"), str) else data.get("language")
    for key in ("tags", "datasets", "metrics", "language"):
        if not all(isinstance(value, str) for value in data.get(key) or []):
            errors.append(f"{key} must be a list of texts")
    for model in data.get("model-index", []):
        for result in model["results"]:
            required = [model["name"], result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]]
            required += [metric["type"] for metric in result["metrics"]]
            if not all(isinstance(value, str) and value for value in required):
                errors.append("model-index lacks a name or type")
            if not all(isinstance(metric["value"], int | float) for metric in result["metrics"]):
                errors.append("model-index has a value that is not a number")
    return errors


class Refusal(Exception):
    """An answer with an error: status, message, and perhaps the Hub's code for it."""


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of a connection."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        """Handle a request; a disconnected client is not an error."""
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True
        self.close_connection |= self.server.is_gone

    def serve_request(self) -> None:
        """Answer by the first matching route, unless a fault is due."""
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if self.server.is_gone:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.take_fault(self.command, path)
        self.broken = fault if fault is not None and fault.sent else None
        try:
            if fault is not None and fault.status:
                raise Refusal(fault.status, "this goes wrong on purpose")
            for method, pattern, answer in ROUTES:
                if self.command in method.split() and (found := re.fullmatch(pattern, path)):
                    answer(self, body, *found.groups())
                    break
            else:
                raise Refusal(404, f"{self.command} {path} is not known here")
        except Refusal as refusal:
            status, message, *code = refusal.args
            headers = dict(zip(("X_Error_Message", "X_Error_Code"), (message, *code), strict=False))
            self.send(status, {"error": message}, **headers)

    do_GET = do_HEAD = do_POST = do_PUT = serve_request

    def send(self, status: int, content: Any = b"", **headers: str) -> None:
        """Send JSON, or raw bytes."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        if isinstance(content, bytes) and (found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            status, data = 206, data[start:stop]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        kind = "octet-stream" if isinstance(content, bytes) else "json"
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.broken is None:
            self.wfile.write(data)
            return
        self.wfile.write(data[: int(self.broken.sent)])
        time.sleep(self.broken.stall)
        if self.broken.gone:
            self.server.leave(self.broken.gone)
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    # --- who, and what may be done

    def find_user(self) -> tuple[str, str, list[str]] | None:
        """Return the owner of the request's token."""
        return self.server.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def check_right(self, name: str) -> None:
        """Refuse a request that may not write to a repository."""
        user, namespace = self.find_user(), name.split("/")[0]
        if user is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if namespace not in (user[0], *user[2]) or user[1] == "read":
            raise Refusal(403, f"You don't have the rights to create a model under the namespace {namespace!r}")

    def find_repo(self, name: str, revision: str | None = None) -> Repo:
        """Return the repository at a revision if it exists and the request may read it; otherwise refuse it."""
        repo, user = self.server.repos.get(name), self.find_user()
        if repo is None or (repo.private and (user is None or name.split("/")[0] not in (user[0], *user[2]))):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        states = {None: repo, "main": repo, repo.sha: repo} | {one.sha: one for one in repo.tags.values()} | repo.tags
        if revision not in states:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return states[revision]

    # --- the routes

    def tell_user(self, body: bytes) -> None:
        if (user := self.find_user()) is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        name, role, organizations = user
        token = {"displayName": "test", "role": role}
        orgs = [{"type": "org", "name": organization} for organization in organizations]
        self.send(200, {"type": "user", "name": name, "orgs": orgs, "auth": {"accessToken": token}})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        namespace = asked.get("organization") or (self.find_user() or ("nobody",))[0]
        name = f"{namespace}/{asked['name']}"
        self.check_right(name)
        found = name in self.server.repos
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.server.repos.setdefault(name, Repo(private))
        answer = {"url": f"{self.server.address}/{name}", "name": name}
        self.send(*((409, answer | {"error": "You already created this model repo"}) if found else (200, answer)))

    def validate(self, body: bytes) -> None:
        errors = [{"message": error} for error in check_metadata(json.loads(body)["content"])]
        self.send(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body: bytes, name: str) -> None:
        """Answer how to send each file, and with the id of an existing version."""
        repo = self.find_repo(name)
        self.check_right(name)
        files = []
        for path in (file["path"] for file in json.loads(body)["files"]):
            mode = "lfs" if path.endswith(LARGE) else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": repo.find(path)})
        self.send(200, {"files": files})

    def prepare_objects(self, body: bytes, name: str) -> None:
        """Answer with the upload address of each missing LFS object."""
        self.check_right(name)
        objects = json.loads(body)["objects"]
        for one in objects:
            if one["oid"] not in self.server.stored:
                one["actions"] = {"upload": {"href": f"{self.server.address}/storage/{one['oid']}"}}
        self.send(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "the content is not what was announced")
        self.server.stored[oid] = body
        self.send(200)

    def commit(self, body: bytes, name: str) -> None:
        """Commit files to a repository, all or none."""
        repo = self.find_repo(name)
        self.check_right(name)
        head, *operations = (json.loads(line) for line in body.splitlines())
        files = dict(repo.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile" and value["oid"] in self.server.stored:
                files[value["path"]] = self.server.stored[value["oid"]]
            else:
                raise Refusal(400, f"{operation['key']} of {value['path']} cannot be done")
        repo.files = files
        repo.commits.append(head["value"]["summary"])
        url = f"{self.server.address}/{name}/commit/{repo.sha}"
        self.send(200, {"success": True, "commitOid": repo.sha, "commitUrl": url})

    def describe(self, body: bytes, name: str, revision: str | None) -> None:
        repo, name = self.find_repo(name, revision), name.removeprefix("datasets/")
        files = [{"rfilename": path} for path in sorted(repo.files)]
        found = {"id": name, "modelId": name, "sha": repo.sha, "private": repo.private, "tags": [], "siblings": files}
        self.send(200, found | {"_id": "0" * 24, "downloads": 0, "likes": 0})

    def list_files(self, body: bytes, name: str, revision: str, folder: str | None) -> None:
        """Answer with the files of a repository; folders are empty here."""
        repo = self.find_repo(name, revision)
        self.send(200, [] if folder else list_entries(repo))

    def list_paths(self, body: bytes, name: str, revision: str) -> None:
        """Answer with the files of a repository that the request names."""
        paths = parse_qs(body.decode())["paths"]
        entries = list_entries(self.find_repo(name, revision))
        self.send(200, [entry for entry in entries if entry["path"] in paths])

    def give(self, body: bytes, name: str, revision: str, file: str) -> None:
        """Answer with a file, or only its headers."""
        repo = self.find_repo(name, revision)
        if file not in repo.files:
            raise Refusal(404, f"{file} is not in {name}", "EntryNotFound")
        self.send(200, repo.files[file], ETag=f'"{repo.find(file)}"', X_Repo_Commit=repo.sha)


def list_entries(repo: Repo) -> list[dict[str, Any]]:
    """Return the files of a repository as the Hub lists them."""
    return [
        {"type": "file", "path": path, "size": len(data), "oid": name_blob(data)}
        for path, data in sorted(repo.files.items())
    ]


REPO = r"((?:datasets/)?[\w.-]+/[\w.-]+)"
REVISION = r"([\w.-]+)"
ROUTES = (
    ("GET", r"/api/whoami-v2", Handler.tell_user),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate),
    ("POST", rf"/api/models/{REPO}/preupload/main", Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.prepare_objects),
    ("PUT", r"/storage/(\w+)", Handler.store),
    ("POST", rf"/api/models/{REPO}/commit/main", Handler.commit),
    ("GET", rf"/api/(?:models/)?{REPO}(?:/revision/{REVISION})?", Handler.describe),
    ("GET", rf"/api/(?:models/)?{REPO}/tree/{REVISION}(/.+)?", Handler.list_files),
    ("POST", rf"/api/(?:models/)?{REPO}/paths-info/{REVISION}", Handler.list_paths),
    ("GET HEAD", rf"/{REPO}/resolve/{REVISION}/(.+)", Handler.give),
)
