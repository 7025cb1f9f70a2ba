"""Files that strangers wrote: opened, bounded and read as plain values, whoever wrote them."""
