"""Steps, consolidation, merging and generation, each against a slow version of its own."""

import contextlib
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from small_llm import configured
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pycil_wsc.consolidation import Average, Blend, Revert
from pycil_wsc.engine.processes import Processes
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.llm.generation import answers, stop_tokens
from pycil_wsc.llm.merging import slerp
from pycil_wsc.llm.model import load_model, packed_losses, token_losses
from pycil_wsc.llm.tokens import collate, micro_batches, pack, shuffled
from pycil_wsc.llm.trainer import Run
from pycil_wsc.llm.training import Training

CPU = torch.device("cpu")


def training_of(settings, **changes):
    config, corpus = configured(settings, **changes)
    return Training(config, corpus.tokenizer, Processes(), CPU), config, corpus


def learn(training, config, corpus, index, before_step=lambda epoch, number: None):
    """A task as the trainer has it."""
    epochs = corpus.epochs(config, index)
    training.begin_task(index, epochs)
    for number, epoch in enumerate(epochs):
        training.begin_epoch(epoch)
        for batch in shuffled(len(epoch.examples), config.batch_size, config.seed, index, number):
            before_step(epoch, number)
            training.step([epoch.examples[i] for i in batch])
    training.end_task()


def weights(training):
    return torch.cat([parameter.detach().flatten().clone() for parameter in training.parameters.values()])


def test_an_average_that_would_have_no_sample_is_refused_before_the_task(llm_settings):
    keys = {"wsc.average_start": "first", "wsc.average_last": False, "wsc.average_every": 999, "llm.method": "wsc"}
    training, config, corpus = training_of(llm_settings | keys)
    learn(training, config, corpus, 0)
    with pytest.raises(UnusableRun, match=r"wsc: a task is too short \(no sample of the average within the . steps"):
        training.begin_task(1, corpus.epochs(config, 1))


def test_dropout_is_seeded_by_the_step(llm_settings):
    """Whatever other random numbers were drawn before, and in which process."""
    losses = []
    for number in range(2):
        training, config, corpus = training_of(llm_settings)
        for module in training.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        torch.manual_seed(number)
        examples = list(corpus.encoded.values())[:8]
        losses.append([training.step(examples).item() for _ in range(3)])
    assert losses[0] == losses[1]
    without, config, corpus = training_of(llm_settings)
    assert without.step(examples).item() != losses[0][0]


@pytest.mark.parametrize("loss", ["item", "token"])
@pytest.mark.parametrize("tokens", [1, 100, 10000])
@pytest.mark.parametrize("packing, attention", [(False, "sdpa"), (True, "sdpa"), (True, "eager")])
def test_a_step_is_adamws_on_the_mean_however_it_is_split(loss, tokens, packing, attention, llm_settings):
    changes = {"llm__loss": loss, "llm__micro_tokens": tokens, "llm__packing": packing}
    training, config, corpus = training_of(llm_settings, llm__attn_implementation=attention, llm__clip=0.1, **changes)
    assert training.model.config._attn_implementation == attention
    examples = [*list(corpus.encoded.values())[:3], *list(corpus.encoded.values())[-3:]]  # short answers and long ones
    model = load_model(replace(config, attn_implementation="sdpa"), corpus.tokenizer)
    each = []
    for example in examples:
        ids = torch.tensor([example.ids])
        each.append(
            cross_entropy(model(ids).logits[0, example.prompt - 1 : -1], ids[0, example.prompt :], reduction="none")
        )
    expected = torch.stack([one.mean() for one in each]).mean() if loss == "item" else torch.cat(each).mean()
    expected.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0).step()
    assert training.step(examples).item() == pytest.approx(expected.item(), rel=1e-5)
    # AdamW's first step is lr * sign of the gradient: where that is all but 0, rounding decides
    moved = [
        (mine - theirs).abs().max().item()
        for mine, theirs in zip(training.parameters.values(), model.parameters(), strict=True)
    ]
    assert sum(move > 1e-5 for move in moved) <= 2 and training.counts["steps"] == 1
    assert training.counts["answers"] == sum(map(len, each)) and training.counts["tokens"] == sum(map(len, examples))


