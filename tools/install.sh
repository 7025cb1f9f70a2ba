#!/bin/sh
# How the suite is installed, in containers and anywhere: tools/install.sh [system] [suite] [detectron2], or all three.
#   system      what Detectron2 is built with, and what OpenCV reads images with (Debian, as root)
#   suite       backbench, in the versions of constraints.txt
#   detectron2  upstream's own instruction, pinned to the commit that was built and trained with this suite; after `suite`
# PIP names another installer: PIP="uv pip install --python .venv/bin/python" tools/install.sh detectron2
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
PIP=${PIP:-python -m pip install --no-cache-dir}

system() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends git g++ libglib2.0-0
}

suite() {
    $PIP -c "$source/constraints.txt" "$source"
}

detectron2() {
    $PIP "setuptools<81" wheel ninja
    $PIP --no-build-isolation -r "$source/detection/detectron2.txt"
}

[ $# -gt 0 ] || set -- system suite detectron2
for part in "$@"; do
    case $part in
    system | suite | detectron2) "$part" ;;
    *)
        echo "tools/install.sh: no part '$part'; there are system, suite and detectron2" >&2
        exit 2
        ;;
    esac
done
