"""How well images of unknown classes are told from those of known ones, by each of several scores.

    python results/studies/unknown/unknown.py --tinyimagenet data/tinyimagenet100 --cifar data/cifar100.npz \\
        --weights data/models/efficientnet_lite0.safetensors --cache data/features --out results/studies/unknown

Half of some classes are learned, of which a fifth of the images is held out. Scores are compared on other images of
these and of the other half: by the AUROC, and by the shares that are refused at 5 % of the held-out images. Of
Tiny-ImageNet and CIFAR-100, ten of twenty classes, in the features of EfficientNet-Lite0 at 96 pixels. ``--cache``:
folder of these, which take most of the time. Classes 0 to 39 have chosen the score of the library, the other ones are
reported. The digits of scikit-learn, five of ten, are reported only; Replay also learns them, with a ResNet-8 in two
tasks.

``accuracy.csv``: the accuracy on images of known classes that are shifted, and three estimates of it without labels.
"""

import argparse
import csv
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import timm
import torch
from PIL import Image, ImageFilter
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate

from pycil_wsc import Learner
from pycil_wsc.classifier.predict.calibration import fitted_temperature
from pycil_wsc.classifier.predict.familiarity import SHRINKAGE, auroc, class_means, whitening_of
from pycil_wsc.config.completion import complete
from pycil_wsc.methods.closed_form.fecam import Mahalanobis
from pycil_wsc.methods.closed_form.ncm import NearestMean
from pycil_wsc.methods.closed_form.ranpac import RandomProjection
from pycil_wsc.methods.closed_form.slda import Discriminants

SHARE = 0.05  # of the held-out images that is refused
SHIFTS = ("none", "brightness x 0.5", "noise of 25 of 255", "blur")
CHOOSING = 40  # the first classes
TESTED = 10  # images of a class that are shifted
REPLAY = {"convnet_type": "resnet8", "image_size": 8, "init_epoch": 6, "epochs": 6, "batch_size": 32, "device": "cpu"}
REPLAY |= {
    "precision": "fp32",
    "memory_per_class": 20,
    "held_out": 20,
    "flip": False,
    "padding": 0,
    "threads": 1,
    "quiet": True,
}


class Part(NamedTuple):
    """Images of some classes: features (n, d), or pixels, and labels (n,)."""

    values: np.ndarray
    labels: np.ndarray

    def of(self, classes, first=0, last=None):
        """Images ``first`` to ``last`` of each of these classes, which are numbered anew."""
        rows = [np.flatnonzero(self.labels == label)[first:last] for label in classes]
        labels = np.repeat(np.arange(len(classes)), [len(of_class) for of_class in rows])
        return Part(self.values[np.concatenate(rows)], labels)