def test_padding_is_below_a_tenth_and_none_where_items_are_packed(llm_settings):
    (padded, config, corpus), (packed, _, _) = (
        training_of(llm_settings, llm__packing=flag, llm__micro_tokens=100) for flag in (False, True)
    )
    for training in (padded, packed):
        learn(training, config, corpus, 0)
    assert 0 < padded.counts["padding"] < 0.1 * padded.counts["tokens"] and packed.counts["padding"] == 0
    assert packed.counts["tokens"] == padded.counts["tokens"]


def test_packed_items_fill_a_forward_pass(llm_settings):
    _, corpus = configured(llm_settings)
    examples = list(corpus.encoded.values())
    groups = micro_batches(examples, 100, 0.1, packing=True)
    assert sorted(map(len, (example for group in groups for example in group))) == sorted(map(len, examples))
    sizes = [sum(map(len, group)) for group in groups]
    assert max(sizes) <= 100 and all(size + len(later[0]) > 100 for size, later in zip(sizes, groups[1:]))


def test_a_model_without_positions_cannot_be_packed(llm_settings, monkeypatch):
    config, corpus = configured(llm_settings, llm__packing=True)
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, input_ids: None)
    with pytest.raises(UserError, match="llm.packing: LlamaForCausalLM does not accept position_ids; use false"):
        load_model(config, corpus.tokenizer)


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
RECURRENT = dict(LLAMA, lru_width=16, block_types=["recurrent", "attention"], attention_window_size=16)
RECURRENT |= dict(num_key_value_heads=1, head_dim=8)


