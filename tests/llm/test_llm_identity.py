"""Which runs of language models are the same run: in a sweep, and when a stopped one resumes."""

import json

import pytest

pytest.importorskip("transformers")

import torch
from support.small_llm import configured
from support.small_runs import killed_at, write
from support.tokens import word_tokenizer

from main import main
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.errors import TrainingDiverged, UnusableRun, UserError
from pycil_wsc.llm.config import CHECKPOINT, KEYS, METHODS, resolve
from pycil_wsc.llm.tokens import encode, encode_prompts, raw_frame
from pycil_wsc.llm.trainer import LanguageRun

pytestmark = pytest.mark.usefixtures("unreported")
OTHER = {"llm.task_arithmetic_scale": 2.0, "llm.magmax_scale": 2.0}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OTHER)
def test_a_key_that_the_method_does_not_read_makes_no_other_run(name, method):
    usual, other = (resolve({"llm.method": method} | more) for more in ({}, {name: OTHER[name]}))
    assert (run_folder(usual) == run_folder(other)) == (usual.identity() == other.identity())
    assert (usual.identity() == other.identity()) == (method not in KEYS[name].read_by)


def test_a_sweep_over_one_methods_key_has_the_others_once(llm_settings, tmp_path, capsys):
    keys = {"llm.method": ["replay", "magmax"], "llm.magmax_scale": [0.3, 0.5]}
    assert main(["--config", write(tmp_path, llm_settings | keys), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 runs, ")


def test_a_key_added_since_the_checkpoint_has_its_earlier_value(llm_settings):
    config, corpus = configured(llm_settings)
    whole = LanguageRun(config, corpus).execute()
    (run_folder(config) / "result.json").unlink()
    with killed_at(1, LanguageRun):
        LanguageRun(config, corpus).execute()
    _rewritten(run_folder(config) / CHECKPOINT, lambda state: state["identity"].pop("llm.eps"))
    assert LanguageRun(config, corpus).execute()["scores"] == whole["scores"]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda state: state["identity"].update({"llm.eps": 1e-6}), "was made with other settings"),
        (lambda state: state.pop("counts"), "is not a checkpoint of this version"),
    ],
)
def test_a_checkpoint_of_something_else_is_one_line(change, reason, llm_settings):
    config, corpus = configured(llm_settings)
    with killed_at(1, LanguageRun):
        LanguageRun(config, corpus).execute()
    _rewritten(run_folder(config) / CHECKPOINT, change)
    with pytest.raises(UnusableRun, match=reason):
        LanguageRun(config, corpus).execute()


def _rewritten(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_weights_that_only_the_last_step_spoils_are_noticed(llm_settings, monkeypatch):
    """The loss of the last step is computed before its update."""
    config, corpus = configured(llm_settings)
    run, end = LanguageRun(config, corpus), LanguageRun.on_step_end

    def spoil(self, args, state, control, model=None, **others):
        if self.steps[state.global_step - 1].ends_task:
            with torch.no_grad():
                next(model.parameters()).view(-1)[3] = torch.inf
        end(self, args, state, control, model=model, **others)

    monkeypatch.setattr(LanguageRun, "on_step_end", spoil)
    with pytest.raises(TrainingDiverged, match="the weights are no longer finite numbers after task 1"):
        run.execute()
    assert not (run_folder(config) / "result.json").exists()


def test_a_clip_of_zero_is_refused():
    with pytest.raises(UserError, match="llm.clip: 0.0 is not above 0"):
        resolve({"llm.clip": 0})


def test_what_leaves_no_room_is_one_line():
    tokenizer = word_tokenizer()
    with pytest.raises(UserError, match="llm.max_answer: 1 is too short"):
        encode(tokenizer, [("what", "it")], 9, 1, raw_frame(tokenizer))
    without = word_tokenizer(bos_token=None)
    with pytest.raises(UserError, match="llm.data: a prompt is empty"):
        encode_prompts(without, ["what", ""], 9, raw_frame(without))
    assert encode_prompts(tokenizer, [""], 9, raw_frame(tokenizer)) == [[tokenizer.bos_token_id]]
