"""Numbers that papers and public files print, and the verdict on ours beside them."""
