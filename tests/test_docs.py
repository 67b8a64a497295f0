"""Every block of code in docs/ runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
RUNS = {}  # page -> function that runs it


def runs(page):
    return lambda function: RUNS.setdefault(page, function)


def blocks(page):
    """[(language, code)] of a page, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


@runs("any_loop.md")
def run_any_loop(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    tasks = [[(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)] for _ in range(2)]
    names = {"torch": torch, "model": model, "tasks": tasks, "epochs": 4}
    loop, adam, save, load = (code for language, code in blocks("any_loop.md"))
    exec(loop, names)
    assert (names["wsc"].phase, names["wsc"].resets, names["wsc"].averaged) == ("finished", 1, 4)
    exec(adam, names)
    step(names)
    exec(save, names)
    exec(load, names)
    assert names["wsc"].steps == 1
    step(names)
    names["wsc"].finish()
    assert names["wsc"].resets == 1


def step(names):
    names["model"](names["tasks"][0][0][0]).sum().backward()
    names["optimizer"].step()


@runs("pycil.md")
def run_pycil(tmp_path):
    (json_block, config), (console, commands) = blocks("pycil.md")
    assert (json_block, console) == ("json", "console")
    json.loads(config)
    (tmp_path / "wsc.json").write_text(config)
    (tmp_path / "PyCIL").symlink_to(ROOT / "tests" / "pycil_standin")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in re.findall(r"^\$ python (.*)$", commands, re.MULTILINE):
        run = subprocess.run(
            [sys.executable, *command.split()],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("top1") == 3


@runs("own_learners.md")
def run_own_learners(tmp_path):
    (_, config), (_, commands) = blocks("own_learners.md")
    (tmp_path / "on_top.json").write_text(config)
    (command,) = re.findall(r"^\$ python main.py (.*)$", commands, re.MULTILINE)
    run = subprocess.run(
        [sys.executable, ROOT / "main.py", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"^icarl  .*\d\n(.*\n)*icarl\+wsc .*\d$", run.stdout, re.MULTILINE)


@runs("language_models.md")
def run_language_models(tmp_path):
    """Their data and models are not here: the commands ask for runs that there can be."""
    from pycil_wsc.config.loading import load, parse_override
    from pycil_wsc.runs.command import parse

    ((_, commands),) = blocks("language_models.md")
    arguments = re.findall(r"main\.py (.*)$", commands, re.MULTILINE)
    assert len(arguments) == 5
    for each in arguments:
        args = parse(each.split())
        assert load(ROOT / args.config, dict(map(parse_override, args.set)))


@runs("results.md")
def run_results(tmp_path):
    """Hours: their files load."""
    from pycil_wsc.config.loading import load, parse_override

    commands = "".join(code for _, code in blocks("results.md"))
    found = re.findall(r"^python main\.py --config (\S+)(?: --set (\S+))?$", commands, re.MULTILINE)
    assert len(found) == len(commands.splitlines()) >= 3
    for file, override in found:
        assert load(ROOT / file, dict(map(parse_override, [override] if override else [])))


@runs("speed.md")
def run_speed(tmp_path):
    """Minutes each, some on a GPU: their options are there."""
    commands = re.findall(r"python (benchmarks/\w+\.py)([^`\n]*)", (ROOT / "docs" / "speed.md").read_text())
    for script in {script for script, _ in commands}:
        told = subprocess.run(
            [sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for option in {
            option for other, options in commands if other == script for option in re.findall(r"--[\w-]+", options)
        }:
            assert option in told, (script, option)


@runs("huggingface.md")
def run_huggingface(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    rows = torch.randint(13, (2, 16, 8))
    names = {
        "model": transformers.GPT2LMHeadModel(config),
        "tasks": [[{"input_ids": row, "labels": row} for row in task] for task in rows],
    }
    train, resume = (code for language, code in blocks("huggingface.md"))
    exec(train, names)
    assert (tmp_path / "runs/task1/model.safetensors").is_file()
    exec(resume, names)
    assert names["trainer"].state.global_step == 6


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RUNS[page](tmp_path)
