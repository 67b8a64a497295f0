"""Steps, consolidation, merging and generation, each against a slow version of its own."""

import json
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.small_llm import configured, flat, watched
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from pycil_wsc.consolidation import Average, Blend, Revert
from pycil_wsc.consolidation.model_merging import slerp
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.llm.corpus import Epoch, Step
from pycil_wsc.llm.generation import answers, stops_alone
from pycil_wsc.llm.model import load_model
from pycil_wsc.llm.trainer import LanguageRun
from pycil_wsc.llm.training import TaskTrainer, consolidation, training_arguments
from pycil_wsc.training.processes import Processes

CPU = torch.device("cpu")


def trained_on(examples, settings, **changes):
    """A trainer after one step on these examples, and the loss of the step."""
    config, corpus = configured(settings, **changes)
    model, losses = load_model(config, corpus.tokenizer), []
    steps = [Step(0, Epoch(0, 1, False, examples), 1, 1, examples, ends_task=True)]
    arguments = training_arguments(config, 1, CPU, Processes())
    trainer = TaskTrainer(config, model, corpus.tokenizer.pad_token_id, steps, arguments, Processes(), [])
    step = trainer.training_step
    trainer.training_step = lambda *inputs: losses.append(step(*inputs)) or losses[-1]
    trainer.train()
    return trainer, losses[0].item()


def examples_of(settings):
    """Some with short answers, and some with long ones."""
    examples = list(configured(settings)[1].encoded.values())
    return [*examples[:3], *examples[-3:]]


def test_dropout_is_seeded_by_the_step(llm_settings, tmp_path):
    """Whatever other random numbers were drawn before."""
    config = transformers.LlamaConfig(**LLAMA, attention_dropout=0.5)
    settings = saved(config, llm_settings, tmp_path / "model")
    losses = []
    for number in range(2):
        torch.manual_seed(number)
        losses.append(trained_on(examples_of(settings), settings)[1])
    assert losses[0] == losses[1] != trained_on(examples_of(settings), settings, seed=9)[1]


@pytest.mark.parametrize("tokens", [1, 100, 10000])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_step_is_adamws_on_the_mean_however_it_is_split(tokens, attention, llm_settings):
    changes = {"llm__micro_tokens": tokens, "llm__clip": 0.1}
    examples = examples_of(llm_settings)
    trainer, computed = trained_on(examples, llm_settings, llm__attn_implementation=attention, **changes)
    assert trainer.model.config._attn_implementation == attention
    config, corpus = configured(llm_settings)
    model, each = load_model(config, corpus.tokenizer), []
    for example in examples:
        ids = torch.tensor([example.ids])
        each.append(
            cross_entropy(model(ids).logits[0, example.prompt - 1 : -1], ids[0, example.prompt :], reduction="none")
        )
    expected = torch.stack([one.mean() for one in each]).mean()
    expected.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0).step()
    assert computed == pytest.approx(expected.item(), rel=1e-5)
    # AdamW's first step is lr * sign of the gradient: where that is all but 0, rounding decides
    assert ((flat(trainer.model) - flat(model)).abs() > 1e-5).sum() <= 2
    assert trainer.counts["steps"] == 1
    assert trainer.counts["answers"] == sum(map(len, each)) and trainer.counts["tokens"] == sum(map(len, examples))


def test_without_clipping_gradients_keep_their_norm(llm_settings):
    examples = examples_of(llm_settings)
    unclipped, loose, tight = (
        flat(trained_on(examples, llm_settings, llm__clip=c)[0].model) for c in (None, 1e9, 1e-9)
    )
    assert torch.equal(unclipped, loose) and not torch.equal(unclipped, tight)


@pytest.mark.slow
def test_padding_is_below_a_tenth_or_what_is_asked(llm_settings):
    usual, none = (
        watched(llm_settings, llm__padding=share, llm__micro_tokens=100).trainer.counts for share in (0.1, 0)
    )
    assert 0 < usual["padding"] < 0.1 * usual["tokens"] and none["padding"] == 0
    assert none["tokens"] == usual["tokens"]


