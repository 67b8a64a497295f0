"""The settings of PILOT's 48 JSON files (commit 5240714): 24, each for CIFAR-100 at 224 pixels and for ImageNet-R."""

# fmt: off
IN_MOST = {"fixed_memory": False, "shuffle": True, "device": ["0"], "seed": [1993], "prefix": "reproduce", "dataset":
    "cifar224", "init_cls": 10, "increment": 10, "memory_size": 0, "memory_per_class": 0}
IMAGENET_R = {"dataset": "imagenetr", "init_cls": 20, "increment": 20}
EXEMPLARS_R = {"memory_size": 4000, "fixed_memory": True}
ONCE = {"min_lr": 0, "optimizer": "sgd", "ffn_num": 64, "tuned_epoch": 20, "init_lr": 0.01, "batch_size": 48,
    "weight_decay": 0.0005}
EXEMPLARS = {"memory_size": 2000, "memory_per_class": 20}
MILESTONES = {"init_epoch": 20, "init_lr": 0.001, "init_milestones": [60, 120, 170], "init_lr_decay": 0.1,
    "init_weight_decay": 0.0005, "epochs": 20, "lrate": 0.001, "lrate_decay": 0.1, "weight_decay": 0.0002}
PROMPTS = {"prefix": " ", "get_original_backbone": True, "tuned_epoch": 5, "weight_decay": 0, "min_lr": 1e-05,
    "optimizer": "adam", "scheduler": "constant", "reinit_optimizer": True, "global_pool": "token", "freeze":
    ["blocks", "patch_embed", "cls_token", "norm", "pos_embed"], "pretrained": True, "drop": 0.0, "drop_path": 0.0,
    "prompt_pool": True, "size": 10, "length": 5, "initializer": "uniform", "prompt_key": True, "prompt_key_init":
    "uniform", "shared_prompt_key": False, "batchwise_prompt": True, "embedding_key": "cls", "predefined_key": "",
    "pull_constraint": True, "pull_constraint_coeff": 0.1}
ALIGNED = {"model_postfix": "20e", "backbone_type": "vit_base_patch16_224", "lrate": 0.01, "weight_decay": 0.0005,
    "batch_size": 64, "lrate_decay": 0.1, "epochs": 20, "ca_epochs": 3, "ca_with_logit_norm": 0.1, "milestones": [18]}
