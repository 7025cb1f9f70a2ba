"""Reads a detector's data: annotations (coco, voc), images in order with targets, and masks."""
