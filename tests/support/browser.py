"""A page in headless Chromium: what its own scripts see of it."""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
FLAGS += ["--no-default-browser-check"]


def chromium() -> str | None:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    return None


def browse(page: Path) -> str:
    """Open a page and return the document after its scripts have run."""
    with tempfile.TemporaryDirectory() as profile:
        own = [f"--user-data-dir={profile}", "--window-size=1280,900", "--dump-dom"]
        command = [str(chromium()), *FLAGS, *own, page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.stdout


PROBE = """<script>
addEventListener("load", () => {
  const k = columns.length - 1, began = performance.now();
  sortBy(k);
  document.getElementById("board").offsetHeight;
  const sorted_ms = performance.now(), sort_ms = sorted_ms - began, list = sorted(measured).map(r => valueAt(k, r.i));
  const ok = list.every((v, i) => !i || list[i - 1] >= v);
  const loaded = performance.getEntriesByType("resource");
  const requests = loaded.filter(e => !e.name.startsWith("data:")).length;
  const said = JSON.stringify({sorted_ms, sort_ms, ok, requests});
  document.body.insertAdjacentHTML("beforeend", `<output id="probe">${said}</output>`);
});
</script>"""


def sort_in_browser(page: Path) -> dict[str, float]:
    """Load a leaderboard, sort its last column at once, and say when that was done and how
    long it took: {"sorted_ms", "sort_ms", "ok", "requests"}."""
    probed = page.with_name(f"probe-{page.name}")
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    found = re.findall(r'<output id="probe">({".*?})</output>', browse(probed))
    probed.unlink()
    assert found, "the page did not run"
    return json.loads(found[-1])
