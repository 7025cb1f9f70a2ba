"""Results: the records on disk, the papers' own numbers, and what can be said of two of them."""
