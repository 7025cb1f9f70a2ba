"""Where images lie: class folders, tar, zip, Parquet, Arrow and LMDB files read in place."""