def saved(config, settings, folder):
    """``settings`` with a model of this transformers configuration and random weights, saved in ``folder``."""
    _, corpus = configured(settings)
    config.vocab_size, config.pad_token_id = len(corpus.tokenizer), corpus.tokenizer.pad_token_id
    config.bos_token_id, config.eos_token_id = corpus.tokenizer.bos_token_id, corpus.tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    corpus.tokenizer.save_pretrained(folder)
    return settings | {"llm.model": str(folder)}


SMALL = dict(hidden_size=16, num_attention_heads=2)
OPT = dict(SMALL, ffn_dim=16, num_hidden_layers=1, word_embed_proj_dim=16)
LLAMA = dict(SMALL, intermediate_size=16, num_hidden_layers=2)


def with_positions(name, count):
    """A configuration of a model for ``count`` positions."""
    return {
        "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=count),
        "opt": lambda: transformers.OPTConfig(**OPT, max_position_embeddings=count),
        "gpt_neo": lambda: transformers.GPTNeoConfig(
            hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], max_position_embeddings=count
        ),
        "llama": lambda: transformers.LlamaConfig(**LLAMA, max_position_embeddings=count),
    }[name]()


def longest_of(settings):
    """The tokens of the longest item that is trained, and of the longest test prompt."""
    config, corpus = configured(settings)
    examples = [example for index in range(2) for epoch in corpus.epochs(config, index) for example in epoch.examples]
    return max(map(len, examples)), max(len(prompt) for prompts in corpus.test_prompts for prompt in prompts)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neo"])
@pytest.mark.parametrize("new", [1, 6])
def test_a_model_with_too_few_positions_is_refused_before_training_and_one_with_just_enough_is_not(
    name, new, llm_settings, tmp_path
):
    short = llm_settings | {"llm.epochs": [1, 1], "llm.pool": None, "llm.max_new_tokens": new}
    short |= {"llm.attn_implementation": "eager"}  # GPT-Neo has no other
    item, prompt = longest_of(short)
    needed = max(item, prompt + new - 1)  # the last new token is not read
    assert (needed == item) == (new == 1)
    few, enough = (saved(with_positions(name, needed - less), short, tmp_path / f"less-{less}") for less in (1, 0))
    run = LanguageRun(*configured(few))
    with pytest.raises(UnusableRun, match=f"llm.model: has {needed - 1} positions") as error:
        run.execute()
    assert "\n" not in str(error.value) and not (run.folder / "config.json").exists()
    long = partial(transformers.GenerationConfig, min_new_tokens=new)
    with patch("pycil_wsc.llm.generation.GenerationConfig", long):  # answers are as long as allowed
        assert len(LanguageRun(*configured(enough)).execute()["tasks"]) == 2
        with patch("pycil_wsc.llm.trainer.positions", lambda model: None), pytest.raises(IndexError):
            run.execute()


def test_a_rotary_model_is_not_limited_to_the_positions_of_its_configuration(llm_settings, tmp_path):
    settings = saved(with_positions("llama", 8), llm_settings | {"llm.epochs": [1, 1]}, tmp_path / "model")
    assert len(LanguageRun(*configured(settings)).execute()["tasks"]) == 2 and min(longest_of(settings)) > 8