SETTINGS = {  # file -> its other keys, and those of the file for ImageNet-R that differ from them
    "aper_aperpter": (ONCE | {"model_name": "aper_adapter", "backbone_type": "pretrained_vit_b16_224_adapter",
        "vpt_type": "shallow", "prompt_token_num": 5}, {"tuned_epoch": 10, "init_lr": 0.05, "batch_size": 16,
        "weight_decay": 0.005, "vpt_type": "deep", "prompt_token_num": 30}),
    "aper_finetune": (ONCE | {"model_name": "aper_finetune", "backbone_type": "pretrained_vit_b16_224", "tuned_epoch":
        6, "batch_size": 128, "weight_decay": 0.05, "vpt_type": "deep", "prompt_token_num": 5}, {"tuned_epoch": 5,
        "batch_size": 144, "weight_decay": 0.005, "prompt_token_num": 30}),
    "aper_ssf": (ONCE | {"model_name": "aper_ssf", "backbone_type": "pretrained_vit_b16_224_ssf", "vpt_type": "deep",
        "prompt_token_num": 5}, {}),
    "aper_vpt_deep": ({"model_name": "aper_vpt", "backbone_type": "pretrained_vit_b16_224_vpt", "tuned_epoch": 20,
        "init_lr": 0.01, "batch_size": 48, "weight_decay": 0.0005, "min_lr": 0, "optimizer": "sgd", "vpt_type":
        "deep", "prompt_token_num": 5}, {"init_lr": 0.05, "batch_size": 24, "ffn_num": 64, "prompt_token_num": 30}),
    "aper_vpt_shallow": ({"model_name": "aper_vpt", "backbone_type": "pretrained_vit_b16_224_vpt", "tuned_epoch": 20,
        "init_lr": 0.01, "batch_size": 48, "weight_decay": 0.0005, "min_lr": 0, "optimizer": "sgd", "vpt_type":
        "shallow", "prompt_token_num": 5}, {"backbone_type": "pretrained_vit_b16_224", "init_lr": 0.03, "batch_size":
        24, "weight_decay": 0.005, "ffn_num": 64, "vpt_type": "deep", "prompt_token_num": 30}),
    "coda_prompt": ({"prefix": " ", "shuffle": False, "model_name": "coda_prompt", "backbone_type":
        "vit_base_patch16_224_coda_prompt", "seed": [0], "tuned_epoch": 20, "init_lr": 0.001, "batch_size": 128,
        "weight_decay": 0, "min_lr": 1e-05, "optimizer": "adam", "scheduler": "cosine", "reinit_optimizer": True,
        "pretrained": True, "drop": 0.0, "drop_path": 0.0, "prompt_param": [100, 8.0, 0.0]}, {"tuned_epoch": 50}),
    "cofima": (ALIGNED | {"model_name": "cofima", "fisher_weighting": True, "wt_lambda": 0.4}, {"model_postfix":
        "50e", "epochs": 50, "milestones": [40]}),
    "coil": (EXEMPLARS | {"epochs": 10, "sinkhorn": 0.464, "calibration_term": 1.5, "norm_term": 3.0, "reg_term":
        0.001, "model_name": "coil", "backbone_type": "vit_base_patch16_224", "lrate": 0.001, "milestones": [80, 120],
        "lrate_decay": 0.1, "batch_size": 64, "T": 2}, EXEMPLARS_R | {"epochs": 20}),
    "der": (EXEMPLARS | MILESTONES | {"model_name": "der", "backbone_type": "vit_base_patch16_224", "init_epoch": 10,
        "epochs": 10, "milestones": [80, 120, 150], "batch_size": 32, "T": 2}, EXEMPLARS_R | {"batch_size": 64}),
    "dgr": (EXEMPLARS | {"lambda": 1, "gammar_r": 1, "model_name": "dgr", "backbone_type": "vit_base_patch16_224",
        "init_epoch": 20, "init_lr": 0.001, "init_weight_decay": 0.0005, "epochs": 20, "lrate": 0.001, "batch_size":
        128, "weight_decay": 0.0005, "T": 2}, EXEMPLARS_R | {"init_lr": 0.0005, "lrate": 0.0005, "batch_size": 32}),
    "dualprompt": (PROMPTS | {"model_name": "dualprompt", "backbone_type": "vit_base_patch16_224_dualprompt",
        "init_lr": 0.001, "batch_size": 24, "head_type": "token", "use_g_prompt": True, "g_prompt_length": 5,
        "g_prompt_layer_idx": [0, 1], "use_prefix_tune_for_g_prompt": True, "use_e_prompt": True,
        "e_prompt_layer_idx": [2, 3, 4], "use_prefix_tune_for_e_prompt": True, "top_k": 1, "use_prompt_mask": True,
        "shared_prompt_pool": True, "same_key_value": False}, {"tuned_epoch": 10}),
    "duct": ({"prefix": "", "model_name": "duct", "backbone_type": "vit_base_patch16_224", "merge_scalar": 0.25,
        "head_merge_ratio": 0.25, "lr_re": 0.001, "epc_re": 5, "bcb_lr_scale": 0.01, "epochs": 10, "lrate": 0.1,
        "ot_reg": 0.02, "milestones": [60, 100, 140], "lrate_decay": 0.1, "weight_decay": 0.0005, "batch_size": 128,
        "num_workers": 16}, {}),
    "ease": ({"prefix": " ", "init_cls": 5, "increment": 5, "model_name": "ease", "backbone_type":
        "vit_base_patch16_224_ease", "init_epochs": 20, "init_lr": 0.025, "later_epochs": 20, "later_lr": 0.025,
        "batch_size": 48, "weight_decay": 0.0005, "min_lr": 0, "optimizer": "sgd", "scheduler": "cosine",
        "pretrained": True, "vpt_type": "Deep", "prompt_token_num": 5, "ffn_num": 64, "use_diagonal": False,
        "recalc_sim": True, "alpha": 0.1, "use_init_ptm": False, "beta": 0, "use_old_data": False, "use_reweight":
        True, "moni_adam": False, "adapter_num": -1}, {"init_lr": 0.05, "later_lr": 0.05, "batch_size": 16,
        "weight_decay": 0.005}),
    "fecam": (ONCE | {"prefix": " ", "model_name": "fecam", "backbone_type": "pretrained_vit_b16_224_adapter",
        "vpt_type": "shallow", "prompt_token_num": 5}, {"prefix": "reproduce", "tuned_epoch": 10, "init_lr": 0.05,
        "batch_size": 16, "weight_decay": 0.005, "vpt_type": "deep", "prompt_token_num": 30}),
    "finetune": (MILESTONES | {"model_name": "finetune", "backbone_type": "vit_base_patch16_224", "milestones": [40,
        70], "batch_size": 128}, {}),
    "foster": (EXEMPLARS | {"prefix": "cil", "fixed_memory": True, "model_name": "foster", "backbone_type":
        "vit_base_patch16_224", "beta1": 0.96, "beta2": 0.97, "oofc": "ft", "is_teacher_wa": False, "is_student_wa":
        False, "lambda_okd": 1, "wa_value": 1, "init_epochs": 20, "init_lr": 0.001, "init_weight_decay": 0.0005,
        "boosting_epochs": 20, "compression_epochs": 20, "lr": 0.001, "batch_size": 32, "weight_decay": 0.0005,
        "num_workers": 8, "T": 2}, EXEMPLARS_R | {}),
    "icarl": (EXEMPLARS | MILESTONES | {"model_name": "icarl", "backbone_type": "vit_base_patch16_224", "milestones":
        [80, 120], "batch_size": 128, "T": 2}, EXEMPLARS_R | {"batch_size": 32}),
    "l2p": (PROMPTS | {"model_name": "l2p", "backbone_type": "vit_base_patch16_224_l2p", "init_lr": 0.001875,
        "batch_size": 16, "head_type": "prompt", "top_k": 5, "use_prompt_mask": False, "shared_prompt_pool": False},
        {"tuned_epoch": 10, "batch_size": 32}),
    "lae": ({"prefix": " ", "model_name": "lae", "backbone_type": "vit_base_patch16_224_lae", "tuned_epoch": 5,
        "init_lr": 0.0028125, "batch_size": 128, "weight_decay": 0, "min_lr": 1e-05, "optimizer": "adam", "scheduler":
        "constant", "reinit_optimizer": True, "pretrained": True, "drop": 0.0, "drop_path": 0.0, "ema_decay": 0.9999,
        "num_freeze_epochs": 3, "pet_cls": "Prefix", "pet_length": 10, "down_sample_dim": 5}, {"tuned_epoch": 50,
        "init_lr": 0.00046875, "num_freeze_epochs": 30}),
    "memo": (EXEMPLARS | MILESTONES | {"prefix": "benchmark", "model_name": "memo", "backbone_type":
        "vit_base_patch16_224_memo", "train_base": False, "train_adaptive": False, "debug": False, "skip": False,
        "scheduler": "steplr", "init_epoch": 10, "t_max": None, "milestones": [80, 120, 150], "batch_size": 32,
        "alpha_aux": 1.0}, EXEMPLARS_R | {"epochs": 10}),
    "mos": (ONCE | {"prefix": " ", "init_cls": 5, "increment": 5, "model_name": "mos", "backbone_type":
        "vit_base_patch16_224_mos", "init_lr": 0.03, "scheduler": "cosine", "reinit_optimizer": True,
        "init_milestones": [10], "init_lr_decay": 0.1, "reg": 0.1, "adapter_momentum": 0.1, "ensemble": True,
        "crct_epochs": 30, "ca_lr": 0.005, "ca_storage_efficient_method": "covariance",
        "ca_storage_efficient_method_choices": ["covariance", "multi-centroid", "variance"], "n_centroids": 10,
        "pretrained": True, "drop": 0.0, "drop_path": 0.0, "ffn_num": 16}, {"tuned_epoch": 10, "init_lr": 0.05,
        "batch_size": 16, "weight_decay": 0.005, "M": 1000}),
    "ranpac": (ONCE | {"model_name": "ranpac", "backbone_type": "pretrained_vit_b16_224_adapter", "use_simplecil":
        False, "vpt_type": "shallow", "prompt_token_num": 5, "use_RP": True, "M": 10000}, {"tuned_epoch": 10,
        "init_lr": 0.05, "batch_size": 16, "weight_decay": 0.005, "prompt_token_num": 30}),
    "simplecil": ({"prefix": " ", "model_name": "simplecil", "backbone_type": "pretrained_vit_b16_224", "tuned_epoch":
        0, "init_lr": 0.01, "batch_size": 256, "weight_decay": 0.05, "min_lr": 1e-08, "optimizer": "sgd", "vpt_type":
        "shallow", "prompt_token_num": 3}, {}),
    "slca": (ALIGNED | {"model_name": "slca"}, {"model_postfix": "50e", "epochs": 5, "milestones": [40]}),
}
# fmt: on


def files() -> dict[str, dict]:
    """The keys of each file, by its name without ``.json``."""
    found = {}
    for name, (keys, changes) in SETTINGS.items():
        found[name] = IN_MOST | keys
        found[f"{name}_inr"] = IN_MOST | keys | IMAGENET_R | changes
    return found
