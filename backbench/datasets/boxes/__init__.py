"""Finds and reads boxes of one's own: a folder with COCO's json, VOC's XML or YOLO's text files."""
