import torch

from utils import factory
from utils.data_manager import DataManager


def train(args):
    for seed in args["seed"]:
        torch.manual_seed(1)
        args["device"] = [torch.device("cpu") for _ in args["device"]]
        data_manager = DataManager(seed, args["init_cls"], args["increment"])
        model = factory.get_model(args["model_name"], args)
        for task in range(data_manager.nb_tasks):
            model.incremental_train(data_manager)
            weights = sum(p.double().abs().sum().item() for p in model._network.parameters())
            print(
                f"task {task}: top1 {model.eval_task():.2f}, weights {weights!r}, "
                f"exemplars seen with {model.seen_at_exemplars!r}"
            )
            model.after_task()
