"""What a learner predicts with, apart from the learner: the network, and what is done to an image before it."""

import io
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.images.files import decode, in_colour, middle, open_image
from pycil_wsc.data.types import DatasetInfo
from pycil_wsc.errors import UserError
from pycil_wsc.networks.closed_form import ComputedHead
from pycil_wsc.training.learner import BaseLearner

Picture = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor  # one image
FORMS = "give a PIL image, a file name, or uint8 (H, W, 3), (H, W) or, as a tensor, (3, H, W)"


class Model(nn.Module):
    """The network of a learner: (B, 3, side, side) normalised float images -> (B, classes) float32 logits.

    It has the weights of the learner, which predicts with them too, without the sums that :func:`for_prediction` drops.
    ``classes``: the name of each column of the logits. :class:`Transform` makes its images. It is in evaluation mode,
    and computes in the precision of its weights, as ``predict`` of a learner does unless ``precision`` is ``"bf16"``.
    """

    def __init__(self, learner: BaseLearner, classes: Sequence[str]) -> None:
        super().__init__()
        self.network = predictor(learner)
        self.classes = list(classes)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.network.classify(self.network.extract(images)).float()


def for_prediction(learner: BaseLearner) -> BaseLearner:
    """``learner`` without the sums that a computed classifier needs only to learn more."""
    for module in list(learner.modules()):
        if isinstance(module, ComputedHead):
            module.for_prediction()
    return learner


class Predictor(Protocol):
    """A module that predicts."""

    def extract(self, images: Tensor) -> Tensor: ...

    def classify(self, features: Tensor) -> Tensor: ...


def predictor(learner: BaseLearner) -> Predictor:
    """The module whose ``extract`` and ``classify`` predict: the network, or the learner if it has its own ones."""
    methods = (getattr(type(learner), name) for name in ("extract", "classify"))
    inherited = all(method in (BaseLearner.extract, BaseLearner.classify) for method in methods)
    return learner.network if inherited else learner


class Transform:
    """What the learner does to an image before the network sees it, as ``transform`` of a torchvision data set.

    A PIL image of any size, the name of an image file, or a uint8 array or tensor of one image -> float32 (3, side,
    side), normalised, on the CPU. An image is resized to a shorter side of ``resize`` and cropped at its centre to
    ``crop``; after training on arrays, only if it has another size than they. Greyscale becomes three equal channels.

    Raises:
        UserError: if it is not an image, or has more than 8 bits per channel.
    """

    def __init__(self, info: DatasetInfo) -> None:
        self.side, self.interpolation = info.image_size, info.interpolation
        self.mean, self.std = info.mean, info.std
        self.arrays = info.crop == "pad"  # the learner was trained on arrays
        self.crop = (info.stored_size or info.image_size) if self.arrays else info.image_size
        self.resize = self.crop if self.arrays else round(self.crop * 256 / 224)
        mode = InterpolationMode(info.interpolation)
        self._fit = v2.Compose([v2.Resize(self.resize, mode), v2.CenterCrop(self.crop)])
        self._normalise = augment.Normalise(info.mean, info.std, torch.device("cpu"))

    def __call__(self, image: Picture) -> Tensor:
        pixels = torch.from_numpy(self.fitted(image))[None]
        if self.crop != self.side:  # arrays are stored in another size than the network's
            pixels = augment.resize(pixels, self.side, self.interpolation)
        return self._normalise(pixels)[0]

    def fitted(self, image: Picture) -> np.ndarray:
        """The pixels of an image, resized and cropped: uint8 (crop, crop, 3)."""
        picture = middle(as_picture(image))
        if not self.arrays or picture.size != (self.crop, self.crop):
            picture = self._fit(picture)
        return np.array(picture)

    def settings(self) -> dict[str, object]:
        """The numbers of the transform, as JSON values."""
        values: dict[str, object] = {name: getattr(self, name) for name in ("resize", "crop", "side", "interpolation")}
        return values | {"mean": list(self.mean), "std": list(self.std)}

    def __repr__(self) -> str:
        return f"Transform({', '.join(f'{name}={value}' for name, value in self.settings().items())})"


def as_picture(image: Picture) -> Image.Image:
    """One image in any form that :class:`Transform` takes, as a PIL image in RGB."""
    if isinstance(image, (str, os.PathLike)):
        return decode(os.fspath(image))
    if isinstance(image, Image.Image):
        return in_colour(image)
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = image.permute(1, 2, 0).numpy() if _channels_come_first(image.shape) else image.numpy()
    if not isinstance(image, np.ndarray):
        raise UserError(f"image: is a {type(image).__name__}; {FORMS}")
    shape = image.shape
    if image.dtype != np.uint8 or not (len(shape) == 2 or len(shape) == 3 and shape[2] in (1, 3)) or 0 in shape:
        raise UserError(f"image: {image.dtype} of shape {shape}; {FORMS}")
    return Image.fromarray(image[..., 0] if shape[2:] == (1,) else image).convert("RGB")


def opened(content: bytes) -> Image.Image:
    """The image in the ``content`` of a file. Raises a :class:`UserError` if it is not an image."""
    try:
        return open_image(io.BytesIO(content))
    except Exception:  # what decoders raise about a damaged image
        raise UserError(f"image: {len(content)} bytes that are not an image file's; replace them") from None


def _channels_come_first(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3)
