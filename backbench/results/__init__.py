"""Results: the record of one measured number, its files, and which numbers share a column."""
