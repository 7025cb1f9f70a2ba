"""From a Checkpoint to the AP of Faster, Mask and Keypoint R-CNN. Which file is what:

train_net   the program, from its command to its numbers: run, prepare, work, train
run         a run as data: what was asked, what has been read for it, the files that it leaves
config      Detectron2's dialect of YAML        protocol    the name that the numbers carry
tasks       a row per detection task            schedule    the learning rate of every iteration
lint        what ruins a run in silence         convert     the trunk, and the proof that it arrived
engine      what an engine offers: engine_torchvision and engine_detectron2 are the two
trunks      trunks of any kind as backbones of both; engine_detectron2_trunks registers them
data/       annotation files, images, targets   rcnn/       the network of the torchvision engine
precise_bn  batch norm's last statistics        ranks       the processes of a run
evaluate    AP and its interval                 scoring     from a detector to its results
coco_ap     COCO's AP of images drawn anew      voc_ap      VOC's
pictures    detections beside the ground truth
"""
