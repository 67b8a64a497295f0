from utils.inc_net import ExpandingNet

from models.replay import Replay


class Mixture(Replay):
    net = ExpandingNet
