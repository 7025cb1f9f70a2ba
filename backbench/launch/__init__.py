"""Runs grids of jobs on Slurm or on this machine. Only what is missing runs, and any process may die.

The map of this room, from a grid's file to its running jobs:

    grid            reads a grid's file: recipes, checkpoints, and what is measured on them
    expansion       turns the grid into jobs; what decides a job's numbers decides its folder's name
    job             one command, and how anyone sees that it has been done
    clusters        reads a cluster's file: where jobs run, and what they ask for
    view            how every job stands at one moment (writes nothing)
    plan            which jobs are missing, and which of them go to Slurm as one array
    slurm           submits arrays through submitit, and records what Slurm forgets
    slurm_task      runs on the node: one task of a Slurm job, and how the job comes back
    slurm_client    Slurm's own commands: squeue, scontrol, sinfo, scancel
    local           runs jobs of this machine side by side
    attempt         one attempt at a job, wherever it runs, and what follows from how it ended
    records         RUNS/.launch: submissions, statuses, logs, marks
    locks           who is at work, by locks that a death frees

A job that runs is two processes. The upper one was started by submitit (on Slurm) or by the pool
(on this machine) and runs an `Attempt`. That starts the lower one, the job's command, which is
`backbench VERB ...`. Signals go down and exit statuses come up: at a signal the command saves its
state and exits 75, and whoever started it may start it again. The files in RUNS are the only
memory: whoever comes next reads them.

This is how a preempted Slurm job comes back:

1.  `slurm.submit` writes the array's record, calls sbatch, and writes the numbers it was given. The
    array has `requeue` set, so Slurm may start its jobs more than once.
2.  On the node submitit calls a `SlurmTask`, which takes the job's lock, writes "running" into the
    job's status, and starts the command.
3.  Somebody with priority wants the node. Slurm warns the task by SIGUSR2, or by SIGTERM where the
    partition has a grace. The task hands the signal to the command.
4.  The command ends its step, saves its state in its run folder, and exits 75. The task writes the
    attempt down as "preempted", and the job as "queued": it shall start again.
5.  The task runs `scontrol requeue` for its own job. (After SIGTERM, which may also mean scancel,
    it writes "stopped", then asks Slurm, and requeues only if the job was preempted.) The job keeps
    its number, so jobs that depend on it go on waiting. Slurm ends the task, and the node is free.
6.  When Slurm has a place again, it starts the same script: step 2, with the same command and the
    same folder. The command takes RUN/run.lock, so even a forgotten process cannot write beside it,
    finds its state there and continues, to the same numbers.

If the node is lost, or Slurm preempts without a warning, nobody is told. Slurm starts the job again
by itself. In step 2 the task then finds an attempt that never ended, and notes that it was killed;
the command continues from what it saved last.

`slurm_task` tells steps 3 to 6 with their exceptions, and `attempt` says when a job that fails is
tried again. docs/cluster.md has a table of all events and what follows.
"""
