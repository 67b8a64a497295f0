"""Time of a training step beside stock PILOT's, in the same minute, on the same transformer and as many threads.

    OMP_NUM_THREADS=1 python benchmarks/pilot_speed.py --pilot ../LAMDA-PILOT --out pilot-speed.json

A vision transformer with random weights learns two tasks of two classes; steps of the second are timed. PILOT's own
learner trains, with timm of today: modules that timm has moved are found where PILOT looks for them, and its
transformer is made with these sizes instead of ViT-B's. Both sides alternate, ``--repeats`` times.
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
import types
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from record import origin, spread, write
from torch import nn

from pycil_wsc.config.loading import resolve
from pycil_wsc.devices import resolved_device
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run
from pycil_wsc.training.phase import Monitor

FROZEN = ["blocks", "patch_embed", "cls_token", "norm", "pos_embed"]
PROMPTS = {"tuned_epoch": 1, "freeze": FROZEN, "get_original_backbone": True, "reinit_optimizer": True}
PROMPTS |= {"optimizer": "adam", "scheduler": "constant", "weight_decay": 0, "size": 10, "prompt_pool": True}
PROMPTS |= {"shared_prompt_key": False, "pull_constraint": True, "pull_constraint_coeff": 0.1}
FILE = {  # the keys of PILOT's files that its code reads
    "ease": {"init_epochs": 1, "ffn_num": 64, "use_diagonal": False, "recalc_sim": True, "alpha": 0.1, "beta": 0}
    | {"use_init_ptm": False, "use_old_data": False, "use_reweight": True, "moni_adam": False, "adapter_num": -1},
    "mos": {"tuned_epoch": 1, "ffn_num": 16, "reg": 0.1, "adapter_momentum": 0.1, "ensemble": True, "crct_epochs": 1}
    | {"ca_lr": 0.005, "ca_storage_efficient_method": "variance", "n_centroids": 10},
    "lae": {"tuned_epoch": 1, "ema_decay": 0.9999, "num_freeze_epochs": 0, "pet_cls": "Prefix", "pet_length": 10}
    | {"down_sample_dim": 5, "reinit_optimizer": False},
    "l2p": PROMPTS | {"top_k": 5, "use_prompt_mask": False, "shared_prompt_pool": False},
    "dualprompt": PROMPTS
    | {"top_k": 1, "use_prompt_mask": True, "shared_prompt_pool": True, "use_prefix_tune_for_e_prompt": True},
}
OF_THE_POOL = {"prompt_length": 5, "embedding_key": "cls", "prompt_init": "uniform", "prompt_pool": True}
OF_THE_POOL |= {"prompt_key": True, "pool_size": 10, "batchwise_prompt": True, "prompt_key_init": "uniform"}
TRANSFORMERS = {  # arguments of PILOT's transformers of methods with prompts
    "l2p": OF_THE_POOL | {"top_k": 5, "head_type": "prompt", "use_prompt_mask": False},
    "dualprompt": OF_THE_POOL
    | {"top_k": 1, "head_type": "token", "use_prompt_mask": True, "same_key_value": False}
    | {"use_g_prompt": True, "g_prompt_length": 5, "g_prompt_layer_idx": [0, 1], "use_prefix_tune_for_g_prompt": True}
    | {"use_e_prompt": True, "e_prompt_layer_idx": [2, 3, 4], "use_prefix_tune_for_e_prompt": True},
}
OURS = {
    "ease": {},
    "mos": {"ca_storage_efficient_method": "variance", "crct_epochs": 1},
    "lae": {"num_freeze_epochs": 0, "optimizer": "sgd"},
    "l2p": {"batchwise_prompt": True},
    "dualprompt": {},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilot", type=Path, required=True, help="the folder of PILOT's repository")
    parser.add_argument("--methods", nargs="+", choices=sorted(FILE), default=sorted(FILE))
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--embed-dim", type=int, default=192)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="that are timed in each repeat")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for name in args.methods:
        seconds = {"ours": [], "pilot": []}
        for _ in range(args.repeats):
            seconds["ours"] += ours(name, args)
            seconds["pilot"].append(stock(name, args))
        medians = {side: statistics.median(times) for side, times in seconds.items()}
        found[name] = {f"{side}_seconds": spread(times) for side, times in seconds.items()}
        found[name]["ours_over_pilot"] = medians["ours"] / medians["pilot"]
    sizes = ("image_size", "embed_dim", "depth", "heads", "batch_size", "steps", "repeats")
    record = {"methods": found, "threads": torch.get_num_threads()} | {key: getattr(args, key) for key in sizes}
    record |= origin(resolved_device("cpu"))
    print(json.dumps(record, indent=2))
    write(record, args.out)


class Clock(Monitor):
    """When the steps of the second task ended."""

    def __init__(self):
        self.ends = []

    def step(self, images):
        self.ends.append(time.perf_counter())


def ours(name, args):
    """Seconds of each timed step."""
    with tempfile.TemporaryDirectory() as folder:
        count = (args.steps + 1) * args.batch_size  # the operations of the first step are counted
        targets = np.repeat(np.arange(4), count // 2)
        shape = (len(targets), args.image_size, args.image_size, 3)
        images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        data = f"{folder}/data.npz"
        np.savez(data, train_x=images, train_y=targets, test_x=images[:: count // 2], test_y=targets[:: count // 2])
        sizes = {"embed_dim": args.embed_dim, "depth": args.depth, "num_heads": args.heads}
        keys = {"dataset": f"npz:{data}", "out": folder, "model_name": name, "init_cls": 2, "increment": 2}
        keys |= {"convnet_type": "timm:vit_tiny_patch16_224", "pretrained": False, "image_size": args.image_size}
        keys |= {"device": "cpu", "precision": "fp32", "init_epoch": 1, "epochs": 1, "batch_size": args.batch_size}
        config = resolve(keys | {f"convnet_options.{key}": value for key, value in sizes.items()} | OURS[name])
        run = Run(config, Datasets().of(config))
        first, second = run.manager.tasks
        run.learner.learn(first, Monitor())
        clock = Clock()
        run.learner.learn(second, clock)
    return np.diff(clock.ends[: args.steps + 1]).tolist()


def stock(name, args):
    """Seconds of a step of PILOT's."""
    importable(args.pilot)
    networks = importlib.import_module("utils.inc_net")
    module = importlib.import_module(f"models.{name}")
    keys = {"device": [torch.device("cpu")], "memory_size": 0, "init_cls": 2, "increment": 2, "nb_classes": 4}
    keys |= {"init_lr": 0.01, "later_lr": 0.01, "batch_size": args.batch_size, "weight_decay": 5e-4, "min_lr": 0}
    keys |= {"optimizer": "sgd", "scheduler": "cosine", "model_name": name, "backbone_type": name} | FILE[name]
    vars(networks)["get_backbone"] = lambda *_, **__: transformer(name, keys, args)
    if name in TRANSFORMERS:  # the query's transformer has no prompts
        networks.PromptVitNet.get_original_backbone = lambda *_: transformer(name, keys, args, {}).eval()
    vars(module).update(DataLoader=Batches, tqdm=Bar)
    learner = module.Learner(keys)
    learner._network.backbone.out_dim = learner._network.out_dim = args.embed_dim
    seconds = []
    train = learner._init_train

    def timed(*arguments):
        began = time.perf_counter()
        train(*arguments)
        seconds.append((time.perf_counter() - began) / args.steps)

    learner._init_train = timed
    for _ in range(2):
        learner.incremental_train(Tasks(args))
        learner.after_task()
    return seconds[-1]