class Setting(NamedTuple):
    """What is learned: ``train``; and what of it is tested: ``held_out``, ``known``, ``unknown``, and by shift."""

    train: Part
    held_out: Part
    known: Part
    unknown: Part
    shifted: dict


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tinyimagenet", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--data", nargs="+", default=["tinyimagenet", "cifar", "digits", "digits, trained"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    rows, accuracies = [], []
    for name in args.data:
        for number, (part, setting) in enumerate(settings_of(name, args)):
            found = trained(setting) if name == "digits, trained" else frozen(setting)
            head = {"data": name, "classes": part, "choice": number}
            for (learner, score), values in found["scores"].items():
                rows.append(head | {"learner": learner, "score": score} | told(values))
            for learner, by_shift in found["accuracy"].items():
                for shift, estimates in by_shift.items():
                    accuracies.append(head | {"learner": learner, "shift": shift} | estimates)
            print(name, part, number, flush=True)
    for file, lines in (("table.csv", rows), ("accuracy.csv", accuracies)):
        with (args.out / file).open("w", newline="") as opened:
            writer = csv.DictWriter(opened, lines[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: shown(value) for key, value in line.items()} for line in lines)


def shown(value):
    return f"{value:.4g}" if isinstance(value, float) else value


def told(values):
    """AUROC and refused shares from the scores of held-out images, known and unknown ones."""
    held_out, known, unknown = values
    least = np.sort(held_out)[int(SHARE * (len(held_out) + 1)) - 1]  # conformal: at most so many are refused
    refused = {name: 100 * float((scores <= least).mean()) for name, scores in (("known", known), ("unknown", unknown))}
    return {"auroc": auroc(known, unknown), **refused, "held out": len(held_out), "tested": len(known) + len(unknown)}


# ---- data ------------------------------------------------------------------------------------------------------------


def settings_of(name, args):
    """(which part of the classes, setting) of each choice of classes."""
    if name.startswith("digits"):
        rows, labels = load_digits(return_X_y=True)
        images = np.round(np.reshape(rows, (-1, 8, 8)) * 255 / 16).astype(np.uint8)[..., None].repeat(3, -1)
        train, test = Part(images[:1200], labels[:1200]), Part(images[1200:], labels[1200:])
        pools = [("reported", np.random.default_rng(seed).permutation(10), 100) for seed in range(3)]
    else:
        train, test = photographs(name, args)
        choosing = [("chosen on", np.arange(CHOOSING).reshape(2, 20)[number]) for number in range(2)]
        shuffled = CHOOSING + np.random.default_rng(0).permutation(100 - CHOOSING).reshape(3, 20)
        pools = [(part, classes, 100) for part, classes in (*choosing, *(("reported", some) for some in shuffled))]
    shifted = {shift: Part(*map(np.concatenate, zip(*shift_of_each(test, shift)))) for shift in SHIFTS}
    if name != "digits, trained":
        train, test = (features_of(f"{name}-{what}", part, args) for what, part in (("train", train), ("test", test)))
        shifted = {shift: features_of(f"{name}-{shift}", part, args) for shift, part in shifted.items()}
    for part, classes, photos in pools:
        known, unknown = np.split(classes, 2)
        number = min(photos, int(np.bincount(train.labels).min()))
        aside = number // 5
        yield (
            part,
            Setting(
                train.of(known, aside, number),
                train.of(known, 0, aside),
                test.of(known),
                test.of(unknown),
                {shift: each.of(known) for shift, each in shifted.items()},
            ),
        )


def photographs(name, args):
    """The training and the test images."""
    if name == "cifar":
        content = np.load(args.cifar)
        parts = [Part(content[f"{part}_x"], content[f"{part}_y"]) for part in ("train", "test")]
        return parts[0].of(range(100), 0, 60), parts[1].of(range(100), 0, 30)
    found = []
    for part, number in (("train", 100), ("val", 20)):
        images, labels = [], []
        for label, folder in enumerate(sorted((args.tinyimagenet / part).iterdir())):
            for path in sorted(folder.rglob("*.JPEG"))[:number]:
                images.append(np.array(Image.open(path).convert("RGB")))
                labels.append(label)
        found.append(Part(np.stack(images), np.array(labels)))
    return found


def shift_of_each(test, shift):
    """The first images of each class, shifted."""
    rng = np.random.default_rng(0)
    for label in np.unique(test.labels):
        images = test.values[np.flatnonzero(test.labels == label)[:TESTED]]
        if shift == SHIFTS[1]:
            images = images // 2
        elif shift == SHIFTS[2]:
            images = (images + rng.normal(0, 25, images.shape)).clip(0, 255).astype(np.uint8)
        elif shift == SHIFTS[3]:
            images = np.stack(
                [np.array(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1))) for image in images]
            )
        yield images, np.full(len(images), label)


def features_of(name, part, args):
    """The features of the images, float32 (n, d), from the cache if they are there."""
    path = args.cache / f"{name.replace(' ', '-')}.npy"
    if not path.exists():
        np.save(path, extracted(part.values, args.weights))
    return Part(np.load(path), part.labels)


