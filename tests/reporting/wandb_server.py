"""A W&B server of the tests' own: takes what a run or a workspace sends, and remembers it.

It knows the queries of wandb 0.31 and wandb-workspaces 0.4. One that it does not know is remembered as `unknown`.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import wandb


def _id(text):
    return base64.b64encode(text.encode()).decode()


class WandbServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.views, self.unknown = [], []
        self.run, self.files, self.history, self.summary = {}, {}, [], {}
        self.complete = False

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that hangs up is no news."""

    def stream(self, content):
        for name, file in content.get("files", {}).items():
            if name == "wandb-history.jsonl":
                self.history += map(json.loads, file["content"])
            elif name == "wandb-summary.json":
                self.summary = json.loads(file["content"][-1])
            # `output.log` has what was printed.
        self.complete |= bool(content.get("complete"))

    def answer(self, name, variables):  # noqa: C901
        uploads = {"uploadHeaders": []}
        match name:
            case "viewer":
                nobody = {"edges": []}
                user = {
                    "id": _id("User:1"),
                    "name": "me",
                    "username": "me",
                    "email": "",
                    "admin": False,
                    "entity": "me",
                }
                return {"viewer": {**user, "flags": "{}", "teams": nobody, "deletedAt": None, "apiKeys": nobody}}
            case "upsertview" | "upsertview2":
                self.views.append(variables)
                return {"upsertView": {"view": {"id": _id("View:1"), "name": variables["name"]}, "inserted": True}}
            case "upsertbucket":
                self.run |= {key: value for key, value in variables.items() if value is not None}
                project = {"id": _id("Project:1"), "name": "p", "entity": {"id": _id("Entity:1"), "name": "me"}}
                bucket = {"id": _id("Run:v1:x"), "name": variables.get("name"), "displayName": "x", "config": "{}"}
                rest = {"description": "", "sweepName": None, "historyLineCount": 0, "project": project}
                return {"upsertBucket": {"bucket": {**bucket, **rest}, "inserted": True}}
            case "createrunfiles":
                files = [{"name": file, "uploadUrl": f"{self.address}/up/{file}"} for file in variables["files"]]
                return {"createRunFiles": {"runID": _id("Run:v1:x"), **uploads, "files": files}}
            case "createartifact":
                sequence = {"id": _id("Sequence:1"), "latestArtifact": None}
                artifact = {"id": _id("Artifact:1"), "state": "PENDING", "artifactSequence": sequence}
                return {"createArtifact": {"artifact": artifact}}
            case "createartifactmanifest":
                file = {"id": _id("File:1"), "name": "wandb_manifest.json", "displayName": "m", **uploads}
                manifest = {"id": _id("Manifest:1"), "file": {**file, "uploadUrl": f"{self.address}/manifest"}}
                return {"createArtifactManifest": {"artifactManifest": manifest}}
            case "createartifactfiles":
                found = variables.get("artifactFiles") or variables["input"]["artifactFiles"]
                edges = [{"node": self._artifact_file(file["name"])} for file in found]
                return {"createArtifactFiles": {"files": {"edges": edges}}}
            case "commitartifact":
                return {"commitArtifact": {"artifact": {"id": _id("Artifact:1"), "digest": "x"}}}
            case "artifacttype":
                return {"project": {"artifact": {"artifactType": {"name": "run_table"}}}}
            case "runresumestatus":
                return {"model": None}
            case "organizationcoreweaveorganizationid":
                return {"entity": None}
            case "serverfeaturesquery":
                versions = {"max_cli_version": "0.99.0"}
                return {"serverInfo": {"features": [], "cliVersionInfo": versions, "latestLocalVersionInfo": None}}
        self.unknown.append(name)
        return {}

    def _artifact_file(self, name):
        where = {"uploadUrl": f"{self.address}/artifact/{name}", "uploadHeaders": [], "storagePath": "x"}
        names = {"id": _id(f"File:{name}"), "name": name, "displayName": name}
        return {**names, **where, "artifact": {"id": _id("Artifact:1")}, "uploadMultipartUrls": None}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def body(self):
        content = b""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
        return gzip.decompress(content) if self.headers.get("content-encoding") == "gzip" else content

    def reply(self, answer):
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.reply({})

    def do_PUT(self):
        self.server.files[self.path] = self.body()
        self.reply({})

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1].lower()
            self.reply({"data": self.server.answer(name, asked.get("variables") or {})})
        else:
            if "file_stream" in self.path:
                try:
                    self.server.stream(json.loads(body))
                except Exception:  # without an answer, a client asks for hours
                    self.server.unknown.append(traceback.format_exc())
            self.reply({})  # the rest is telemetry


@contextlib.contextmanager
def serving(home):
    """A server, and an environment in which wandb knows nothing else."""
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        wandb.teardown()
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("WANDB_BASE_URL", server.address)
        patch.setenv("WANDB_API_KEY", "0123456789" * 4)
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("HOME", str(home))
        try:
            yield server
        finally:
            wandb.teardown()
            server.shutdown()
            server.server_close()
