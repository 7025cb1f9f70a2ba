"""Builds Faster, Mask and Keypoint R-CNN from torchvision's parts, equal to Detectron2's."""
