"""timm's models as backbones, by timm's names: ``timm:efficientnet_lite0``. Needs ``pip install timm``."""

import contextlib
import copy
import functools
import logging
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pycil_wsc.errors import UnusableRun, UserError, did_you_mean
from pycil_wsc.files import check_file
from pycil_wsc.state import refuse_compressed

PREFIX = "timm:"
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # keys under which training scripts save weights

NOT_OPTIONS = {  # arguments of timm.create_model, and why they cannot be in convnet_options
    "num_classes": "the learner has its own classifier",
    "pretrained": "it is a key of its own, beside convnet_options",
    "features_only": "a backbone gives one vector of features for each image",
    "in_chans": "images have three channels",
    "checkpoint_path": "weights are read from the file that pretrained names",  # timm may run code in this one
    "pretrained_cfg": "timm's own is used",  # may name files, too, as may the next
    "pretrained_cfg_overlay": "timm's own is used",
    "cache_dir": "timm's own is used",
}


def is_timm(convnet_type: str) -> bool:
    return convnet_type.startswith(PREFIX)


def is_transformer(convnet_type: str) -> bool:
    """Whether this is a vision transformer, by its name."""
    return convnet_type.startswith(f"{PREFIX}vit_")


def check_name(convnet_type: str) -> None:
    """Raise :class:`UserError` unless timm is installed and has the model."""
    timm, name = _timm(), convnet_type.removeprefix(PREFIX)
    if not timm.is_model(name):
        raise UserError(f"convnet_type: timm {timm.__version__} has no model '{name}'{_near(name, timm)}")
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise UserError(f"convnet_type: timm {timm.__version__}: {error}") from None


def check_options(options: Mapping[str, object]) -> None:
    """Raise :class:`UserError` if ``convnet_options`` has an argument of timm's that is not an option."""
    for name in options:
        if name in NOT_OPTIONS:
            raise UserError(f"convnet_options.{name}: cannot be set, since {NOT_OPTIONS[name]}; leave it out")


@functools.cache
def data_config(convnet_type: str) -> dict[str, Any]:
    """``image_size``, ``mean``, ``std`` and ``interpolation`` that the model's weights were trained with."""
    check_name(convnet_type)
    from timm.data import resolve_data_config

    card = _timm().get_pretrained_cfg(convnet_type.removeprefix(PREFIX))
    data_config = resolve_data_config({"in_chans": 3}, pretrained_cfg=card.to_dict() if card else None)
    return {
        "image_size": data_config["input_size"][-1],
        "mean": tuple(data_config["mean"]),
        "std": tuple(data_config["std"]),
        "interpolation": data_config["interpolation"],
    }


def timm_backbone(
    convnet_type: str,
    options: Mapping[str, object],
    pretrained: bool | str = False,
    image_size: int | None = None,
    grad_checkpointing: bool = False,
) -> nn.Module:
    """The model without its classifier: (B, 3, H, W) normalised images -> (B, ``out_dim``) features.

    Args:
        convnet_type: ``timm:`` and the model's name.
        options: keyword arguments of ``timm.create_model``, without those in ``NOT_OPTIONS``.
        pretrained: False for random weights, True to download timm's, or a file of weights under timm's names, saved as
            ``.safetensors`` or by ``torch.save``, with or without a classifier.
        image_size: side of the images; models with position embeddings are built for it.
        grad_checkpointing: recompute activations in the backward pass instead of keeping them.

    Raises:
        UserError: timm, the model or the weights are missing or do not fit.
    """
    check_name(convnet_type)
    check_options(options)
    timm, name = _timm(), convnet_type.removeprefix(PREFIX)
    arguments = {"num_classes": 0, "pretrained": bool(pretrained), **options}
    card = timm.get_pretrained_cfg(name)
    if card and card.fixed_input_size and image_size not in (None, card.input_size[-1]):
        arguments.setdefault("img_size", image_size)
    weights = read_weights(pretrained) if isinstance(pretrained, str) else {}
    if weights:
        arguments["pretrained_cfg_overlay"] = {"state_dict": dict(weights), "custom_load": False}
    if pretrained is True:
        logging.getLogger("pycil_wsc").warning(f"pretrained: timm downloads the weights of '{name}' if it has none yet")
    try:
        with _short_log() if weights else contextlib.nullcontext():
            model = timm.create_model(name, **arguments)
        if grad_checkpointing:
            model.set_grad_checkpointing(True)
            _collect_once(model)
        model.out_dim = getattr(model, "head_hidden_size", model.num_features)
        if is_transformer(convnet_type) and isinstance(model, timm.models.VisionTransformer):
            model.split = functools.partial(split_transformer, model)
    except Exception as error:  # timm raises what its models raise: TypeError, RuntimeError, AssertionError, ...
        # a download may fail in the middle of a sweep, whose other runs need not stop
        raise (UnusableRun if pretrained is True else UserError)(_problem(name, pretrained, error)) from None
    if weights and (missing := [weight for weight in _trained(model) if weight not in weights]):
        raise UserError(f"pretrained: {pretrained} has no '{missing[0]}', which timm's '{name}' needs; {_FITTING}")
    return model