@pytest.mark.parametrize(
    "config, packs",
    [
        (transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64), True),
        (transformers.LlamaConfig(**LLAMA), True),
        (transformers.OPTConfig(**OPT, max_position_embeddings=64), False),  # positions from the mask
        (transformers.FalconConfig(**SMALL, num_hidden_layers=1, alibi=True), False),
        (transformers.RecurrentGemmaConfig(**RECURRENT), False),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_is_packed_only_if_packed_items_have_their_own_losses(config, packs, llm_settings, tmp_path):
    settings = saved(config, llm_settings, tmp_path / "model")
    numbers = torch.get_rng_state()
    (config, corpus), (padded, _) = configured(settings, llm__packing=True), configured(settings)
    with contextlib.nullcontext() if packs else pytest.raises(UnusableRun, match="llm.packing: packed items"):
        model = load_model(config, corpus.tokenizer)
        assert not model.training and torch.equal(torch.get_rng_state(), numbers)
    model, examples = load_model(padded, corpus.tokenizer), list(corpus.encoded.values())[:3]
    alone = [token_losses(model, collate([each], 0, CPU)).sum().item() for each in examples]
    assert (packed_losses(model, pack(examples, CPU)).tolist() == pytest.approx(alone, rel=1e-5)) == packs


def test_attention_that_only_a_gpu_computes_is_left_as_it_is(llm_settings):
    config, corpus = configured(llm_settings, llm__packing=True, llm__attn_implementation="flex_attention")
    with patch("pycil_wsc.llm.model.packed_losses", wraps=packed_losses) as computed:
        model = load_model(config, corpus.tokenizer)
    assert computed.call_count == 1 and model.config._attn_implementation == "flex_attention" and model.training


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
@pytest.mark.parametrize("new, key", [(1, "llm.max_prompt: a training item"), (6, "llm.max_new_tokens: a test prompt")])
def test_a_model_with_too_few_positions_is_refused_before_training_and_one_with_just_enough_is_not(
    name, new, key, llm_settings, tmp_path
):
    short = llm_settings | {"llm.epochs": [1, 1], "llm.pool": None, "llm.max_new_tokens": new}
    short |= {"llm.attn_implementation": "eager"}  # GPT-Neo has no other
    item, prompt = longest_of(short)
    needed = max(item, prompt + new - 1)  # the last new token is not read
    assert (needed == item) == (new == 1)
    few, enough = (saved(with_positions(name, needed - less), short, tmp_path / f"less-{less}") for less in (1, 0))
    run = Run(*configured(few))
    with pytest.raises(UnusableRun, match=key) as error:
        run.execute()
    assert "\n" not in str(error.value) and not (run.folder / "config.json").exists()
    long = partial(transformers.GenerationConfig, min_new_tokens=new)
    with patch("pycil_wsc.llm.generation.GenerationConfig", long):  # answers are as long as allowed
        assert len(Run(*configured(enough)).execute()["tasks"]) == 2
        with patch("pycil_wsc.llm.trainer.positions", lambda model: None), pytest.raises(IndexError):
            run.execute()


def test_a_rotary_model_is_not_limited_to_the_positions_of_its_configuration(llm_settings, tmp_path):
    settings = saved(with_positions("llama", 8), llm_settings | {"llm.epochs": [1, 1]}, tmp_path / "model")
    assert len(Run(*configured(settings)).execute()["tasks"]) == 2 and min(longest_of(settings)) > 8


@pytest.mark.parametrize("name", ["flash_attention_2", "flsh"])
def test_attention_that_is_not_installed_is_one_clear_line(name, llm_settings):
    config, corpus = configured(llm_settings, llm__attn_implementation=name)
    with pytest.raises(UserError, match="llm.attn_implementation: ") as error:
        load_model(config, corpus.tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("moments", ["carried", "own"])
@pytest.mark.parametrize("covers, retain", [("replay", 0.2), ("all", 0.5)])
def test_wsc_is_the_papers_at_the_right_steps(moments, covers, retain, llm_settings):
    """Against the same steps with each operation done by hand: the second task's replay epoch, or all of its epochs."""
    changes = {
        "wsc.covers": covers,
        "wsc.retain": retain,
        "wsc.average_every": 2,
        "wsc.moments": moments,
        "llm.replay_epochs": 5,
    }
    training, config, corpus = training_of(llm_settings | changes, llm__method="wsc")
    by_hand, plain, _ = training_of(llm_settings | changes, llm__method="replay")
    learn(training, config, corpus, 0)
    learn(by_hand, plain, corpus, 0)
    assert torch.equal(weights(training), weights(by_hand)), "the first task is Replay's"
    learn(training, config, corpus, 1)

    previous = {name: parameter.detach().clone() for name, parameter in by_hand.parameters.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in previous.items()} for _ in range(2))
    epochs = corpus.epochs(plain, 1)
    covered = [epoch.replay or covers == "all" for epoch in epochs]
    per_epoch = [len(shuffled(len(epoch.examples), 8, 1234, 1, number)) for number, epoch in enumerate(epochs)]
    total = sum(steps for steps, counts in zip(per_epoch, covered) if counts)
    warmup, step, samples, gradients = int(0.25 * total), 0, [], {}
    assert warmup >= 2 and total > warmup + 4
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad}))
        for name, parameter in by_hand.parameters.items()
    ]
    by_hand.begin_task(1, epochs)
    for number, epoch in enumerate(epochs):
        for batch in shuffled(len(epoch.examples), 8, 1234, 1, number):
            by_hand.step([epoch.examples[i] for i in batch])
            if not covered[number]:
                continue
            step += 1
            for name, gradient in gradients.items():  # clipped in place
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
            if step == warmup:
                state = by_hand.optimizer.state
                if moments == "own":
                    scores = {
                        name: (first[name] / (1 - 0.9**step)).abs() * second[name] / (1 - 0.95**step)
                        for name in previous
                    }
                else:
                    scores = {name: moment_score(state[parameter]) for name, parameter in by_hand.parameters.items()}
                reset(by_hand.parameters, previous, scores, retain)
            if step >= warmup and (step - warmup) % 2 == 0:
                samples.append(weights(by_hand))
    if (step - warmup) % 2:
        samples.append(weights(by_hand))
    [hook.remove() for hook in hooks]
    assert step == total and len(samples) > 2
    difference = (torch.stack(samples).mean(0) - weights(training)).abs()
    assert difference.max() < 1e-5


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
    training, config, corpus = training_of(llm_settings | keys, llm__method="wsc")
    learn(training, config, corpus, 0)
    epochs = corpus.epochs(config, 1)
    training.begin_task(1, epochs)
    for number, epoch in enumerate(epochs):
        if epoch.replay if covers == "replay" else number == 0:
            first = weights(training)
        training.begin_epoch(epoch)
        for batch in shuffled(len(epoch.examples), 8, 1234, 1, number):
            training.step([epoch.examples[i] for i in batch])
    last = weights(training)
    training.end_task()
    assert [epoch.replay for epoch in epochs] == [False, False, True]
    torch.testing.assert_close(weights(training), (first + last) / 2)


def test_wsc_in_the_first_task_is_an_option(llm_settings):
    (training, config, corpus), (plain, replay, _) = (
        training_of(llm_settings | {"wsc.first_task": True}, llm__method=method) for method in ("wsc", "replay")
    )
    for one, options in ((training, config), (plain, replay)):
        learn(one, options, corpus, 0)
    assert not torch.equal(weights(training), weights(plain))


