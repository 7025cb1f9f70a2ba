"""python tools/release.py check TAG: refuse a release whose parts disagree; else print its notes.

A tag is v<version of pyproject.toml>, and CHANGELOG.md begins with `## <version> (<date>)`. The
notes are what stands below that heading. .github/workflows/release.yml runs this first, and
docs/release.md says what comes before.
"""

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = re.compile(r"^## (\S+) \((.+)\)$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def notes(tag: str, root: Path = ROOT) -> str:
    """Return what the changelog says of the version of this tag."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = project["version"]
    if tag != f"v{version}":
        raise SystemExit(
            f"{tag}: pyproject.toml has version {version}; the tag of that is v{version}"
        )
    text = (root / "CHANGELOG.md").read_text()
    headings = list(HEADING.finditer(text))
    if not headings or headings[0][1] != version:
        raise SystemExit(f"CHANGELOG.md: begin it with `## {version} (YYYY-MM-DD)`")
    date = headings[0][2]
    if not DATE.fullmatch(date):
        raise SystemExit(
            f"CHANGELOG.md: `## {version} ({date})` has no date; write (YYYY-MM-DD)"
        )
    end = headings[1].start() if headings[1:] else len(text)
    said = text[headings[0].end() : end].strip()
    if not said:
        raise SystemExit(f"CHANGELOG.md: nothing stands below `## {version} ({date})`")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("check",))
    parser.add_argument("tag", metavar="TAG", help="v0.1.0")
    print(notes(parser.parse_args().tag))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
