"""Says by their names which files and folders count, in a class folder as in any container."""

from backbench.errors import BadInput
from backbench.runs.folder import METRICS_FILE, RESULTS_FILE, RUN_FILE
from backbench.untrusted import printable

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Pictures that no list takes: what a camera, a browser or a scanner writes
OTHER_PICTURES = (
    ".avif",
    ".dng",
    ".gif",
    ".heic",
    ".heif",
    ".jfif",
    ".jp2",
    ".jxl",
    ".svg",
    ".tga",
)
# Folders that a system lays beside images: macOS, Synology, QNAP, Windows, ext4. Their names do not
# begin with a dot, and what they hold (thumbnails, deleted images) was never meant to be learnt from
SYSTEM_FOLDERS = frozenset(
    {
        "__MACOSX",
        "@eaDir",
        "@__thumb",
        "#recycle",
        "@Recycle",
        "$RECYCLE.BIN",
        "System Volume Information",
        "lost+found",
    }
)
# Characters of no width that ordinary names have: joiners (Persian, Indic scripts, emoji), marks of
# direction (WhatsApp's files), soft hyphens, the byte order mark
_OF_NO_WIDTH = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"


def is_image(path: str) -> bool:
    """Return True if a path ends in the name of an image."""
    return is_image_name(path.rpartition("/")[2])


def is_image_name(name: str) -> bool:
    """Return True if a file's name, without its folders, is that of an image."""
    # "._1.png" is what a Mac leaves beside 1.png
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def passed_over(path: str) -> bool:
    """Return True if a part of a path is hidden (.ipynb_checkpoints) or made by a system."""
    return any(
        name_passed_over(part) and part not in (".", "..") for part in path.split("/")
    )


def name_passed_over(name: str) -> bool:
    """Return True if the name of one file or folder is hidden, or a system's own."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def refuse_run(path: str, name: str) -> None:
    """Refuse the file `name` of a run among images: its pictures would be a class."""
    if name in (RUN_FILE, METRICS_FILE, RESULTS_FILE):
        raise BadInput(
            f"{path}: is the file of a run, among images; move the folder of runs out of the dataset"
        )


def unusable_in(name: str) -> str | None:
    """Return the first character that a name must not have, as Python writes it ('\\n'), or None.

    Lists of images are files of lines with tabs between their columns, in UTF-8."""
    return printable.control_in(name, allowed=_OF_NO_WIDTH)
