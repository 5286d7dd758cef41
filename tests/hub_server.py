"""A Hub on this machine: the part of the Hub's HTTP API that pushing and loading models uses.

The real client (`huggingface_hub`) talks to it with `HF_ENDPOINT` set to `Hub.url`; files go through Git LFS's basic
transfer, so `HF_HUB_DISABLE_XET=1` belongs with it. What is pushed is kept in memory, commit by commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "a" * 34
USER = "someone"
# As in the .gitattributes that the Hub gives to a new repository.
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
RELATIONS = {"adapter", "finetune", "merge", "quantized"}


class Blob(NamedTuple):
    """A file: its bytes, whether they lie in LFS, and the id that git gives it."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid


@dataclass
class Repository:
    """Commits (id -> path -> file), and the branches and tags that name them."""

    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("main", {})

    def commit(self, branch: str, files: dict[str, Blob]) -> str:
        text = f"{branch} {len(self.commits)} " + "".join(f"{path} {blob.oid}\n" for path, blob in files.items())
        self.branches[branch] = hashlib.sha1(text.encode()).hexdigest()
        self.commits[self.branches[branch]] = files
        return self.branches[branch]

    def resolve(self, revision: str) -> str:
        """The commit that a branch, a tag or a commit's id names."""
        found = self.branches.get(revision) or self.tags.get(revision) or revision
        if found not in self.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def files(self, revision: str) -> dict[str, Blob]:
        return self.commits[self.resolve(revision)]


class Refusal(Exception):
    """An answer that is an error, with the headers by which the client tells one from another."""

    def __init__(self, status: int, code: str, message: str, **headers: str):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **headers}


class Answer(NamedTuple):
    body: bytes = b""
    headers: dict[str, str] = {}
    status: int = 200


class Hub:
    """The server's state, and what it answers to each request.

    Attributes:
        url: to be given to the client as `HF_ENDPOINT`.
        storage: where files in LFS lie. Another host by name: like the real one, the Hub sends clients away for them.
        repositories: id (`owner/name`) -> what has been pushed.
        requests: method and path of every request so far.
    """

    def __init__(self) -> None:
        self.url = self.storage = ""
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def answer(self, request: Handler) -> Answer:
        parts = urlsplit(request.path)
        for method, pattern, respond in ROUTES:
            match = re.fullmatch(pattern, parts.path)
            if match and request.command in method.split():
                with self.lock:
                    self.requests.append(f"{request.command} {parts.path}")
                    arguments = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                    return respond(self, request, **arguments)
        raise Refusal(404, "NotFound", f"This server has no {request.command} {parts.path}")

    def repository(self, request: Handler, repo: str, *, write: bool = False) -> Repository:
        """A repository that the request may read, or write.

        The Hub does not tell strangers whether a repository exists.
        """
        known = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        found = self.repositories.get(repo)
        if found is None or (write and not known):
            raise Refusal(404 if known else 401, "RepoNotFound", "Repository not found")
        if found.gated:  # nobody has accepted its terms
            raise Refusal(403 if known else 401, "GatedRepo", f"Access to model {repo} is restricted.")
        return found


