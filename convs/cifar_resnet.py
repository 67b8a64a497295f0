"""CIFAR ResNets, as ``from convs.cifar_resnet import resnet32``."""

from convs import Convnet
from pycil_wsc.networks.backbones.cifar_resnet import CifarResNet


def resnet14() -> Convnet:
    return Convnet(CifarResNet(14))


def resnet20() -> Convnet:
    return Convnet(CifarResNet(20))


def resnet26() -> Convnet:
    return Convnet(CifarResNet(26))


def resnet32() -> Convnet:
    return Convnet(CifarResNet(32))


def resnet44() -> Convnet:
    return Convnet(CifarResNet(44))


def resnet56() -> Convnet:
    return Convnet(CifarResNet(56))


def resnet110() -> Convnet:
    return Convnet(CifarResNet(110))
