"""Images: read from folders and archives, made into views, brought to what a trunk expects."""

import os

# Of one image: beyond, PIL takes a file for a decompression bomb. OpenCV asks when it is loaded,
# which nothing here does before this line
MOST_PIXELS = 178_956_970
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MOST_PIXELS))
