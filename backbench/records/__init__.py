"""What a run has measured: the lines of its results, and what was kept beside them.

result_line           one measured number, and how a stranger's line becomes one
store                 RUN/results.jsonl: appended by many, read line by line
owed_rows             which rows a run has, and whether these are all that it owes
origin                where a number is made: code, versions, hardware
predictions           RUN/predictions: what a model said of each test image
kept_scores           RUN/scores: the logits of a head, from which calibration follows
layers                the readings of the layers of a trunk, and what the best of them gains
loaders               the rows of several loaders, and how far they lie apart
paired_rows           the difference of two rows of one run, from what was kept
clean_test            a list of flawed test images, and the scores without them
ap_errors             what became of each detection, and the costs of its errors
label_tables          what a head says of images of several classes
trunk_costs           parameters, multiply-adds and speed of a trunk, as its rows state them
column_keys           which rows may stand in one column
protocol_fingerprints a protocol is its resolved recipe, not its name (shipped.json)
data_manifests        the lists of images that a row was trained and scored on

Nothing here judges whether a number is right: that is `backbench.verify`, which imports this room
and is not imported by it.
"""