BLEND, AVERAGE = Blend(0.5), Average(20, "reset", "since_reset", last=True)


@pytest.mark.parametrize(
    "keys, reset, average, scope",
    [
        ({}, BLEND, AVERAGE, "global"),
        ({"wsc.blend": 0.25, "wsc.reset_momentum": True}, Blend(0.25, momentum=True), AVERAGE, "global"),
        ({"wsc.reset": "revert"}, Revert(), AVERAGE, "global"),
        ({"wsc.reset": "revert", "wsc.reset_momentum": True}, Revert(momentum=True), AVERAGE, "global"),
        ({"wsc.reset": "none"}, None, AVERAGE, "global"),
        ({"wsc.rank_scope": "tensor"}, BLEND, AVERAGE, "tensor"),
        ({"wsc.average": False}, BLEND, None, "global"),
        ({"wsc.average_count": "absolute"}, BLEND, Average(20, "reset", "absolute"), "global"),
        ({"wsc.average_count": "swa", "wsc.average_every": 3}, BLEND, Average(3, "reset", "swa"), "global"),
        (
            {"wsc.average_start": "first", "wsc.average_last": False, "wsc.average_every": 1},
            BLEND,
            Average(1, "first", "since_reset", last=False),
            "global",
        ),
    ],
)
def test_the_keys_of_the_consolidation_are_those_of_the_object(keys, reset, average, scope, llm_settings):
    keys = {"llm.method": "wsc", "wsc.covers": "all", "wsc.retain": 0.4, "wsc.warmup": 0.5} | keys
    training, config, corpus = training_of(llm_settings | keys)
    epochs = corpus.epochs(config, 1)
    training.begin_task(1, epochs)
    wsc = training.wsc
    assert (wsc.reset, wsc.average, wsc.rank_scope, wsc.retain) == (reset, average, scope, 0.4)
    assert wsc.warmup_steps == sum(-(-len(epoch.examples) // config.batch_size) for epoch in epochs) // 2


@pytest.mark.parametrize("reset, steps", [("blend", 1), ("none", 0)])
def test_a_warmup_of_less_than_a_step_is_one_step_where_scores_are_needed(reset, steps, llm_settings):
    keys = {"llm.method": "wsc", "wsc.reset": reset, "wsc.warmup": 0.01}
    training, config, corpus = training_of(llm_settings | keys)
    training.begin_task(1, corpus.epochs(config, 1))
    assert training.wsc.warmup_steps == steps


def test_one_optimiser_serves_all_tasks(llm_settings):
    training, config, corpus = training_of(llm_settings)
    for index in range(2):
        learn(training, config, corpus, index)
    assert {float(state["step"]) for state in training.optimizer.state.values()} == {training.counts["steps"]}


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
    (training, config, corpus), (plain, replay, _) = (
        training_of(llm_settings, llm__method=name) for name in (method, "replay")
    )
    states = [weights(plain)]
    for index in range(2):
        learn(training, config, corpus, index)
        learn(plain, replay, corpus, index)
        states.append(weights(plain))
        assert torch.equal(weights(training), weights(plain))
    with training.tested():
        assert torch.allclose(weights(training), merged(*states), atol=1e-6)
    assert torch.equal(weights(training), weights(plain))


ONLINE = {
    "mean": ({"llm.method": "avg_online"}, lambda old, new: (old + new) / 2),
    "ema": (
        {"llm.method": "avg_online", "llm.average": "ema", "llm.ema_decay": 0.8},
        lambda old, new: 0.8 * old + 0.2 * new,
    ),
    "slerp": ({"llm.method": "slerp", "llm.slerp_weight": 0.3}, lambda old, new: slerp(old, new, 0.3)),
}


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_merge_is_where_the_next_task_starts(name, llm_settings):
    changes, merged = ONLINE[name]
    training, config, corpus = training_of(llm_settings | changes)
    learn(training, config, corpus, 0)
    first, ends, update = copies(training), [], training.merge.update
    training.merge.update = lambda state: (ends.append(copies(training)), update(state))
    learn(training, config, corpus, 1)
    for key, end in ends[0].items():
        assert torch.allclose(training.parameters[key], merged(first[key], end), atol=1e-6)
    assert not torch.allclose(weights(training), torch.cat([end.flatten() for end in ends[0].values()]), atol=1e-3)


def copies(training):
    return {name: parameter.detach().clone() for name, parameter in training.parameters.items()}


def test_answers_are_those_of_one_prompt_at_a_time_without_a_cache(llm_settings):
    training, config, corpus = training_of(llm_settings, llm__epochs=[8, 1], llm__max_new_tokens=6, llm__eval_batch=5)
    learn(training, config, corpus, 0)
    prompts = [*corpus.test_prompts[0], *(prompt[:3] for prompt in corpus.test_prompts[1])]
    texts, model, stop = (
        answers(training.model, corpus.tokenizer, prompts, config, CPU),
        training.model,
        stop_tokens(training.model, corpus.tokenizer),
    )
    for prompt, text in zip(prompts, texts, strict=True):
        ids = list(prompt)
        for _ in range(6):
            token = model(torch.tensor([ids])).logits[0, -1].argmax().item()
            if token in stop:
                break
            ids.append(token)
        assert text == corpus.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    assert len(set(texts)) > 1


def test_sampled_answers_follow_from_their_address(llm_settings):
    training, config, corpus = training_of(llm_settings)
    hot, prompts = replace(config, temperature=2.0), corpus.test_prompts[0]
    first, same, other = (
        answers(training.model, corpus.tokenizer, prompts, hot, CPU, address=address)
        for address in ((0, 0), (0, 0), (0, 1))
    )
    assert first == same != other
    cold = replace(config, temperature=1e-4)
    assert answers(training.model, corpus.tokenizer, prompts, cold, CPU) == answers(
        training.model, corpus.tokenizer, prompts, config, CPU
    )


def test_greedy_decoding_heeds_no_settings_of_the_model(llm_settings):
    """A penalty for repetition in ``generation_config.json`` would choose other tokens than the most probable."""
    training, config, corpus = training_of(llm_settings, llm__max_new_tokens=8)
    model, prompts = training.model, corpus.test_prompts[0]
    greedy = answers(model, corpus.tokenizer, prompts, config, CPU)
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [7], "min_new_tokens": 8}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    assert answers(model, corpus.tokenizer, prompts, config, CPU) == greedy
    assert model.generation_config.repetition_penalty == 5.0, "they are still those that the model is saved with"


def test_generation_stops_where_the_models_own_settings_say(llm_settings):
    training, _, corpus = training_of(llm_settings)
    training.model.generation_config.eos_token_id = [7, 9]
    assert stop_tokens(training.model, corpus.tokenizer) == {7, 9, corpus.tokenizer.eos_token_id}


def test_gradient_checkpointing_changes_nothing(llm_settings):
    (one, config, corpus), (other, _, _) = (
        training_of(llm_settings, llm__gradient_checkpointing=flag) for flag in (False, True)
    )
    assert other.model.model.layers[0].gradient_checkpointing and not one.model.model.layers[0].gradient_checkpointing
    for training in (one, other):
        learn(training, config, corpus, 0)
    assert torch.allclose(weights(one), weights(other), atol=1e-6)


@pytest.mark.parametrize("method", ["wsc", "magmax"])
def test_adapters_alone_are_trained_and_consolidated(method, llm_settings):
    pytest.importorskip("peft")
    training, config, corpus = training_of(llm_settings, llm__method=method, llm__lora_rank=2)
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in training.model.named_parameters()
        if name not in training.parameters
    }
    before = weights(training)
    plain, replay, _ = training_of(llm_settings, llm__method="replay", llm__lora_rank=2)
    consolidations, ends = [], []
    for index in range(2):
        learn(training, config, corpus, index, lambda *_: consolidations.append(training.wsc))
        learn(plain, replay, corpus, index)
        ends.append(torch.equal(weights(training), weights(plain)))
        with training.tested():
            pass
    if method == "wsc":
        assert ends == [True, False], "the first task is Replay's"
        assert (consolidations[0], consolidations[-1].resets, consolidations[-1].phase) == (None, 1, "finished")
    else:
        assert ends == [True, True] and not any(consolidations), "the merge is only tested"
    assert all("lora" in name for name in training.parameters) and not any("lora" in name for name in frozen)
    assert all(
        torch.equal(parameter, frozen[name]) for name, parameter in training.model.named_parameters() if name in frozen
    )
    assert not torch.equal(weights(training), before)
