"""Downloads from a server of this machine: continued, damaged, another file, no network unasked."""

import hashlib
import http.client
import http.server
import json
import os
import re
import socket
import threading

import pytest
from support import records

from backbench.cli import program
from backbench.errors import BadInput, Failed
from backbench.published import public_files

DATA = os.urandom(3 << 20)


class Server(http.server.ThreadingHTTPServer):
    """Serve `data` at any address."""

    daemon_threads = True

    def __init__(self, data=DATA):
        super().__init__(("127.0.0.1", 0), Answer)
        self.data = data
        self.name = "model.pth"
        self.kind = "any/thing"
        self.tag = '"v1"'
        self.tag_of_parts = True  # False: an answer with the rest of a file has no tag
        self.cut = None  # how many bytes each answer sends at most
        self.capped = (
            False  # True: a cut answer announces its own length, not the rest's
        )
        self.asked = []  # the Range of each request
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        return  # whoever asked is gone

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/{self.name}"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        data = server.data
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        server.asked.append(self.headers.get("Range"))
        start = 0
        if wanted and self.headers.get("If-Range", server.tag) == server.tag:
            start = int(wanted[1])
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.end_headers()
                return
            self.send_response(206)
            sent = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send_header("Content-Range", sent)
        else:
            self.send_response(200)
        self.send_header("Content-Type", server.kind)
        rest = data[start:]
        piece = rest if server.cut is None else rest[: server.cut]
        announced = piece if server.capped else rest
        self.send_header("Content-Length", str(len(announced)))
        if server.tag and (server.tag_of_parts or not start):
            self.send_header("ETag", server.tag)
        self.end_headers()
        self.wfile.write(piece)

    def log_message(self, *_):
        return


@pytest.fixture
def server():
    with Server() as running:
        yield running
        running.shutdown()


def begin(server, folder):
    """Start a download that breaks off after its first MiB."""
    server.cut = 1 << 20
    with pytest.raises(Failed, match=r"broke off|IncompleteRead|reset"):
        public_files.fetch(server.url, folder / "model.pth")
    assert not (folder / "model.pth").exists()
    server.cut = None


def test_a_file_comes_whole(server, tmp_path):
    public_files.fetch(server.url, tmp_path / "a" / "model.pth")
    assert (tmp_path / "a" / "model.pth").read_bytes() == DATA
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["model.pth"]


REST = f"bytes={1 << 20}-"


@pytest.mark.parametrize(
    ("tag", "then", "asked"),
    [
        ('"v1"', {}, REST),
        # Never the head of one version and the tail of the other; without a version, all anew
        ('"v1"', {"data": DATA[::-1], "tag": '"v2"'}, REST),
        ('"v1"', {"name": "other.pth"}, None),
        ("", {}, None),
        ('W/"weak"', {}, None),
    ],
    ids=["goes on", "another file", "another address", "no tag", "weak tag"],
)
def test_what_broke_off_goes_on_where_it_is_the_same_file(
    server, tmp_path, tag, then, asked
):
    server.tag = tag
    begin(server, tmp_path)
    vars(server).update(then)
    public_files.fetch(server.url, tmp_path / "model.pth")
    assert (tmp_path / "model.pth").read_bytes() == server.data
    assert server.asked == [None, asked]


def test_after_a_reset_between_two_pieces_it_goes_on(server, tmp_path, monkeypatch):
    read = http.client.HTTPResponse.read

    def first(answer, amount):
        if answer.length < len(DATA):
            raise ConnectionResetError("reset by peer")
        return read(answer, amount)

    with monkeypatch.context() as patched, pytest.raises(Failed, match="reset by peer"):
        patched.setattr(http.client.HTTPResponse, "read", first)
        public_files.fetch(server.url, tmp_path / "model.pth")
    public_files.fetch(server.url, tmp_path / "model.pth")
    assert (tmp_path / "model.pth").read_bytes() == DATA
    assert server.asked == [None, f"bytes={1 << 20}-"]


def test_a_server_that_caps_its_answers_is_asked_again(server, tmp_path):
    """A part is not taken for the whole file, whatever length its answer announces."""
    begin(server, tmp_path)
    server.cut = 1 << 20
    server.capped = True
    server.tag_of_parts = False
    with pytest.raises(Failed, match="broke off at 2"):
        public_files.fetch(server.url, tmp_path / "model.pth")
    public_files.fetch(server.url, tmp_path / "model.pth")
    assert (tmp_path / "model.pth").read_bytes() == DATA
    assert server.asked == [None, f"bytes={1 << 20}-", f"bytes={2 << 20}-"]


