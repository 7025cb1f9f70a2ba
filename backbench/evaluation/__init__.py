"""Several readings of several models, from one request to the table.

wanted   which tasks are asked for, on which dataset
models   what is given (files, names, modules) as checkpoints
plan     the runs that follow, each a request; their images and checkpoints are read once
measure  does the runs, in this process
api      the same from Python: `backbench.evaluate`
"""