@pytest.mark.parametrize("name", ["flash_attention_2", "flsh"])
def test_attention_that_is_not_installed_is_one_clear_line(name, llm_settings):
    config, corpus = configured(llm_settings, llm__attn_implementation=name)
    with pytest.raises(UserError, match="llm.attn_implementation that is installed") as error:
        load_model(config, corpus.tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("covers, retain", [("replay", 0.2), ("all", 0.5)])
def test_wsc_is_the_papers_at_the_right_steps(covers, retain, llm_settings):
    """Against the same steps with each operation done by hand: the second task's replay epoch, or all of its epochs."""
    changes = {
        "wsc.covers": covers,
        "wsc.retain": retain,
        "wsc.average_every": 2,
        "llm.replay_epochs": 5,
    }
    whole = watched(llm_settings | changes, llm__method="wsc")
    by_hand = ByHand(covers, retain)
    plain = watched_by(by_hand, llm_settings | changes, llm__method="replay")
    first = sum(step.task == 0 for step in whole.steps)
    assert torch.equal(whole.weights[first], plain.weights[first]), "the first task is Replay's"
    assert by_hand.step == by_hand.total and len(by_hand.samples) > 2
    difference = (torch.stack(by_hand.samples).mean(0) - whole.last).abs()
    assert difference.max() < 1e-5


class ByHand(transformers.TrainerCallback):
    """The paper's operations on the second task."""

    def __init__(self, covers, retain):
        self.covers, self.retain = covers, retain
        self.step, self.samples = 0, []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **others):
        self.covered = [s.task == 1 and (s.epoch.replay or self.covers == "all") for s in self.run.steps]
        self.begin = next(number for number, step in enumerate(self.run.steps) if step.task == 1)
        self.total, self.optimizer = sum(self.covered), optimizer
        self.warmup = int(0.25 * self.total)
        assert self.warmup >= 2 and self.total > self.warmup + 4

    def on_step_begin(self, args, state, control, model=None, **others):
        if state.global_step == self.begin:
            self.previous = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def on_optimizer_step(self, args, state, control, model=None, **others):
        if not self.covered[state.global_step]:
            return
        self.step += 1
        if self.step == self.warmup:
            reset(dict(model.named_parameters()), self.previous, self._scores(model), self.retain)
        late = self.step == self.total and (self.step - self.warmup) % 2
        if self.step >= self.warmup and (self.step - self.warmup) % 2 == 0 or late:
            self.samples.append(flat(model))

    def _scores(self, model):
        states = self.optimizer.optimizer.state
        return {name: moment_score(states[parameter]) for name, parameter in model.named_parameters()}


def watched_by(callback, settings, **changes):
    """A whole run with this callback, which gets it as ``run``."""
    set_up = LanguageRun._set_up

    def with_callback(run):
        callback.run = run
        set_up(run)
        run.trainer.add_callback(callback)

    with patch.object(LanguageRun, "_set_up", with_callback):
        return watched(settings, **changes)


def moment_score(state):
    step = float(state["step"])
    return (state["exp_avg"] / (1 - 0.9**step)).abs() * state["exp_avg_sq"] / (1 - 0.95**step)


@torch.no_grad()
def reset(parameters, previous, scores, retain):
    ranked = sorted(
        (
            (score, name, place)
            for name, tensor in scores.items()
            for place, score in enumerate(tensor.flatten().tolist())
        ),
        key=lambda entry: -entry[0],
    )
    for _, name, place in ranked[round(retain * len(ranked)) :]:
        flat = parameters[name].view(-1)
        flat[place] = 0.5 * flat[place] + 0.5 * previous[name].view(-1)[place]


@pytest.mark.parametrize("covers", ["replay", "all"])
def test_an_average_without_a_warmup_starts_with_the_covered_epochs(covers, llm_settings):
    """One sample before the covered steps and one after them."""
    keys = {"wsc.reset": "none", "wsc.warmup": 0, "wsc.covers": covers, "wsc.average_every": 1000}
    run = watched(llm_settings | keys, llm__method="wsc")
    assert [step.epoch.replay for step in run.steps if step.task == 1 and step.ends_epoch] == [False, False, True]
    first = next(n for n, s in enumerate(run.steps) if s.task == 1 and (s.epoch.replay or covers == "all"))
    torch.testing.assert_close(run.last, (run.weights[first] + run.stepped[-1]) / 2)


@pytest.mark.slow
def test_wsc_in_the_first_task_is_an_option(llm_settings):
    wsc, replay = (watched(llm_settings | {"wsc.first_task": True}, llm__method=method) for method in ("wsc", "replay"))
    assert not torch.equal(wsc.tested[0], replay.tested[0])


BLEND, AVERAGE = Blend(0.5), Average(20, "reset", "since_reset", last=True)


