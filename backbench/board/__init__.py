"""The leaderboard: what was measured as rows, columns and cells, and every form it takes.

board         results as a board, and the tests between its rows
metrics       how the columns of a metric are named, ordered and shown
groups        which rows common columns connect
overall       ranks over sets of columns, and who leads in three sentences at most
verdict       who leads a group of rows, in words
column_words  how a sentence names columns
commands      the commands that a board proposes
export        leaderboard.csv, results.csv, the board for programs
page          leaderboard.html from its template, styles and scripts (page.html, page.css, page_*.js)
page_records  the records of the page, whose fields the scripts read
page_figures  what stands on the page from run folders: curves, pictures, figures
page_readings what the page draws of single readings: label curves, layers, errors of detectors
ablation      results of a recipe with keys varied, drawn with error bars
merge         the records of several labs as one folder (`backbench merge`)
rank_csv      who leads any table of numbers (`backbench rank`)
"""
