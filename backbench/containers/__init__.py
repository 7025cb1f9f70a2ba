"""Where images lie: class folders, and tar, zip, Parquet, Arrow and LMDB files, read in place.

From a dataset's folder to its images:
  finding     finds the container that holds a split
  table_cache lists what is in its files, once (scan_tar_zip, scan_parquet_arrow_lmdb; parquet_pages)
  naming      names the images as a class folder would (names_by_contents: copies without names)
  reading     puts these together: `read_split` is the door for everybody else
  spans       the list of images that comes out, each image a piece of a file
  provenance  what a row says about the containers it was measured on
`container` and `tables` are the two types that pass between them.
"""
