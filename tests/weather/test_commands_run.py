"""Commands of the README and the docs that take hours or the network, run to their ends here: the
lists from a server of this machine, the eight processes in a test of their own."""

import hashlib
import http.server
import re
import threading
from pathlib import Path

import pytest
from support.pages import commands, words_of

from backbench import cli, config
from backbench.datasets import verb

# Its eight processes have a test of their own
ELSEWHERE = "tests/pretrain/test_train_processes.py"


def lines(verb):
    found = [(name, line) for name, line in commands() if words_of(line)[0] == verb]
    assert found
    return pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in found])


@lines("pretrain")
def test_pretrain(line):
    assert f'"{line}"' in (Path(__file__).parents[2] / ELSEWHERE).read_text()


@lines("data")
def test_fetch_splits(line, tmp_path, monkeypatch, capsys):
    """From a server of this machine, with the recipe's hashes replaced by those of what it has."""
    served = {p: f"n01440764_{p}.JPEG\n".encode() for p in (1, 10)}

    class Lists(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(served[int(re.sub(r"\D", "", self.path))])

        def log_message(self, *_):
            return

    read = config.read_recipe

    def with_our_hashes(path):
        recipe = read(path)
        for percent, data in served.items():
            about = {"lines": 1, "sha256": hashlib.sha256(data).hexdigest()}
            recipe["parts"][str(percent)]["list"] = about
        return recipe

    monkeypatch.setattr(config, "read_recipe", with_our_hashes)
    with http.server.HTTPServer(("127.0.0.1", 0), Lists) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{{percent}}percent.txt"
        monkeypatch.setattr(verb, "LISTS_URL", address)
        words = words_of(line)
        monkeypatch.chdir(tmp_path)
        assert cli.main(words) == 0, capsys.readouterr().err
        server.shutdown()
    out = Path(words[words.index("--out") + 1])
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        "1percent.txt": served[1],
        "10percent.txt": served[10],
    }
