"""Trunks of three kinds on the embedded digits: a ResNet-18, a small vision transformer, a small
ConvNeXt, each as drawn and trained on the labels.

All six are scored by one command, which decodes each image once: logistic regression and neighbours.
Each is finetuned by the protocol of its kind. Kept in trunks_on_digits.txt; about ten minutes on two
cores (what lies in --out is not trained again):

    python benchmarks/trunks_on_digits.py --out runs/trunks

Detection with the same trunks: detection_trunks.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from backbench.datasets import embedded
from backbench.results import store
from backbench.runs.folder import CHECKPOINT_FILE

RECIPES = {
    "ResNet-18": ("demo_supervised", "finetune_demo"),
    "ViT": ("demo_supervised_vit", "finetune_vit_demo"),
    "ConvNeXt": ("demo_supervised_convnext", "finetune_vit_demo"),
}
DRAWN = ("epochs=0",)
KINDS = {"drawn": DRAWN, "trained": ()}
PROTOCOLS = {"logreg_demo": "logistic regression", "knn_demo": "20 neighbours"}


def run(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "backbench", *map(str, words)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/trunks"))
    out = parser.parse_args().out
    data = embedded.build(out / "data")
    # 1. Six trunks
    files: dict[tuple[str, str], Path] = {}
    for name, (recipe, _) in RECIPES.items():
        for kind, changes in KINDS.items():
            folder = out / f"{recipe}-{kind}"
            title = f"name={name} {kind}"
            files[name, kind] = folder / CHECKPOINT_FILE
            if not files[name, kind].exists():
                run("pretrain", recipe, *changes, title, "--data", data, "--out", folder)
    # 2. All of them in one pass, then each by itself
    for protocol in PROTOCOLS:
        words = ("--datasets", "digits", "--protocol", protocol, "--data", data)
        run("linear", *files.values(), *words, "--out", out / protocol)
    for (name, kind), file in files.items():
        protocol = RECIPES[name][1]
        words = ("--dataset", "digits", "--protocol", protocol, "--data", data)
        run("finetune", file, *words, "--out", out / f"finetune-{name}-{kind}")
    # 3. The table
    rows, problems = store.read(out)
    assert not problems, problems
    for line in table(rows):
        print(line)


def table(rows: list[store.Result]) -> list[str]:
    """A line for each trunk: what it costs, and top-1 by each protocol."""
    titles = [*PROTOCOLS.values(), "finetuned"]
    head = f"{'':20}{'parameters':>12}{'MFLOPs':>9}" + "".join(f"{t:>22}" for t in titles)
    lines = [head]
    for name in RECIPES:
        for kind in KINDS:
            own = [r for r in rows if r.name == f"{name} {kind}"]
            cells = {
                "logistic regression": [r for r in own if "logreg" in r.protocol],
                "20 neighbours": [
                    r for r in own if r.protocol.startswith("knn") and "k20" in r.metric
                ],
                "finetuned": [r for r in own if r.task == "finetune"],
            }
            facts = own[0].provenance["trunk"]
            text = f"{name + ' ' + kind:20}{facts['parameters']:>12,}{1000 * facts['gflops']:>9.1f}"
            for title in titles:
                found = [r for r in cells[title] if r.value is not None]
                text += f"{found[0].value:>22.1f}" if found else f"{'-':>22}"
            lines.append(text)
    return lines


if __name__ == "__main__":
    main()
