"""The data of a detector: annotation files (coco, voc), read as a split of records, the order of images,
one image with its targets, and masks in their four forms.
"""
