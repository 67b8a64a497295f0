"""Backbones: torch only, plain keyword arguments. Importing the package registers them all."""

from convs import cifar_resnet, resnet  # noqa: F401
