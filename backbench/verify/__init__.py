"""Whether numbers follow from what was kept beside them, and whether two of them differ.

verification  computes every number again from what was kept; a row that does not follow falls out
resamples     kept predictions scored on resamples of their test images
flaws         why a number is shown but not ranked (errata.yaml, related.yaml)
paired_tests  two checkpoints compared image by image
column_noise  how far a second training moves a column's numbers (noise.yaml)
"""
