"""A classifier that learns each month's photographs, keeps an update only if it is good, and saves it.

python examples/monthly_classifier.py photos/january photos/february photos/march

Each folder has one folder of photographs per class. The next call goes on from the folder "shelf".
"""

import os
import sys

import pycil_wsc

SETTINGS = {  # a pre-trained network; without timm: ("wsc", memory_per_class=20, convnet_type="resnet18", epochs=20)
    "held_out": 20,  # photographs of each class that judge updates
    "projection": 2000,
    "convnet_type": "timm:efficientnet_lite0",
    "pretrained": True,
    "image_size": 96,
}


def update(learner, month):
    print(learner.check(f"folder:{month}"))  # unreadable files, duplicates, wrong classes, shift
    accept = pycil_wsc.Accept(max_drop=0.1) if learner.history else None
    task = learner.learn(f"folder:{month}", accept=accept)
    if not task.get("accepted", True):
        print(f"{month} is rejected: {task['reason']}")
        return
    learner.save("shelf")  # keeps five versions; learner.rollback() goes back to the one before
    print(f"{month}: version {learner.version}, {len(learner.classes)} classes")


if __name__ == "__main__":
    known = os.path.exists("shelf")
    classifier = pycil_wsc.Learner.load("shelf") if known else pycil_wsc.Learner("ranpac", **SETTINGS)
    for folder in sys.argv[1:]:
        update(classifier, folder)