def importable(pilot):
    """Let PILOT's files be imported with timm of today."""
    warnings.simplefilter("ignore")
    import timm.layers.helpers
    import timm.layers.weight_init
    import timm.models.layers

    sys.modules["timm.models.layers.helpers"] = timm.layers.helpers
    sys.modules["timm.models.layers.weight_init"] = timm.layers.weight_init
    if str(pilot) not in sys.path:
        for name in [each for each in sys.modules if each.partition(".")[0] in ("utils", "models", "backbone")]:
            del sys.modules[name]
        sys.path.insert(0, str(pilot))


def transformer(name, keys, args, prompts=None):
    """PILOT's transformer of these sizes, with random weights; ``prompts`` in place of the method's."""
    module = importlib.import_module(f"backbone.vit_{name}")
    sizes = {"img_size": args.image_size, "embed_dim": args.embed_dim, "depth": args.depth, "num_heads": args.heads}
    if name == "lae":
        return module.VisionTransformer(**sizes)
    if name in TRANSFORMERS:
        prompts = TRANSFORMERS[name] if prompts is None else prompts
        return module.VisionTransformer(num_classes=4, **prompts, **sizes)
    tuning = types.SimpleNamespace(ffn_adapt=True, ffn_option="parallel", ffn_adapter_layernorm_option="none")
    tuning.ffn_adapter_init_option, tuning.ffn_adapter_scalar, tuning.vpt_on = "lora", "0.1", False
    tuning.ffn_num, tuning.d_model, tuning._device = keys["ffn_num"], args.embed_dim, keys["device"][0]
    tuning.adapter_momentum = keys.get("adapter_momentum")
    norm = partial(nn.LayerNorm, eps=1e-6)
    classes = 4 if name == "mos" else 0
    made = module.VisionTransformer(num_classes=classes, norm_layer=norm, tuning_config=tuning, **sizes)
    made.out_dim = args.embed_dim
    for part, parameter in made.named_parameters():
        parameter.requires_grad = "adapter" in part or "head" in part
    return made


class Images:
    """Random images of two classes: the timed steps' in training, a few otherwise."""

    def __init__(self, args, first, steps):
        self.labels = np.repeat([first, first + 1], args.batch_size // 2)
        self.images = torch.randn(len(self.labels), 3, args.image_size, args.image_size)
        self.steps = steps


class Tasks:
    """In place of PILOT's data manager."""

    def __init__(self, args):
        self.args = args

    def get_task_size(self, task):
        return 2

    def get_dataset(self, classes, source, mode, ret_data=False):
        steps = self.args.steps if source == "train" and mode == "train" else 1
        images = Images(self.args, int(classes[-2:][0]), steps)
        return (images.images, images.labels, images) if ret_data else images


class Batches:
    """In place of torch's loader: a batch, several times."""

    def __init__(self, dataset, *arguments, **more):
        self.dataset = dataset

    def __len__(self):
        return self.dataset.steps

    def __iter__(self):
        labels = torch.from_numpy(self.dataset.labels)
        return iter([(labels, self.dataset.images, labels)] * self.dataset.steps)


class Bar(list):
    """In place of a progress bar."""

    def set_description(self, text):
        pass


if __name__ == "__main__":
    main()
