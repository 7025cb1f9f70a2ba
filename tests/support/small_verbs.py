"""`python small_verbs.py VERB ...` runs a verb at 32 pixels, in two steps, on files with any md5."""

from backbench.cli import program
from backbench.recipes import config


def smaller(recipe):
    """An evaluation's recipe on images of 32 pixels, in two steps, with two of its rates."""
    out = dict(recipe)
    if out.get("geometry"):
        out["geometry"] = {**out["geometry"], "resize": 32, "crop": 32}
    for key in ("augment", "crops"):
        if out.get(key):
            out[key] = {**out[key], "size": 32}
    if out.get("protocol") == "knn-v1":  # a tiny set has no 20 neighbours
        out["k"] = [5]
    if "stride" in out:
        out["stride"] = 32
    if "draws" in out:
        out["draws"] = 2
    if "length" in out:
        out["length"] = {name: {"iterations": 2} for name in out["length"]}
    if "parts" in out:
        parts = {}
        for name, part in out["parts"].items():
            parts[name] = {**part, "length": {"iterations": 2}, "list": None}
        out["parts"] = parts
    for rates in ("lr", "head_lr"):
        if isinstance(out.get(rates), list):
            out[rates] = out[rates][:2]
    return out


def main():
    from torchvision.datasets import flowers102, utils

    read = config.read_recipe
    config.read_recipe = lambda *args, **more: smaller(read(*args, **more))
    flowers102.check_integrity = utils.check_md5 = lambda *_, **__: True
    return program.main()


if __name__ == "__main__":
    raise SystemExit(main())
