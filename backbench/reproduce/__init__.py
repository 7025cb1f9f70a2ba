"""Re-measures public checkpoints and compares with their published results, by one command.

selection      configs/reproduce/*.yaml: files, printed numbers, evaluations, estimated cost
public_files   finding the files, comparing their digests, downloading them where asked
outcome        every printed number beside the measured one, with a verdict or the reason for none
bundle         the zip that is sent back, and the check of such a zip
"""
