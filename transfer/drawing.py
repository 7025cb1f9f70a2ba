"""Draws the confusion of classes as a picture, and writes the classes' accuracies as a table."""

import csv
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backbench.transfer import scoring
from backbench.untrusted import printable

NAMED = 60  # classes up to which a picture has their names
COUNTED = 20  # classes up to which its cells have their counts


def per_class_table(
    prediction: NDArray[np.int64], label: NDArray[np.int64], names: Sequence[str]
) -> str:
    """Write a csv: each class with its images, how many are right, and the share in percent."""
    right, total = scoring.per_class(prediction, label, len(names))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("class", "images", "right", "accuracy"))
    for name, good, count in zip(names, right.tolist(), total.tolist()):
        accuracy = f"{100 * good / count:.2f}" if count else ""
        table.writerow((printable.spreadsheet(name), count, good, accuracy))
    return text.getvalue()


def confusion_picture(
    matrix: NDArray[np.int64], names: Sequence[str], title: str
) -> bytes:
    """Draw row-normalised confusion as png, with names up to 60 classes and counts up to 20."""
    # Pillow draws it in milliseconds, where matplotlib took half of a cached evaluation.
    import cv2
    from PIL import Image, ImageDraw, ImageFont

    # 1. A coloured square for each cell
    count = len(matrix)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    colors = cv2.applyColorMap((255 * shares).astype(np.uint8), cv2.COLORMAP_VIRIDIS)
    side = max(1, min(48, 800 // count))  # pixels of a cell
    cells = Image.fromarray(colors[..., ::-1])  # cv2 has blue first
    cells = cells.resize((side * count, side * count), Image.Resampling.NEAREST)
    # 2. The page, with a margin for names at the left and below
    margin = 130 if count <= NAMED else 20
    top = 30
    width = max(margin + cells.width, 420) + 10  # the title needs 420 pixels
    picture = Image.new("RGB", (width, top + cells.height + margin), "white")
    picture.paste(cells, (margin, top))
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(11)
    draw.text(
        (margin, 8),
        f"{title}; rows: true class, columns: predicted class",
        "black",
        font,
    )
    # 3. The names, drawn once; below the columns they stand turned by 90 degrees
    if count <= NAMED:
        labels = Image.new("RGB", (margin - 6, side * count), "white")
        for row, name in enumerate(names):
            middle = (labels.width, int(side * (row + 0.5)))
            ImageDraw.Draw(labels).text(middle, name[:18], "black", font, anchor="rm")
        picture.paste(labels, (0, top))
        picture.paste(labels.rotate(90, expand=True), (margin, top + cells.height + 6))
    # 4. The counts
    if count <= COUNTED:
        for true, predicted in zip(*matrix.nonzero()):
            x = margin + int(side * (predicted + 0.5))
            y = top + int(side * (true + 0.5))
            # Viridis is bright where shares are high.
            color = "black" if shares[true, predicted] > 0.6 else "white"
            draw.text((x, y), str(matrix[true, predicted]), color, font, anchor="mm")
    png = io.BytesIO()
    picture.save(png, "PNG")
    return png.getvalue()