@pytest.mark.parametrize(
    "keys, reset, average, scope",
    [
        ({}, BLEND, AVERAGE, "global"),
        ({"wsc.blend": 0.25}, Blend(0.25), AVERAGE, "global"),
        ({"wsc.reset": "revert"}, Revert(), AVERAGE, "global"),
        ({"wsc.reset": "none"}, None, AVERAGE, "global"),
        ({"wsc.rank_scope": "tensor"}, BLEND, AVERAGE, "tensor"),
        ({"wsc.average": False}, BLEND, None, "global"),
        ({"wsc.average_count": "absolute"}, BLEND, Average(20, "reset", "absolute"), "global"),
        ({"wsc.average_count": "swa", "wsc.average_every": 3}, BLEND, Average(3, "reset", "swa"), "global"),
        ({"wsc.average_last": False}, BLEND, Average(20, "reset", "since_reset", last=False), "global"),
        ({"wsc.average_count": "late", "wsc.average_power": 4.0}, BLEND, Average(20, power=4.0), "global"),
    ],
)
def test_the_keys_of_the_consolidation_are_those_of_the_callback(keys, reset, average, scope, llm_settings):
    keys = {"llm.method": "wsc", "wsc.covers": "all", "wsc.retain": 0.4, "wsc.warmup": 0.5} | keys
    config, corpus = configured(llm_settings | keys)
    (callback,) = consolidation(config, corpus.steps(config))
    found = {name: callback.options[name] for name in ("reset", "average", "rank_scope", "retain")}
    assert found == {"reset": reset, "average": average, "rank_scope": scope, "retain": 0.4}
    assert callback.warmup == 0.5 and not callback.save_average


