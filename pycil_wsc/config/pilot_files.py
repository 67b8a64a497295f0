"""Translates PILOT's JSON files, which have ``backbone_type``: keys and constants of its code become keys of ours.

What the files share with PyCIL's is left to :mod:`pycil_wsc.config.pycil_files`, which comes afterwards.
"""

import re
from collections.abc import Mapping

from pycil_wsc.errors import UserError, did_you_mean, shown
from pycil_wsc.files import Json

MARK = "backbone_type"  # the key by which a file is PILOT's
TAGS = {  # names of timm 0.6.12 -> the same weights in timm of today, whose default tag is another one
    "vit_base_patch16_224": "timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit_base_patch16_224_in21k": "timm:vit_base_patch16_224.augreg_in21k",
}
# PILOT copies the transformer for each way of tuning it; here the method tunes timm's own
COPIES = ("adapter", "ssf", "vpt", "l2p", "dualprompt", "coda_prompt", "ease", "lae", "mos", "memo")
TUNED_ONCE = ("aper_adapter", "aper_finetune", "aper_ssf", "aper_vpt", "ranpac", "fecam", "simplecil")  # in task 1
TUNED_BY_NAME = ("ranpac", "fecam")  # what they tune stands in `backbone_type`
PROMPTED = ("l2p", "dualprompt", "coda_prompt", "lae", "mos")  # one schedule for all tasks, under the first one's names
TUNED_ALIKE = ("coil", "slca", "slca_cofima", "duct")  # the same, under the names of later tasks
OF_TUNED_ONCE = {"tuned_epoch": "init_epoch", "weight_decay": "init_weight_decay"}
ALIASES = {
    **dict.fromkeys((*TUNED_ONCE, *PROMPTED), OF_TUNED_ONCE),
    "ranpac": {**OF_TUNED_ONCE, "M": "projection"},
    "ease": {
        "init_epochs": "init_epoch",
        "later_epochs": "epochs",
        "later_lr": "lrate",
        "weight_decay": "init_weight_decay",
    },
    "dgr": {"lambda": "lamda"},
    "slca": {"bcb_lrscale": "backbone_lr_factor"},
    "slca_cofima": {"bcb_lrscale": "backbone_lr_factor", "wt_lambda": "new_weight"},
    "duct": {"bcb_lr_scale": "backbone_lr_factor", "epc_init": "init_epoch"},
}
IN_ALL_TASKS = {  # keys of the first task that have a value of one schedule for all, and those of later tasks
    "init_epoch": "epochs",
    "init_lr": "lrate",
    "init_weight_decay": "weight_decay",
    "init_milestones": "milestones",
    "init_lr_decay": "lrate_decay",
}
CONSTANTS: dict[str, dict[str, Json]] = {  # of PILOT's code, where its file has no key
    "simplecil": {"adapt": False, "batch_size": 128},
    "coil": {"weight_decay": 5e-4},
    "der": {"align_head": False},
    "memo": {"align_head": False, "pretrained_block": False},
    "dgr": {"scheduler": "cosine"},
    "coda_prompt": {"crop_scale": 0.08, "test_interpolation": "bilinear"},
    **{name: {"scheduler": "cosine"} for name in TUNED_ONCE if name != "simplecil"},
    "ranpac": {"scheduler": "cosine", "scores": "cosine"},
    "fecam": {"scheduler": "cosine", "beta": 1.0, "correlations": "covariances"},
}
UNREAD = {  # carried in the file of a method whose code does not read them
    "aper_adapter": ("vpt_type", "prompt_token_num"),
    "ranpac": ("use_simplecil",),
    **dict.fromkeys(("aper_finetune", "aper_ssf"), ("ffn_num", "vpt_type", "prompt_token_num")),
    "aper_vpt": ("ffn_num",),
    "simplecil": ("tuned_epoch", "init_lr", "weight_decay", "min_lr", "optimizer", "vpt_type", "prompt_token_num"),
    **dict.fromkeys(("slca", "slca_cofima"), ("model_postfix", "save_before_ca")),
    "duct": ("milestones", "lrate_decay"),
    "der": ("T",),
    "ease": ("vpt_type", "prompt_token_num", "adapter_num"),
    "mos": ("ca_storage_efficient_method_choices", "M", "drop", "drop_path", "reinit_optimizer"),
    "lae": ("drop", "drop_path", "reinit_optimizer"),
    **dict.fromkeys(("l2p", "dualprompt"), ("initializer", "reinit_optimizer")),  # each task has a new optimiser here
    "coda_prompt": ("reinit_optimizer", "drop", "drop_path"),
}
OF_POOLS: dict[str, Json] = {  # the only values with which PILOT's code runs, or does what its method is
    "get_original_backbone": True,
    "prompt_pool": True,
    "prompt_key": True,
    "predefined_key": "",
    "global_pool": "token",
    "drop": 0,
    "drop_path": 0,
}
ONLY: dict[str, dict[str, Json]] = {
    "l2p": OF_POOLS,
    "dualprompt": {
        **OF_POOLS,
        "head_type": "token",
        "use_g_prompt": True,
        "use_prefix_tune_for_g_prompt": True,
        "use_e_prompt": True,
        "use_prefix_tune_for_e_prompt": True,
        "same_key_value": False,
    },
}
NAMES = {  # PILOT's names of methods that have others here
    "aper_aperpter": "aper_adapter",  # misspelt in its own file
    "cofima": "slca_cofima",  # `cofima` here averages Replay's weights
}
EVERYWHERE = ("print_forget",)
REFUSED = {  # a value of a key -> why a file with it is not run
    ("ease", "use_old_data"): (
        True,
        "prototypes from all old images are an oracle's, and are not built in; give false",
    ),
    ("ease", "moni_adam"): (True, "imitates APER; use model_name aper_adapter"),
    ("ranpac", "use_RP"): (False, "without the projection, PILOT's code has no classifier; leave the key out"),
}