def whoami(hub: Hub, request: Handler) -> Answer:
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        raise Refusal(401, "", "Invalid credentials in Authorization header")
    return as_json({"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {"type": "access_token"}})


def create_repository(hub: Hub, request: Handler) -> Answer:
    asked = request.json()
    repo = f"{asked.get('organization') or USER}/{asked['name']}"
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        raise Refusal(401, "", "Invalid credentials in Authorization header")
    created = repo not in hub.repositories
    hub.repositories.setdefault(repo, Repository())
    return as_json({"url": f"{hub.url}/{repo}", "name": repo}, 200 if created else 409)


def validate_card(hub: Hub, request: Handler) -> Answer:
    """What the Hub asks of a model card's metadata, in so far as ours uses it."""
    errors = card_errors(request.json()["content"])
    return as_json({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)


def card_errors(text: str) -> list[str]:
    block = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if block is None:
        return []
    try:
        metadata = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [f"Invalid YAML metadata: {error}"]
    if not isinstance(metadata, dict):
        return ["The metadata must be a mapping"]
    strings = ("library_name", "pipeline_tag", "license", "license_name", "license_link")
    lists = ("tags", "language", "datasets", "base_model")
    errors = [f'"{name}" must be a string' for name in strings if not isinstance(metadata.get(name, ""), str)]
    for name in lists:
        values = metadata.get(name, [])
        if not all(isinstance(value, str) for value in (values if isinstance(values, list) else [values])):
            errors.append(f'"{name}" must be a string or a list of strings')
    if metadata.get("base_model_relation", "finetune") not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {sorted(RELATIONS)}')
    if metadata.get("license") != "other" and "license_name" in metadata:
        errors.append('"license_name" needs "license: other"')
    return errors


def preupload(hub: Hub, request: Handler, repo: str, revision: str) -> Answer:
    files = hub.repository(request, repo, write=True).files(revision)
    modes = [
        {
            "path": file["path"],
            "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
            "shouldIgnore": False,
            "oid": files[file["path"]].etag if file["path"] in files else None,
        }
        for file in request.json()["files"]
    ]
    return as_json({"files": modes})


def lfs_batch(hub: Hub, request: Handler, repo: str) -> Answer:
    hub.repository(request, repo, write=True)
    asked = request.json()
    objects: list[dict[str, Any]] = []
    for wanted in asked["objects"]:
        upload = {"upload": {"href": f"{hub.storage}/{wanted['oid']}"}, "verify": {"href": f"{hub.url}/lfs-verify"}}
        objects.append(wanted if wanted["oid"] in hub.lfs else {**wanted, "actions": upload})
    return as_json({"transfer": "basic", "objects": objects})


def lfs_object(hub: Hub, request: Handler, oid: str) -> Answer:
    """The storage behind the Hub: no token is asked for, as none is sent."""
    if request.command == "PUT":
        content = request.body()
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, "", "The content does not have that sha256")
        hub.lfs[oid] = content
        return Answer()
    if oid not in hub.lfs:
        raise Refusal(404, "", "No such object")
    return Answer(hub.lfs[oid], {"ETag": f'"{oid}"'})


def lfs_verify(hub: Hub, request: Handler) -> Answer:
    asked = request.json()
    if len(hub.lfs.get(asked["oid"], b"")) != asked["size"]:
        raise Refusal(404, "", "The object was not uploaded, or is of another size")
    return Answer()


def commit(hub: Hub, request: Handler, repo: str, revision: str) -> Answer:
    repository = hub.repository(request, repo, write=True)
    if revision not in repository.branches:
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    files = dict(repository.files(revision))
    for line in request.body().splitlines():
        step = json.loads(line)
        value = step["value"]
        match step["key"]:
            case "header":
                assert value["summary"]
            case "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            case "lfsFile":
                files[value["path"]] = Blob(hub.lfs[value["oid"]], lfs=True)
            case "deletedFile":
                del files[value["path"]]
            case other:
                raise Refusal(400, "", f"Unknown operation {other}")
    oid = repository.commit(revision, files)
    return as_json({"commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid, "success": True})


def branch(hub: Hub, request: Handler, repo: str, name: str) -> Answer:
    repository = hub.repository(request, repo, write=True)
    if name in repository.branches:
        raise Refusal(409, "", f"Reference {name} exists already")
    repository.branches[name] = repository.resolve(request.json().get("startingPoint") or "main")
    return as_json({}, 201)


def tag(hub: Hub, request: Handler, repo: str, revision: str) -> Answer:
    repository = hub.repository(request, repo, write=True)
    repository.tags[request.json()["tag"]] = repository.resolve(revision)
    return as_json({}, 201)


def references(hub: Hub, request: Handler, repo: str) -> Answer:
    repository = hub.repository(request, repo)
    kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags), "converts": ("convert", {})}
    return as_json(
        {
            kind: [{"name": n, "ref": f"refs/{folder}/{n}", "targetCommit": sha} for n, sha in names.items()]
            for kind, (folder, names) in kinds.items()
        }
    )


def information(hub: Hub, request: Handler, repo: str, revision: str) -> Answer:
    repository = hub.repositories.get(repo)
    if repository is None:
        raise Refusal(401, "RepoNotFound", "Repository not found")
    # Anyone may see that a gated repository exists, and what files it has.
    files = repository.files(revision or "main")
    return as_json(
        {
            "id": repo,
            "modelId": repo,
            "sha": repository.resolve(revision or "main"),
            "private": False,
            "gated": "auto" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path, "size": len(blob.content)} for path, blob in files.items()],
        }
    )