def test_one_optimiser_serves_all_tasks(llm_settings):
    run = watched(llm_settings)
    assert {float(state["step"]) for state in run.trainer.optimizer.state.values()} == {run.trainer.counts["steps"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, merged",
    [
        ("avg_offline", lambda start, one, two: (one + two) / 2),
        ("task_arithmetic", lambda start, one, two: start + 0.3 * ((one - start) + (two - start))),
        (
            "magmax",
            lambda start, one, two: (
                start + 0.5 * torch.where((two - start).abs() >= (one - start).abs(), two - start, one - start)
            ),
        ),
    ],
)
def test_an_offline_merge_is_tested_but_not_gone_on_from(method, merged, llm_settings):
    run, plain = (watched(llm_settings, llm__method=name) for name in (method, "replay"))
    assert torch.equal(torch.stack(run.weights), torch.stack(plain.weights)) and torch.equal(run.last, plain.last)
    torch.testing.assert_close(run.tested[1], merged(plain.weights[0], *plain.tested), rtol=0, atol=1e-6)


ONLINE = {
    "mean": ({"llm.method": "avg_online"}, lambda old, new: (old + new) / 2),
    "slerp": ({"llm.method": "slerp"}, lambda old, new: slerp(old, new, 0.5)),
}


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_merge_is_where_the_next_task_starts(name, llm_settings):
    changes, merged = ONLINE[name]
    run = watched(llm_settings | changes)
    second = next(number for number, step in enumerate(run.steps) if step.task == 1)
    assert torch.equal(run.weights[second], run.tested[0]) and torch.equal(run.last, run.tested[1])
    start, old, new = ({}, {}, {})
    place = 0
    for parameter_name, parameter in run.trainer.model.named_parameters():
        for parts, whole in ((start, run.last), (old, run.tested[0]), (new, run.stepped[-1])):
            parts[parameter_name] = whole[place : place + parameter.numel()]
        place += parameter.numel()
    for each, now in start.items():
        torch.testing.assert_close(now, merged(old[each], new[each]), rtol=0, atol=1e-6)
    assert not torch.allclose(run.last, run.stepped[-1], atol=1e-3)


@pytest.mark.slow
def test_answers_are_those_of_one_prompt_at_a_time_without_a_cache(llm_settings):
    run = watched(llm_settings, llm__epochs=[8, 1], llm__max_new_tokens=6, llm__eval_batch=5)
    corpus, model = run.corpus, run.trainer.model.eval()
    prompts = [*corpus.test_prompts[0], *(prompt[:3] for prompt in corpus.test_prompts[1])]
    texts, stop = answers(model, corpus.tokenizer, prompts, run.config, CPU), [corpus.tokenizer.eos_token_id]
    for prompt, text in zip(prompts, texts, strict=True):
        ids = list(prompt)
        for _ in range(6):
            token = model(torch.tensor([ids])).logits[0, -1].argmax().item()
            if token in stop:
                break
            ids.append(token)
        assert text == corpus.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    assert len(set(texts)) > 1


def loaded(settings, **changes):
    config, corpus = configured(settings, **changes)
    model = load_model(config, corpus.tokenizer).eval()
    stops_alone(model, corpus.tokenizer)
    return model, config, corpus


def test_sampled_answers_follow_from_their_address(llm_settings):
    model, config, corpus = loaded(llm_settings)
    hot, prompts = replace(config, temperature=2.0), corpus.test_prompts[0]
    first, same, other = (
        answers(model, corpus.tokenizer, prompts, hot, CPU, address=address) for address in ((0, 0), (0, 0), (0, 1))
    )
    assert first == same != other
    cold = replace(config, temperature=1e-4)
    assert answers(model, corpus.tokenizer, prompts, cold, CPU) == answers(
        model, corpus.tokenizer, prompts, config, CPU
    )


def test_greedy_decoding_heeds_no_settings_of_the_model(llm_settings, tmp_path):
    """A penalty for repetition in ``generation_config.json`` would choose other tokens than the most probable."""
    model, _, corpus = loaded(llm_settings)
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [7], "min_new_tokens": 8}
    tested = []
    for more in ({}, settings):
        for name, value in more.items():
            setattr(model.generation_config, name, value)
        model.save_pretrained(tmp_path / "model")
        corpus.tokenizer.save_pretrained(tmp_path / "model")
        changes = {"llm__model": str(tmp_path / "model"), "out": str(tmp_path / f"runs-{len(more)}")}
        run = LanguageRun(*configured(llm_settings, save_weights=True, llm__max_new_tokens=8, **changes))
        run.execute()
        tested.append([path.read_text() for path in sorted((run.folder / "predictions").rglob("*.jsonl"))])
    assert tested[0] == tested[1]
    kept = json.loads((run.folder / "models" / "after-2" / "generation_config.json").read_text())
    assert kept["repetition_penalty"] == 5.0, "the model is saved with its own settings"


def test_generation_stops_where_the_models_own_settings_say(llm_settings):
    model, _, corpus = loaded(llm_settings)
    model.generation_config.eos_token_id = [7, 9]
    stops_alone(model, corpus.tokenizer, end=(5, 8))
    assert set(model.generation_config.eos_token_id) == {7, 8, 9, corpus.tokenizer.eos_token_id}


def test_gradient_checkpointing_changes_nothing(llm_settings):
    one, other = (watched(llm_settings, llm__gradient_checkpointing=flag) for flag in (False, True))
    layers = [run.trainer.model.model.layers[0].gradient_checkpointing for run in (one, other)]
    assert layers == [False, True] and torch.allclose(one.last, other.last, atol=1e-6)


@pytest.mark.slow
def test_adapters_alone_are_trained_and_consolidated(llm_settings):
    pytest.importorskip("peft")
    run, plain = (watched(llm_settings, llm__method=name, llm__lora_rank=2) for name in ("wsc", "replay"))
    second = next(number for number, step in enumerate(run.steps) if step.task == 1)
    assert torch.equal(run.weights[second], plain.weights[second]), "the first task is Replay's"
    assert not torch.equal(run.last, plain.last)
    start = dict(load_model(*start_of(llm_settings)).named_parameters())
    for name, parameter in run.trainer.model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        own = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert parameter.requires_grad or torch.equal(parameter, start[own])
    assert not torch.equal(run.weights[0], run.last)


def start_of(settings):
    config, corpus = configured(settings)
    return config, corpus.tokenizer
