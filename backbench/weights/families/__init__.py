"""One file for each kind of trunk; `archs.FAMILIES` lists them."""