@torch.inference_mode()
def extracted(images, weights):
    """The features of EfficientNet-Lite0 at 96 pixels."""
    network = timm.create_model("efficientnet_lite0", num_classes=0)
    state = {name: value for name, value in load_file(weights).items() if not name.startswith("classifier")}
    network.load_state_dict(state)
    network.eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    parts = []
    for start in range(0, len(images), 32):
        batch = torch.from_numpy(images[start : start + 32]).permute(0, 3, 1, 2).float() / 255
        batch = interpolate(batch, size=(96, 96), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        parts.append(network((batch - mean) / std))
    return torch.cat(parts).numpy()


# ---- learners --------------------------------------------------------------------------------------------------------


def frozen(setting):
    """Scores and estimates of methods that compute the classifier from features of a frozen backbone."""
    scores = {("any", name): values for name, values in of_features(setting).items()}
    accuracy = {}
    for name, head in heads(setting.train.values.shape[1]).items():
        head.grow(int(setting.train.labels.max()) + 1)
        head.add(torch.from_numpy(setting.train.values), torch.from_numpy(setting.train.labels))
        head.solve()

        def logits(values, head=head):
            with torch.inference_mode():
                return head(torch.from_numpy(values)).numpy()

        scores |= {(name, score): values for score, values in of_logits(setting, logits).items()}
        accuracy[name] = estimated(setting, logits)
    return {"scores": scores, "accuracy": accuracy}


def heads(width):
    torch.manual_seed(0)
    options = complete({"model_name": "fecam", "dataset": "digits"}).options
    return {
        "slda": Discriminants(width, torch.float64, 1e-4),
        "ranpac": RandomProjection(width, 2000, torch.float64),
        "ncm": NearestMean(width, torch.float64),
        "fecam": Mahalanobis(width, options, torch.float32),
    }


def trained(setting):
    """Those of Replay, which trains its network on two tasks."""
    images = np.concatenate([setting.train.values, setting.held_out.values])
    labels = np.concatenate([setting.train.labels, setting.held_out.labels])
    learner = Learner("replay", **REPLAY)
    for task in ((0, 1, 2), (3, 4)):
        rows = np.isin(labels, task)
        learner.learn((images[rows], labels[rows].astype(str)))
    kept, classifier = learner.answers.features, learner.answers.classifier
    parts = [
        Part(kept.values[kept.held_out == aside].float().numpy(), kept.labels[kept.held_out == aside])
        for aside in (0, 1)
    ]
    others = [Part(classifier.features(part.values), part.labels) for part in (setting.known, setting.unknown)]
    shifted = {shift: Part(classifier.features(part.values), part.labels) for shift, part in setting.shifted.items()}
    setting = Setting(parts[0], parts[1], others[0], others[1], shifted)

    def logits(values):
        return classifier.classified(torch.from_numpy(values)).numpy()

    scores = of_features(setting) | of_logits(setting, logits)
    return {
        "scores": {("replay", name): values for name, values in scores.items()},
        "accuracy": {"replay": estimated(setting, logits)},
    }


# ---- scores: greater for images of known classes ---------------------------------------------------------------------


def of_each(setting, score):
    return [score(part.values) for part in (setting.held_out, setting.known, setting.unknown)]


def of_logits(setting, logits):
    temperature = fitted_temperature(logits(setting.held_out.values), setting.held_out.labels)

    def scaled(values):
        return torch.from_numpy(logits(values)).double() / temperature

    return {
        "probability": of_each(setting, lambda values: scaled(values).softmax(1).amax(1).numpy()),
        "largest logit": of_each(setting, lambda values: scaled(values).amax(1).numpy()),
        "energy": of_each(setting, lambda values: scaled(values).logsumexp(1).numpy()),
    }


def of_features(setting):
    train, labels = torch.from_numpy(setting.train.values), torch.from_numpy(setting.train.labels)
    classes = int(labels.max()) + 1
    means = class_means(train, labels, classes)
    deviations = train - means[labels]

    def cosines(values, others, centre, whitening):
        one, other = ((each - centre) @ whitening for each in (values, others))
        return torch.nn.functional.normalize(one) @ torch.nn.functional.normalize(other).T

    def to_mean(values, centre, whitening):
        return cosines(torch.from_numpy(values), means, centre, whitening).amax(1).numpy()

    def to_neighbour(values):
        return cosines(torch.from_numpy(values), train, 0, identity).topk(5).values[:, 4].numpy()

    def in_class(values):
        near = cosines(torch.from_numpy(values), train, 0, identity)
        return (
            torch.stack([near[:, labels == label].topk(5).values.mean(1) for label in range(classes)]).amax(0).numpy()
        )

    def mahalanobis(values, whitening):
        return -torch.cdist(torch.from_numpy(values) @ whitening, means @ whitening).amin(1).numpy()

    identity = torch.eye(train.shape[1])
    found = {
        "cosine to the class mean": of_each(setting, lambda values: to_mean(values, 0, identity)),
        "the same, centred": of_each(setting, lambda values: to_mean(values, means.mean(0), identity)),
        "fifth neighbour": of_each(setting, to_neighbour),
        "five neighbours of a class": of_each(setting, in_class),
    }
    for shrinkage in (0.5, SHRINKAGE, 0.95):
        whitening = whitening_of(deviations, len(train) - classes, shrinkage)
        name = f"whitened cosine, {shrinkage:g}"
        found[name] = of_each(setting, lambda values, whitening=whitening: to_mean(values, means.mean(0), whitening))
        if shrinkage == SHRINKAGE:
            found["Mahalanobis distance"] = of_each(setting, lambda values, w=whitening: mahalanobis(values, w))
    return found


# ---- accuracy without labels -----------------------------------------------------------------------------------------


def estimated(setting, logits):
    """The accuracy in percent by shift, and its estimates from confidences."""
    held_out = logits(setting.held_out.values)
    temperature = fitted_temperature(held_out, setting.held_out.labels)
    correct = held_out.argmax(1) == setting.held_out.labels

    def confidence(values):
        return (torch.from_numpy(values).double() / temperature).softmax(1).amax(1).numpy()

    known = confidence(held_out)
    found = {}
    for shift, part in setting.shifted.items():
        answered = logits(part.values)
        confident = confidence(answered)
        found[shift] = {
            "accuracy": 100 * float((answered.argmax(1) == part.labels).mean()),
            "held out": 100 * float(correct.mean()),
            "thresholded": thresholded(confident, known, correct),
            "mean confidence": 100 * float(confident.mean()),
            "difference": 100 * float(correct.mean() + confident.mean() - known.mean()),
            "images": len(part.labels),
        }
    return found


def thresholded(confidence, held_out, correct):
    """Average thresholded confidence (Garg et al., ICLR 2022): the share of images that are confident, in percent.

    As many held-out images are confident as are classified correctly.
    """
    wrong = int((~correct).sum())
    threshold = np.sort(held_out)[wrong] if wrong < len(held_out) else np.inf
    return 100 * float((confidence >= threshold).mean())


if __name__ == "__main__":
    main()
