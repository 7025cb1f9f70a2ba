"""Numbers that papers and public files print, and the verdict on ours beside them.

What was printed
    published.py            the numbers of the five papers' tables (published.csv)
    timm_scores.py          counts of right images that timm and the ImageNet testbed print
    reproduction_lists.py   public checkpoints, and the numbers on their pages (configs/reproduce)

The judge
    judging_rules.py        which numbers are judged, by which protocol, within which tolerance
    grid_recipes.py         the recipe that a printed number stands for, and how another differs
    expected_rows.py        which published rows a checkpoint must reach
    judge.py                the verdict on each measured number
    claims.py               which method a table puts above which, tested on our numbers

The tables
    paper_tables.py         the papers' tables: their columns and lines
    tables.py               writes all tables with printed numbers, as LaTeX and Markdown
    board_rows.py           puts the papers' rows on a leaderboard
    catalogue.py            every printed table with the grid that measures it; docs/papers.md

Reproducing public checkpoints
    public_files.py         finds, checks and downloads their files
    bundle.py               the zip file that is sent back, and its check
"""