def test_a_whole_part_is_only_renamed(server, tmp_path):
    """Killed between the last byte and the new name."""
    begin(server, tmp_path)
    (tmp_path / "model.pth.part").write_bytes(DATA)
    public_files.fetch(server.url, tmp_path / "model.pth")
    assert (tmp_path / "model.pth").read_bytes() == DATA
    assert server.asked == [None, f"bytes={len(DATA)}-"]


def test_a_web_page_is_no_checkpoint_and_a_host_may_have_no_name(server, tmp_path):
    with pytest.raises(Failed, match=r"cannot be fetched \(.*too long"):
        public_files.fetch(f"http://{'a' * 70}.org/model.pth", tmp_path / "model.pth")
    server.kind = "text/html; charset=utf-8"
    with pytest.raises(BadInput, match="a web page"):
        public_files.fetch(server.url, tmp_path / "model.pth")
    assert not list(tmp_path.iterdir())


def a_list(tmp_path, url, *parts, **about):
    """Write a list of one file and an empty ROOT; return the command that measures it."""
    (tmp_path / "ROOT").mkdir(exist_ok=True)
    file = {"page": "https://x.org", "file": "model.pth", "url": url, **about}
    listed = {
        "title": "t",
        "estimate": "none",
        "checkpoints": {"one": file},
        "parts": parts,
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(listed))  # JSON is YAML
    return [
        "reproduce",
        str(tmp_path / "mine.yaml"),
        f"--data={tmp_path / 'ROOT'}",
        f"--files={tmp_path / 'files'}",
        f"--out={tmp_path / 'runs'}",
    ]


@pytest.mark.parametrize("what", ["sha256", "md5"])
def test_another_file_than_the_published_one_is_removed(server, tmp_path, capsys, what):
    digest = {what: "0" * 8, "digest_page": "x.org (README)"}
    words = a_list(tmp_path, server.url, **digest)
    assert program.main([*words, "--download"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "not the published file" in said
    assert "x.org (README)" in said
    assert not list((tmp_path / "files" / "one").iterdir())


def test_a_damaged_file_on_disk_is_refused(server, tmp_path, capsys):
    """Also where only the first digits are printed; nothing is fetched in its place."""
    digest = hashlib.sha256(DATA).hexdigest()[:8]
    words = a_list(tmp_path, server.url, sha256=digest, digest_page="x.org (README)")
    file = tmp_path / "files" / "one" / "model.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    assert program.main([*words, "--download"]) == 2
    assert f"printed is {digest}" in capsys.readouterr().err
    assert not server.asked
    assert file.exists()


def test_a_dry_run_writes_and_downloads_nothing(server, tmp_path, capsys, caplog):
    knn = {"verb": "linear", "protocol": "knn", "datasets": ["cifar10"]}
    part = {"title": "knn", "evaluate": [knn], "gpu_hours": 1.0}
    words = a_list(tmp_path, server.url, part)
    (tmp_path / "small.yaml").write_text("{name: small, kind: local, jobs: 1}")
    words += ["--cluster", str(tmp_path / "small.yaml"), "--download", "--dry-run"]
    assert program.main(words) == 2
    assert not server.asked
    assert "a dry run fetches nothing" in caplog.text
    file = tmp_path / "files" / "one" / "model.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(DATA)
    imported = tmp_path / "runs" / "checkpoints" / "one.safetensors"
    records.checkpoint_header(imported, "a" * 64, sha256="of another file")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert program.main(words) == 0
    assert "/linear-knn-cifar10" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_digests_are_kept_until_the_file_is_written_again(tmp_path, monkeypatch):
    file = tmp_path / "model.pth"
    note = tmp_path / "files.json"
    file.write_bytes(DATA)
    first = public_files._digests(file, note)
    assert first == (hashlib.sha256(DATA).hexdigest(), hashlib.md5(DATA).hexdigest())
    monkeypatch.setattr(public_files, "PIECE", 0)  # nothing can be read now
    assert public_files._digests(file, note) == first
    file.write_bytes(DATA[::-1])
    assert public_files._digests(file, note) != first


def test_no_network_without_being_asked(server, tmp_path, capsys, caplog, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert program.main(a_list(tmp_path, server.url)) == 2
    assert "add --download" in capsys.readouterr().err
    assert "https://x.org" in caplog.text
    assert not server.asked
