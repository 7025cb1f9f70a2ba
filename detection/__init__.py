"""From a Checkpoint to the AP of Faster, Mask and Keypoint R-CNN. Which file is what:

train_net        the program, from its command to its numbers: run, prepare, work, train
run              a run as data: its command, weights, data, learning rate, files that it leaves
dialect          Detectron2's dialect of YAML    protocol       the name that the numbers carry
detectron2_keys  keys that are not honoured      task_rows      a row per detection task
lint             mistakes that would go unnoticed until the numbers are wrong
backbones        the trunk below a detector, its weights proven to have arrived
engine           the interface of the two: engine_torchvision and engine_detectron2; mixed precision
data/            annotation files and images     rcnn/          torchvision's network
process_group    the processes of a run
measure          from a detector to its results, in its own run or on other images
evaluate         AP and its interval by COCO's rules (coco_ap: its draws), voc_ap by VOC's
pictures         detections beside the ground truth
"""
