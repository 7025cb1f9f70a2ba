"""torchvision's Faster, Mask and Keypoint R-CNN as Detectron2 builds, teaches and reads them."""
