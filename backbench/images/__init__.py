"""Images as pixels and as lists.

Lists:  image_list (images with labels, from a class folder, an array, or joined), dense (with label
        maps), multilabel (with several classes each), contents (digests that name a list by what its files hold).
Pixels: decoding (a file to RGB), preprocess (RGB to what a trunk expects).
Views:  crops (what a recipe says of training views), augmentations (makes them).
"""

import os

# OpenCV reads this variable when it is loaded, which nothing here does before this line. A larger
# image is refused: PIL takes it for a decompression bomb
MOST_PIXELS = 178_956_970
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MOST_PIXELS))
