"""Statistics on plain arrays. Nothing here knows about images, checkpoints or files.

confidence          95% intervals of measured values
paired_differences  the difference of two rows on the same images: interval and p-value
multiple_tests      many p-values together: Holm, and sign flips with the largest statistic
column_comparisons  which rows are better than which others over many columns
rank_intervals      win rates, ranks, their 95% intervals and groups
labels_needed       how many labels one curve needs to be as good as another
training_noise      how far a value moves when the same head or detector is trained again
left_out            how far a score moves without flawed test images
resampling          a value on resamples of its test images
calibration         how well a classifier's confidence tells when it is right
coco_ap             COCO's AP on many resamples of the images
ap_errors           what each kind of error costs in AP50
label_ranking       average precision of images of several classes
dense_counts        scores of label maps, from counts of pixels
partitions          how well clusters agree with classes

docs/results.md says what these cover; benchmarks/intervals.py, ranks.py, labels_needed.py and left_out.py
measure it.
"""
