"""Grids of jobs: what is missing, where it runs, how it stands.

grid                   the grid's file
expansion              its checkpoints and what makes them; all its jobs
job                    one command, and how one sees that it is done
records                RUNS/.launch: submissions, statuses, logs, locks
attempt                the core: one attempt at a job, and the rules for what follows it
local                  processes of this machine side by side
slurm, slurm_client    Slurm through submitit, and how a killed job continues; Slurm's own commands
clusters               where jobs run and what they ask for
view                   how every job stands at one moment (writes nothing)
plan                   what of a grid is missing, in which arrays, at what cost
"""
