"""The verbs of the command line, one file each: the doors. Nobody imports them."""
