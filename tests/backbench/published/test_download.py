"""Downloads from a server of this machine: continued, damaged, another file, no network unasked."""

import hashlib
import http.client
import http.server
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
    """Serves `data` at any address. `cut`: bytes of each answer, of which a `capped` one says so."""

    daemon_threads = True

    def __init__(self, data=DATA):
        super().__init__(("127.0.0.1", 0), Answer)
        self.data, self.tag, self.cut, self.kind = data, '"v1"', None, "any/thing"
        self.capped, self.tag_of_parts, self.name = False, True, "model.pth"
        self.asked = []  # the Range of each request
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        return  # whoever asked is gone

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/{self.name}"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, data = self.server, self.server.data
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
            self.send_header(
                "Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"
            )
        else:
            self.send_response(200)
        self.send_header("Content-Type", server.kind)
        piece = data[start:] if server.cut is None else data[start : start + server.cut]
        self.send_header(
            "Content-Length", str(len(piece if server.capped else data[start:]))
        )
        if server.tag and (server.tag_of_parts or not start):
            self.send_header("ETag", server.tag)
        self.end_headers()
        self.wfile.write(piece)
        return

    def log_message(self, *_):
        return


@pytest.fixture
def server():
    with Server() as running:
        yield running
        running.shutdown()


def begin(server, folder):
    """A download that breaks off after its first MiB."""
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
    """A part is no whole file, whatever length its answer announces, and has the file's tag."""
    begin(server, tmp_path)
    server.cut, server.capped, server.tag_of_parts = 1 << 20, True, False
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
    """A list of one file, and an empty ROOT."""
    (tmp_path / "ROOT").mkdir(exist_ok=True)
    keys = {"page": "https://x.org", "file": "model.pth", "url": url, **about}
    text = (
        f"title: t\nestimate: none\ncheckpoints: {{one: {keys}}}\nparts: {[*parts]}\n"
    )
    (tmp_path / "mine.yaml").write_text(text)
    where = [
        "--data",
        tmp_path / "ROOT",
        "--files",
        tmp_path / "files",
        "--out",
        tmp_path / "runs",
    ]
    return ["reproduce", *map(str, (tmp_path / "mine.yaml", *where))]


@pytest.mark.parametrize("what", ["sha256", "md5"])
def test_another_file_than_the_published_one_is_removed(server, tmp_path, capsys, what):
    words = a_list(
        tmp_path, server.url, **{what: "0" * 8, "digest_page": "x.org (README)"}
    )
    assert program.main([*words, "--download"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "not the published file" in said and "x.org (README)" in said
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
    assert not server.asked and file.exists()


def test_a_dry_run_writes_and_downloads_nothing(server, tmp_path, capsys, caplog):
    knn = {"verb": "linear", "protocol": "knn", "datasets": ["cifar10"]}
    words = a_list(
        tmp_path, server.url, {"title": "knn", "evaluate": [knn], "gpu_hours": 1.0}
    )
    (tmp_path / "small.yaml").write_text("{name: small, kind: local, jobs: 1}")
    words += ["--cluster", str(tmp_path / "small.yaml"), "--download", "--dry-run"]
    assert program.main(words) == 2 and not server.asked
    assert "a dry run fetches nothing" in caplog.text
    file = tmp_path / "files" / "one" / "model.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(DATA)
    imported = tmp_path / "runs" / "checkpoints" / "one.safetensors"
    records.checkpoint_header(imported, "a" * 64, sha256="of another file")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert program.main(words) == 0 and "/linear-knn-cifar10" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_digests_are_kept_until_the_file_is_written_again(tmp_path, monkeypatch):
    file, note = tmp_path / "model.pth", tmp_path / "files.json"
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
    assert (
        "add --download" in capsys.readouterr().err and "https://x.org" in caplog.text
    )
    assert not server.asked
