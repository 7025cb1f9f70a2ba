"""Trains and scores Faster, Mask and Keypoint R-CNN on a checkpoint's trunk.

The program, from its command to its numbers:

train_net        the command, and the training loop: run, prepare, work, train
run              a run as data: its command, its weights and data, its schedule, its files
process_group    the processes of a run
measure          from a trained detector to its results
evaluate         AP and its interval by COCO's rules, voc_ap by VOC's
tide             which error each detection is
kept_detections  what a finished run detected, and the boxes that it was scored on
pictures         detections drawn beside the ground truth

Its configuration:

dialect          Detectron2's dialect of YAML
detectron2_keys  the keys of Detectron2 that are honoured
protocol         the name of the protocol that the numbers carry
task_rows        a row for each detection task
lint             mistakes that would go unnoticed until the numbers are wrong

Its networks:

engine           the interface of engine_torchvision and engine_detectron2; mixed precision
backbones        the trunk below a detector, and the proof that its weights arrived
rcnn/            the network of the torchvision engine
data/            annotation files and images
"""