def split_transformer(vit: Any) -> tuple[nn.Module, nn.Module]:
    """(all blocks but the last, the last block and the norms after it) of ``vit``, which shares its weights."""
    return FirstBlocks(vit), LastBlock(vit)


class FirstBlocks(nn.Module):
    """(B, 3, H, W) images -> (B, n, d) tokens before the last block of ``vit``."""

    def __init__(self, vit: Any):
        super().__init__()
        self.vit = copy.copy(vit)
        self.vit._modules = {
            name: part for name, part in vit._modules.items() if name not in ("norm", "fc_norm", "head")
        }
        self.vit.blocks = vit.blocks[:-1]
        self.vit.__dict__.pop("split", None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        vit = self.vit
        return vit.blocks(vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images)))))


class LastBlock(nn.Module):
    """(B, n, d) tokens -> (B, d) features: the last block of ``vit``, its norms and its pooling."""

    def __init__(self, vit: Any):
        super().__init__()
        self.block, self.norm, self.fc_norm = vit.blocks[-1], vit.norm, vit.fc_norm
        self.pool_type, self.prefix = vit.global_pool, vit.num_prefix_tokens

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from timm.layers import global_pool_nlc

        tokens = self.norm(self.block(tokens))
        return self.fc_norm(global_pool_nlc(tokens, pool_type=self.pool_type, num_prefix_tokens=self.prefix))


@contextlib.contextmanager
def _short_log() -> Iterator[None]:
    """A context in which timm does not list all names in which a file and a model differ: the error names one."""
    log = logging.getLogger("timm.models._builder")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _collect_once(model: nn.Module) -> None:
    """Let batch norms leave their statistics as they are when activations are recomputed in the backward pass."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.register_forward_pre_hook(_remember)
            module.register_forward_hook(_restore, always_call=True)  # recomputing ends by an exception


def _remember(module: Any, _: object) -> None:
    if torch._C._current_graph_task_id() != -1:  # recomputing, as torch.utils.checkpoint asks
        module.before = [buffer.clone() for buffer in module.buffers()]


def _restore(module: Any, *_: object) -> None:
    for buffer, before in zip(module.buffers(), vars(module).pop("before", ())):
        buffer.copy_(before)


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a ``.safetensors`` file, or of one by ``torch.save``, loaded with ``weights_only=True``."""
    try:
        size = check_file(path).st_size
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file  # comes with timm

            state = load_file(path)
        else:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    refuse_compressed(archive, size)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(
            f"pretrained: {path} cannot be read ({error.strerror or error}); give true, or a file"
        ) from None
    except pickle.UnpicklingError:
        raise UserError(
            f"pretrained: {path} holds Python objects, which are not loaded; save its tensors: "
            "torch.save(model.state_dict(), path)"
        ) from None
    except Exception as error:  # its type depends on the format
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"pretrained: {path} is not a file of weights ({reason}); {_FITTING}") from None
    state = next((state[key] for key in CONTAINERS if isinstance(state, dict) and key in state), state)
    if not isinstance(state, dict) or not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"pretrained: {path} holds no tensors by name; {_FITTING}")
    return {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in state.items()}


def layer_groups(model: Any) -> list[list[nn.Parameter]]:
    """The parameters by layer, from the input on, grouped as for timm's layer decay."""
    from timm.models import group_parameters

    layers: Any = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(layers[name], []).append(parameter)
    return [groups[layer] for layer in sorted(groups)]


_FITTING = "give a .safetensors or .pth file with timm's names, or true for timm's own weights"


def _timm() -> ModuleType:
    try:
        import timm
    except ImportError:
        raise UserError("convnet_type: timm is not installed; pip install timm safetensors") from None
    return timm


def _near(name, timm):
    import difflib

    near = difflib.get_close_matches(name, timm.list_models(), n=1)
    return did_you_mean(name, near) if near else "; timm.list_models() has its names"


def _trained(model):
    """The names of the tensors that training changes: parameters and batch-norm statistics."""
    names = [name for name, _ in model.named_parameters()]
    return names + [name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))]


def _problem(name, pretrained, error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = lines[min(1, len(lines) - 1)]  # the first line only says that the state does not fit
    if isinstance(pretrained, str) and "size mismatch" in str(error):
        return f"pretrained: {pretrained} is of another model than timm's '{name}' ({reason})"
    if pretrained is True and not isinstance(error, TypeError):
        return f"pretrained: no weights for timm's '{name}' ({reason}); connect to the internet, or give a file"
    return f"convnet_type: timm cannot create '{name}' ({lines[0]}); correct convnet_options, or choose another model"
