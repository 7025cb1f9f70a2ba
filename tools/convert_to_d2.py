"""python tools/convert_to_d2.py X OUT.pkl: any importable checkpoint as a Detectron2 model file."""

import argparse
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", metavar="X", type=Path)
    parser.add_argument("out", metavar="OUT.pkl", type=Path)
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )
    args = parser.parse_args()
    from backbench.cli.program import main as backbench

    debug = ["--debug"] if args.debug else []
    return backbench(
        [
            "export",
            str(args.checkpoint),
            "--format",
            "detectron2",
            "--out",
            str(args.out),
            *debug,
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
