import os
import sys
from pathlib import Path

import pytest
import torch
from small_runs import small_data

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a hub, and none waits for one
sys.path.insert(0, str(Path(__file__).parent.parent))
from small_llm import small_settings  # noqa: E402

torch.set_num_threads(1)  # the networks are tiny: more threads only wait for each other


@pytest.fixture
def settings(tmp_path):
    """Three tasks of two classes, a schedule of seconds."""
    return {
        "dataset": f"npz:{small_data(tmp_path / 'data.npz')}", "out": str(tmp_path / "runs"), "memory_per_class": 4, "init_cls": 2, "increment": 2,
        "model_name": "wsc", "convnet_type": "resnet8", "device": "cpu", "init_epoch": 3, "epochs": 4, "batch_size": 8, "wsc.average_every": 1,
    }  # fmt: skip


@pytest.fixture
def llm_settings(tmp_path):
    """Two tasks for a language model, a schedule of a second."""
    return small_settings(tmp_path)