def tree(hub: Hub, request: Handler, repo: str, revision: str, folder: str) -> Answer:
    files = hub.repository(request, repo).files(revision)
    inside = {path: blob for path, blob in files.items() if path.startswith(f"{folder}/" if folder else "")}
    if folder and not inside:
        raise Refusal(404, "EntryNotFound", f"{folder} does not exist on {revision}")
    deep = parse_qs(urlsplit(request.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
    rows: dict[str, dict[str, Any]] = {}
    for path, blob in inside.items():
        names = path.removeprefix(f"{folder}/" if folder else "").split("/")
        prefix = f"{folder}/" if folder else ""
        for depth in range(1, len(names)):
            if deep or depth == 1:
                above = prefix + "/".join(names[:depth])
                rows[above] = {"type": "directory", "path": above, "size": 0, "oid": hash_of(above)}
        if deep or len(names) == 1:
            pointer = {"lfs": {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 134}} if blob.lfs else {}
            rows[path] = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid, **pointer}
    return as_json(list(rows.values()))


def resolve(hub: Hub, request: Handler, repo: str, revision: str, path: str) -> Answer:
    """A file, or where its bytes are if they lie in LFS."""
    repository = hub.repository(request, repo)
    sha = repository.resolve(revision)
    blob = repository.commits[sha].get(path)
    if blob is None:
        raise Refusal(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
    headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"'}
    if blob.lfs:
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        return Answer(b"", {**headers, **linked, "Location": f"{hub.storage}/{blob.sha256}"}, 302)
    return Answer(blob.content, headers)


def as_json(content: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(content).encode(), {"Content-Type": "application/json"}, status)


def hash_of(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
MODEL = rf"/api/models/{REPO}"
ROUTES: tuple[tuple[str, str, Callable[..., Answer]], ...] = (
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repository),
    ("POST", "/api/validate-yaml", validate_card),
    ("POST", rf"{MODEL}/preupload/(?P<revision>[^/]+)", preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT GET HEAD", r"/lfs/(?P<oid>[0-9a-f]{64})", lfs_object),
    ("POST", "/lfs-verify", lfs_verify),
    ("POST", rf"{MODEL}/commit/(?P<revision>[^/]+)", commit),
    ("POST", rf"{MODEL}/branch/(?P<name>[^/]+)", branch),
    ("POST", rf"{MODEL}/tag/(?P<revision>[^/]+)", tag),
    ("GET", rf"{MODEL}/refs", references),
    ("GET", rf"{MODEL}(/revision/(?P<revision>[^/]+))?", information),
    ("GET", rf"{MODEL}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", tree),
    ("GET HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
)


class Handler(BaseHTTPRequestHandler):
    """One connection. `server.hub` has the answers."""

    protocol_version = "HTTP/1.1"
    server: Server

    def body(self) -> bytes:
        if self.read is None:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                self.read = b"".join(self.chunks())
            else:
                self.read = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return self.read

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def json(self) -> Any:
        return json.loads(self.body() or b"{}")

    def respond(self) -> None:
        self.read: bytes | None = None
        # Read before anything is refused: what is left of it would be taken for the next request.
        self.body()
        try:
            answer = self.server.hub.answer(self)
        except Refusal as error:
            answer = Answer(json.dumps({"error": str(error)}).encode(), error.headers, error.status)
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = respond

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: `Hub.requests` has what was asked."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        hub.url, hub.storage = f"http://127.0.0.1:{self.server_port}", f"http://localhost:{self.server_port}/lfs"


@contextmanager
def serve() -> Iterator[Hub]:
    """A running Hub, empty, on a free port of this machine."""
    hub = Hub()
    with Server(hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
