from models.replay import Replay
from utils.inc_net import ExpandingNet


class Mixture(Replay):
    net = ExpandingNet