def is_pilots(file: Mapping[str, Json]) -> bool:
    """Whether a file is one of PILOT's."""
    return MARK in file


def overridden(file: Mapping[str, Json], overrides: Mapping[str, Json]) -> dict[str, Json]:
    """The file with the overrides, which may have PILOT's names or ours, of which a file has others."""
    replaced = {their_name for their_name, our_name in ALIASES.get(_method(file), {}).items() if our_name in overrides}
    kept = {name: value for name, value in file.items() if name not in replaced}
    return {**kept, **overrides}


def our_names(file: Mapping[str, Json]) -> dict[str, Json]:
    """The keys of one of PILOT's files by our names. Raises a :class:`UserError` for one that cannot be run."""
    method = _method(file)
    translated = {name: value for name, value in file.items() if name not in (*UNREAD.get(method, ()), *EVERYWHERE)}
    translated["model_name"] = method
    _drop_fixed(translated, method)
    backbone_type = translated.pop(MARK)
    if method in TUNED_BY_NAME:
        suffix = str(backbone_type).lower().rpartition("_")[2]
        translated["tuning"] = suffix if suffix in ("adapter", "ssf", "vpt") else None
        translated.setdefault("adapt", True)
    if "convnet_type" not in translated:
        translated["convnet_type"] = backbone(backbone_type, method)
    translated.setdefault("pretrained", True)  # PILOT's code has no other way
    if not str(translated.get("prefix", "")).strip():
        translated.pop("prefix", None)
    translated = CONSTANTS.get(method, {}) | _renamed(translated, ALIASES.get(method, {}))
    translated = _schedule(translated, method)
    if method == "coda_prompt" and translated.get("dataset") == "cifar224":
        translated.setdefault("crop_pct", 1.0)
    return translated


def _drop_fixed(translated: dict[str, Json], method: str) -> None:
    """Drop what cannot be otherwise here. Raises a :class:`UserError` if a file wants it otherwise."""
    for name, value in ONLY.get(method, {}).items():
        if translated.pop(name, value) != value:
            raise UserError(f"{name}: only {shown(value)} is run here; leave the key out")
    for owner, name in REFUSED:
        if owner == method and name in translated:
            refused, why = REFUSED[owner, name]
            if translated.pop(name) == refused:
                raise UserError(f"{name}: {why}")


def _method(file: Mapping[str, Json]) -> str:
    name = str(file.get("model_name")).lower()
    return NAMES.get(name, name)


def _schedule(file: Mapping[str, Json], method: str) -> dict[str, Json]:
    """``file`` with the schedules of the first task and of later ones, and with our names for them."""
    translated = dict(file)
    for first, later in IN_ALL_TASKS.items():
        given, other = (later, first) if method in TUNED_ALIKE else (first, later)
        if method not in (*TUNED_ALIKE, *PROMPTED, "ease") or given not in translated or other in translated:
            continue
        if isinstance(translated[given], list) and not given.endswith("milestones"):
            raise UserError(f"{given}: is one value for all tasks in PILOT's file of {method}; give several in 'runs'")
        translated[other] = translated[given]
    if method in TUNED_ONCE and translated.get("optimizer") == "adam":  # so it is in their code
        translated["optimizer"] = "adamw"
    if translated.get("scheduler") == "constant":
        translated |= {"scheduler": "steplr", "init_milestones": [], "milestones": []}
    for milestones, epochs in (("init_milestones", "init_epoch"), ("milestones", "epochs")):
        given = translated.get(milestones)
        end = translated.get(epochs)
        if isinstance(given, list) and type(end) is int:  # some are beyond the end, where they have no effect
            translated[milestones] = [epoch for epoch in given if type(epoch) is not int or epoch < end]
    return translated


def backbone(name: Json, method: str) -> str:
    """``convnet_type`` for a ``backbone_type``; timm's own names and those of residual networks stay as they are."""
    text = str(name)
    if method == "aper_vpt" and not text.endswith("_vpt"):
        raise UserError(
            f"{MARK}: '{shown(text)}' has no prompts, and PILOT's aper_vpt refuses it, too; "
            "give pretrained_vit_b16_224_vpt, and check vpt_type"
        )
    if text.startswith("timm:") or "resnet" in text:
        return text
    short = re.sub(f"_({'|'.join(COPIES)})$", "", text.lower())
    short = short.replace("pretrained_vit_b16_224", "vit_base_patch16_224")
    if short not in TAGS:
        near = did_you_mean(short, TAGS)
        raise UserError(f"{MARK}: '{shown(text)}' is not one of PILOT's transformers{near}; or give timm:NAME")
    return TAGS[short]


def _renamed(file: Mapping[str, Json], aliases: Mapping[str, str]) -> dict[str, Json]:
    """``file`` with the names of ``aliases`` replaced. Raises a :class:`UserError` for a key under both names."""
    for their_name, our_name in aliases.items():
        if their_name in file and our_name in file:
            raise UserError(
                f"{their_name}: is PILOT's name of {our_name}, which is given, too; leave one of the two out"
            )
    return {aliases.get(name, name): value for name, value in file.items()}


def refuse_alias(name: str) -> None:
    """Raise a :class:`UserError` for a name that is accepted in PILOT's files only."""
    replacements = {aliases[name] for aliases in ALIASES.values() if name in aliases}
    if name == MARK:
        replacements = {"convnet_type"}
    if replacements:
        raise UserError(
            f"{name}: is accepted in PILOT's files only, which have {MARK}; use {' or '.join(sorted(replacements))}"
        )
