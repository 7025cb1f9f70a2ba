"""Public checkpoints measured and held to what is printed of them, by one command.

asked     configs/reproduce/*.yaml: which files, which numbers, what is run, what it costs
download  fetching a file, only where `--download` asks for it: continued, checked
files     which files are there, and whether they are the published ones
outcome   every printed number beside the measured one, with a verdict or why there is none
bundle    what is sent back, and whether such a file holds together
verb      `backbench reproduce`
"""
