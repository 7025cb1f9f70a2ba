"""hf:ORG/REPO: the file in the Hub's local cache; the network is asked by --download alone."""

import functools
import hashlib
import http.server
import json
import threading

import pytest
import torch
from huggingface_hub import constants, file_download

from backbench.cli import program
from backbench.errors import BadInput, Failed
from backbench.weights import hub_files
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.importing import read

COMMIT = "5" * 40
OTHER = "6" * 40


@functools.cache
def trunk(seed):
    torch.manual_seed(seed)
    arch = "resnet18,width=0.25"
    state = build_trunk(arch).state_dict()
    return Checkpoint(arch=arch, method="test", state_dict=state, provenance={})


def trunk_file(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    trunk(seed).save(path)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A local cache with north/tiny at two commits, as the Hub's library lays it out."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--north--tiny"
    trunk_file(folder / "snapshots" / COMMIT / "model.safetensors")
    trunk_file(folder / "snapshots" / OTHER / "model.safetensors", seed=1)
    trunk_file(folder / "snapshots" / COMMIT / "runs" / "last.safetensors", seed=2)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return folder / "snapshots"


def test_the_file_of_the_local_cache_is_read_like_any_file(cache):
    checkpoint = read("hf:north/tiny")
    file = cache / COMMIT / "model.safetensors"
    assert checkpoint.digest == read(file).digest
    assert checkpoint.name == "north/tiny"
    assert checkpoint.provenance["hub"] == f"north/tiny@{COMMIT}:model.safetensors"


def test_a_revision_and_a_file_are_chosen(cache):
    other = read(f"hf:north/tiny@{OTHER}")
    assert other.digest == read(cache / OTHER / "model.safetensors").digest
    last = read("hf:north/tiny@main:runs/last.safetensors")
    assert last.digest == read(cache / COMMIT / "runs/last.safetensors").digest
    assert last.name == "north/tiny:runs/last.safetensors"
    assert last.provenance["hub"] == f"north/tiny@{COMMIT}:runs/last.safetensors"


def test_it_is_as_strict_as_with_any_file(cache):
    (cache / COMMIT / "model.safetensors").write_bytes(b"<html>")
    with pytest.raises(BadInput, match=r"model\.safetensors"):
        read("hf:north/tiny")


@pytest.mark.parametrize(
    "name", ["hf:", "hf:tiny", "hf:a/b/c", "hf:a/b:", "hf:a/b:../c", "hf:a/b:/etc/x"]
)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(
        BadInput, match=r"expected hf:ORG/REPO|inside of its repository"
    ):
        read(name)


def test_nothing_is_downloaded_unless_it_is_asked(cache, tmp_path, capsys, monkeypatch):
    # A download would be an error: there is no function for it
    monkeypatch.setattr(file_download, "http_get", None)
    out = tmp_path / "x.safetensors"
    status = program.main(["import", "hf:south/tiny@v1", "--out", str(out)])
    assert status == 2 and not out.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "hf:south/tiny@v1: the local cache" in line
    assert "add --download" in line and "`hf download south/tiny --revision v1`" in line


def test_every_verb_takes_the_name(cache, tmp_path, capsys):
    assert program.main(["inspect", "hf:north/tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["importable"]
    out = tmp_path / "x.safetensors"
    assert program.main(["import", "hf:north/tiny", "--out", str(out)]) == 0
    assert read(out).digest == read("hf:north/tiny").digest
    out = tmp_path / "y.safetensors"
    words = ["export", "hf:north/tiny", "--format", "torchvision", "--out", str(out)]
    assert program.main(words) == 2, "torchvision has no quarter of a ResNet-18"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as answers for the files of one repository."""

    files: dict[str, bytes]
    asked: list[str]
    refusal = ""  # with which it answers everything

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, *, with_body):
        repository, _, rest = self.path.lstrip("/").partition("/resolve/")
        _, _, file = rest.partition("/")
        self.asked.append(file)
        content = self.files.get(file)
        if repository != "north/far" or content is None or self.refusal:
            self.send_response(404)
            code = "EntryNotFound" if repository == "north/far" else "RepoNotFound"
            code = self.refusal or code
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on this machine that has north/far."""
    file = trunk_file(tmp_path / "far.safetensors", seed=3)
    Hub.files = {"model.safetensors": file.read_bytes(), "config.json": b"{}"}
    Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    # It asks this often, in seconds, whether it should end
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield Hub
    server.shutdown()
    server.server_close()


def test_download_fetches_what_is_asked(hub, tmp_path):
    words = ["import", "hf:north/far", "--out", str(tmp_path / "x.safetensors")]
    assert program.main(words) == 2
    assert hub.asked == []
    assert program.main([*words, "--download"]) == 0
    held = hub_files.held("hf:north/far")
    assert held.path.read_bytes() == hub.files["model.safetensors"]
    assert (held.path.parent / "config.json").is_file(), "it tells what tensors do not"
    # From now on without the network
    count = len(hub.asked)
    assert read("hf:north/far").digest == read(tmp_path / "far.safetensors").digest
    assert len(hub.asked) == count


def test_what_the_hub_has_not_is_said(hub, tmp_path, capsys):
    words = ["--out", str(tmp_path / "x.safetensors"), "--download"]
    assert program.main(["import", "hf:north/far:other.bin", *words]) == 2
    assert "the repository has no other.bin" in capsys.readouterr().err
    assert program.main(["import", "hf:north/none", *words]) == 2
    assert "no such repository, or it is private" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (
            "GatedRepo",
            "its owner must let you in; ask on its page, then type `hf auth login`",
        ),
        ("RevisionNotFound", "the repository has no such revision"),
        (
            "RepoNotFound",
            "the Hub has no such repository, or it is private (`hf auth login`)",
        ),
    ],
)
def test_a_refusal_of_the_hubs_is_said_with_what_to_do(hub, monkeypatch, refusal, says):
    monkeypatch.setattr(Hub, "refusal", refusal)
    with pytest.raises(BadInput) as refused:
        hub_files.download("hf:north/far@v2:model.safetensors")
    assert str(refused.value) == f"hf:north/far@v2:model.safetensors: {says}"


def test_a_hub_that_cannot_be_reached_is_no_bad_input(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("hf:north/far", "hf:north/far:config.json"):
        with pytest.raises(Failed) as failed:
            hub_files.download(name)
        assert str(failed.value).startswith(f"{name}: the Hub cannot be reached (")
        assert "\n" not in str(failed.value)
    assert hub.asked == []


def test_of_several_names_of_weights_the_first_that_is_there_is_fetched(hub):
    hub.files = {
        "pytorch_model.bin": b"second",
        "open_clip_model.safetensors": b"first",
        "open_clip_config.json": b"{}",
    }
    found = hub_files.download("hf:north/far")
    assert found.path.read_bytes() == b"first"
    assert found.name == "north/far"
    assert found.source == f"north/far@{COMMIT}:open_clip_model.safetensors"
    assert (found.path.parent / "open_clip_config.json").is_file()
    assert "pytorch_model.bin" not in hub.asked
    # A file in a folder has its configuration beside it
    hub.files = {"runs/last.bin": b"last", "runs/config.json": b"{}"}
    found = hub_files.download("hf:north/far:runs/last.bin")
    assert (found.name, found.path.name) == ("north/far:runs/last.bin", "last.bin")
    assert (found.path.parent / "config.json").is_file()
    hub.files = {}
    with pytest.raises(BadInput) as refused:
        hub_files.download("hf:north/far")
    assert str(refused.value) == (
        "hf:north/far: the repository has no model.safetensors or open_clip_model.safetensors or"
        " open_clip_pytorch_model.bin or pytorch_model.bin; name its file, as in"
        " hf:north/far:FILE"
    )


def test_a_part_of_a_name_has_at_most_96_characters():
    longest = f"{'a' * 96}/{'b' * 96}"
    name = hub_files.parse(f"hf:{longest}@{'r' * 200}:{'f' * 200}")
    assert name == (longest, "r" * 200, "f" * 200)
    for wrong in (
        f"a{longest}",
        f"{longest}b",
        f"{longest}@{'r' * 201}",
        f"{longest}:",
    ):
        with pytest.raises(
            BadInput, match="expected hf:ORG/REPO, hf:ORG/REPO@REVISION"
        ):
            hub_files.parse(f"hf:{wrong}")
