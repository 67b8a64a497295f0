"""The consolidation in a Hugging Face Trainer: a tiny language model learns two tasks, and is stopped and resumed."""

import json
import shutil
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

from pycil_wsc.consolidation import Average, Blend, Revert, moment_score, recompute_batch_norm  # noqa: E402
from pycil_wsc.plugins.huggingface import Period, WSCCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("collected")


def tiny_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences(seed, count=40):
    tokens = torch.randint(13, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Watch(transformers.TrainerCallback):
    """The weights after each optimiser step, and how many resets there had been."""

    def __init__(self, wsc):
        self.wsc, self.weights, self.resets = wsc, [], []

    def on_step_end(self, args, state, control, model=None, **others):
        self.weights.append(weights(model))
        self.resets.append(self.wsc.wsc.resets)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trainer_for(model, folder, *callbacks, seed=0, **arguments):
    usual = dict(
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        seed=1,
    )
    arguments = transformers.TrainingArguments(output_dir=str(folder), **usual | arguments)
    return transformers.Trainer(model, arguments, train_dataset=sentences(seed), callbacks=list(callbacks))


def assert_same(left, right):
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_two_tasks_are_reset_at_the_right_step_and_the_saved_model_is_the_average(tmp_path):
    model, callback = (
        tiny_model(),
        WSCCallback(warmup=0.25, average=Average(3, count="since_reset"), retain=0.3, reset=Blend()),
    )
    for task in range(2):
        watch = Watch(callback)
        before = weights(model)
        trainer = trainer_for(model, tmp_path / str(task), callback, watch, seed=task)
        trainer.train()
        assert watch.resets == 4 * [0] + 16 * [1]  # 20 steps, of which 5 are a quarter; the fifth resets
        mean = {
            name: torch.stack([watch.weights[step][name] for step in (4, 7, 10, 13, 16, 19)]).mean(0) for name in before
        }
        torch.testing.assert_close(weights(model), mean)
        trainer.save_model(str(tmp_path / "saved"))
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert_same({name: tensor for name, tensor in weights(model).items() if name in saved}, saved)
        assert len(saved) >= len(mean) - 1  # the tied head is saved once


def test_the_reset_pulls_towards_the_weights_before_the_task(tmp_path):
    model, callback = tiny_model(), WSCCallback(warmup=0.25, retain=0, reset=Revert(), average=None)
    before, watch = weights(model), Watch(callback)
    trainer_for(model, tmp_path, callback, watch).train()
    assert_same(watch.weights[4], before)
    assert not torch.equal(watch.weights[3]["transformer.wte.weight"], before["transformer.wte.weight"])


@pytest.mark.parametrize("source, stops", [("own", [4, 8]), ("optimizer", [4, 8, 20])])
def test_resuming_from_a_checkpoint_equals_going_on(tmp_path, source, stops):
    def parts():
        return tiny_model(), WSCCallback(
            0.3, moment_score(source=source), Average(every=4), reset=Blend()
        )  # reset after step 6

    through, callback = parts()
    trainer_for(through, tmp_path, callback, save_strategy="steps", save_steps=4).train()
    for stop in stops:
        resumed, callback = parts()
        trainer_for(resumed, tmp_path, callback).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
        assert_same(weights(through), weights(resumed))
        assert (callback.wsc.steps, callback.wsc.averaged) == (20, 5)  # 6, 10, 14, 18, 20


def test_the_folder_in_the_arguments_may_be_of_an_earlier_step(tmp_path):
    """As when a script that was resumed once is resumed again."""

    def parts():
        return tiny_model(), WSCCallback(0.3, average=Average(every=4), reset=Blend())

    through, callback = parts()
    trainer_for(through, tmp_path, callback, save_strategy="steps", save_steps=4).train()
    resumed, callback = parts()
    trainer = trainer_for(resumed, tmp_path, callback, resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
    assert_same(weights(through), weights(resumed))
    assert (callback.wsc.steps, callback.wsc.averaged) == (20, 5)


@pytest.mark.parametrize("source", ["own", "optimizer"])
def test_a_checkpoint_without_moments_is_resumed_only_where_they_are_no_longer_needed(source, tmp_path, caplog):
    """``save_only_model=True`` leaves the optimiser's state out; moments of its own are in wsc.pt."""

    def trainer():
        callback = WSCCallback(0.3, moment_score(source=source), Average(every=4), reset=Blend())  # reset after step 6
        arguments = dict(save_strategy="steps", save_steps=4, save_only_model=True)
        return trainer_for(tiny_model(), tmp_path, callback, **arguments), callback

    trainer()[0].train()
    assert ("checkpoints of the warm-up cannot be resumed from" in caplog.text) == (source == "optimizer")
    for step in (4, 8):
        resumed, callback = trainer()
        if source == "optimizer" and step == 4:
            with pytest.raises(RuntimeError, match="cannot resume at step 4, in the warm-up: .*save_only_model=True"):
                resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        else:
            resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
            assert callback.wsc.steps == 20


def test_gradients_accumulated_by_the_trainer_are_one_step(tmp_path):
    callback = WSCCallback(warmup=0.5, average=Average(2), reset=Blend())
    trainer_for(tiny_model(), tmp_path, callback, gradient_accumulation_steps=2).train()
    assert (callback.wsc.steps, callback.wsc.warmup_steps) == (10, 5)


def test_a_checkpoint_saved_without_the_callback_is_refused(tmp_path):
    trainer_for(tiny_model(), tmp_path, save_strategy="steps", save_steps=4).train()
    trainer = trainer_for(tiny_model(), tmp_path, WSCCallback(reset=Blend()))
    with pytest.raises(RuntimeError, match="cannot resume at step 8: .*checkpoint-8/wsc.pt does not exist"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


def test_the_consolidation_of_another_training_is_refused(tmp_path):
    """A checkpoint of one training, resumed with the output folder of another, which has one of the same step."""
    for name, seed in (("a", 0), ("b", 1)):
        callback = WSCCallback(0.3, average=Average(every=4), reset=Blend())
        trainer_for(tiny_model(), tmp_path / name, callback, seed=seed, save_strategy="steps", save_steps=8).train()
    checkpoint, mine = str(tmp_path / "a" / "checkpoint-8"), WSCCallback(0.3, average=Average(every=4), reset=Blend())
    with pytest.raises(RuntimeError, match="cannot resume at step 8: the wsc.pt that was found is of another training"):
        trainer_for(tiny_model(), tmp_path / "b", mine).train(resume_from_checkpoint=checkpoint)
    found = trainer_for(tiny_model(), tmp_path / "b", mine, resume_from_checkpoint=checkpoint)
    found.train(resume_from_checkpoint=checkpoint)
    assert mine.wsc.steps == 20
    path = Path(checkpoint, "trainer_state.json")  # as an earlier version wrote it
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stateful_callbacks": {}}))
    with pytest.raises(RuntimeError, match="is of another training"):
        trainer_for(tiny_model(), tmp_path / "b", mine).train(resume_from_checkpoint=checkpoint)


def test_an_optimiser_without_moments_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="use torch.optim.Adam or AdamW, or importance=moment_score"):
        trainer_for(tiny_model(), tmp_path, WSCCallback(reset=Blend()), optim="sgd").train()
    trainer_for(tiny_model(), tmp_path, WSCCallback(importance=moment_score(), reset=Blend()), optim="sgd").train()


def test_the_optimiser_of_the_task_before_is_refused(tmp_path):
    trainer = trainer_for(tiny_model(), tmp_path, WSCCallback(reset=Blend()))
    trainer.train()
    with pytest.raises(ValueError, match="make a new optimizer for each task"):
        trainer.train()


def test_a_mask_of_the_models_own_elements_is_accepted(tmp_path):
    model, name = tiny_model(), "transformer.wte.weight"
    kept = torch.zeros_like(model.get_parameter(name), dtype=torch.bool)
    before = model.get_parameter(name).detach().clone()
    callback = WSCCallback(reset=Revert(), retain=0.0, average=None, eligible={name: kept})
    trainer_for(model, tmp_path, callback).train()
    other = tiny_model()
    trainer_for(other, tmp_path, WSCCallback(reset=Revert(), retain=0.0, average=None)).train()
    assert callback.wsc.resets == 1 and not torch.equal(model.get_parameter(name), before)
    assert not torch.equal(model.get_parameter(name), other.get_parameter(name)), "the mask excludes it from the reset"


def test_buffers_are_averaged_in_every_task(tmp_path):
    callback = WSCCallback(average=Average(every=2, buffers=True), reset=None)
    for task in range(2):
        model = tiny_model()
        model.register_buffer("running", torch.zeros(3))
        model.register_forward_pre_hook(lambda model, _: (model.running.add_(1.0), None)[1])
        trainer_for(model, tmp_path, callback, seed=task).train()
        assert 0 < model.running.mean() < 20, "the mean of the values so far, not the last one"


def test_training_that_ends_in_the_warm_up_keeps_its_weights_and_says_so(tmp_path, caplog):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_training_stop = state.global_step == 3

    callback = WSCCallback(warmup=0.5, reset=Blend())
    watch, model = Watch(callback), tiny_model()
    trainer_for(model, tmp_path, callback, watch, Stop()).train()
    assert_same(weights(model), watch.weights[-1])
    assert "ended in the warm-up, after 3 of 10 steps" in caplog.text


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(warmup=1.0), "warmup=1.0 is a fraction"),
        (dict(retain=2), "retain=2 is a fraction"),
        (dict(reset="revert"), "reset='revert': give Blend"),
        (dict(min_warmup=1), r"no option 'min_warmup'; give reset=Blend\(min_warmup=1\)$"),
        (dict(every=5), r"give reset=Blend\(every=5\) or average=Average\(every=5\)$"),
        (dict(retian=0.5), "no option 'retian'; did you mean 'retain'"),
        (dict(wramup=0.2), "no option 'wramup'; did you mean 'warmup'"),
        (dict(periods=[Period(0, 0, 10), Period(5, 10, 20)], importance=moment_score()), r"Period\(before=5.*overlap"),
        (dict(periods=[Period(10, 5, 20)], importance=moment_score()), r"Period\(before=10.*give before <= start"),
        (dict(periods=[Period(0, 0, 5), Period(5, 5, 9)]), r"periods: .*source='carried'"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        WSCCallback(**{"reset": Blend()} | options)


def test_a_period_beyond_the_training_is_refused(tmp_path):
    callback = WSCCallback(periods=[Period(0, 10, 40)], importance=moment_score(), reset=Blend())
    with pytest.raises(ValueError, match="the training has 20 steps"):
        trainer_for(tiny_model(), tmp_path, callback).train()


def test_options_of_a_reset_that_no_training_has_shown_too_long_warn_of_nothing(recwarn):
    WSCCallback(reset=Blend(min_warmup=2000))
    assert not [each for each in recwarn if "min_warmup" in str(each.message)]


def test_a_warm_up_of_unknown_length_that_never_ended_is_told(tmp_path, caplog):
    trainer_for(tiny_model(), tmp_path, WSCCallback(warmup_steps=None, reset=Blend())).train()
    assert "ended in the warm-up, after 20 of None steps" in caplog.text


def test_a_model_that_saves_itself_in_its_own_way_is_saved(tmp_path):
    model = tiny_model()
    save = model.save_pretrained
    model.save_pretrained = lambda path: save(path)  # as sentence-transformers: without `state_dict`
    callback = WSCCallback(average=Average(every=3), reset=Blend())
    trainer = trainer_for(model, tmp_path, callback, save_strategy="steps", save_steps=20)
    trainer._save = lambda folder, **others: Path(folder).mkdir(parents=True)  # the checkpoint is the Trainer's affair
    trainer.train()
    assert list((tmp_path / "checkpoint-20" / "average").glob("*.safetensors"))


def test_a_training_too_short_for_a_sample_is_refused_before_its_first_step(tmp_path):
    callback = WSCCallback(average=Average(every=30, start="first", last=False), reset=Blend())
    with pytest.raises(ValueError, match="no sample of the average within the 20 steps of the task"):
        trainer_for(tiny_model(), tmp_path, callback).train()


def test_what_would_undo_the_average_is_refused(tmp_path):
    trainer = trainer_for(tiny_model(), tmp_path, WSCCallback(reset=Blend()))
    trainer.args.load_best_model_at_end = True
    with pytest.raises(ValueError, match="load_best_model_at_end=True would replace the average by a checkpoint"):
        trainer.train()


def test_deepspeed_and_fsdp1_are_refused(tmp_path):
    trainer = trainer_for(tiny_model(), tmp_path, WSCCallback())
    trainer.model.add_module("wrapped", type("FullyShardedDataParallel", (torch.nn.Identity,), {})())
    with pytest.raises(ValueError, match="needs FSDP2, not FSDP1"):
        trainer.train()
    trainer.args.deepspeed = "zero3.json"
    with pytest.raises(ValueError, match="DeepSpeed: leave deepspeed out and shard by FSDP2, with fsdp=True"):
        trainer.train()


def test_each_checkpoint_after_the_reset_has_the_average_beside_it_and_the_last_one_is_the_model(tmp_path):
    model, callback = (
        tiny_model(),
        WSCCallback(warmup=0.3, average=Average(every=4), reset=Blend()),
    )  # reset after step 6, of 20
    trainer_for(model, tmp_path, callback, save_strategy="steps", save_steps=5).train()
    assert not (tmp_path / "checkpoint-5" / "average").exists()
    last = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20" / "average")
    torch.testing.assert_close(weights(last), weights(model))
    raw = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    assert not torch.allclose(raw.lm_head.weight, model.lm_head.weight)
    plain = tiny_model()
    trainer_for(plain, tmp_path / "none", WSCCallback(warmup=0.3, average=Average(every=4), reset=Blend())).train()
    assert_same(weights(plain), weights(model))


def test_evaluations_are_of_the_average_where_that_is_asked_for(tmp_path):
    def losses(**options):
        model, callback = (
            tiny_model(),
            WSCCallback(warmup=0.3, average=Average(every=4), **{"reset": Blend()} | options),
        )
        trainer = trainer_for(model, tmp_path, callback)
        trainer.eval_dataset = trainer.train_dataset
        trainer.args.eval_strategy, trainer.args.eval_steps = transformers.IntervalStrategy.STEPS, 5
        trainer.train()
        rows = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        return rows, trainer.evaluate()["eval_loss"], weights(model)

    (raw, end, one), (average, same, other) = losses(), losses(evaluate_average=True)
    assert raw[0] == average[0] and raw[1:] != average[1:], "the first is in the warm-up"
    assert average[-1] == pytest.approx(end) == pytest.approx(same)
    assert_same(one, other)


@pytest.mark.slow
def test_each_of_several_eval_datasets_is_evaluated_by_the_average_and_checkpoints_hold_the_weights(tmp_path):
    one, several = evaluated(tmp_path / "one"), evaluated(tmp_path / "several", save_steps=5)
    several.eval_dataset = {"first": one.eval_dataset, "second": one.eval_dataset}
    (wsc,) = (each for each in several.callback_handler.callbacks if isinstance(each, WSCCallback))
    watch = Watch(wsc)
    several.callback_handler.callbacks.insert(0, watch)
    one.train()
    several.train()
    losses = [
        [row[name] for row in trainer.state.log_history if name in row]
        for trainer, name in ((one, "eval_loss"), (several, "eval_first_loss"), (several, "eval_second_loss"))
    ]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 4
    assert_same(weights(one.model), weights(several.model))
    for step in (5, 10, 15, 20):
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "several" / f"checkpoint-{step}")
        assert_same(weights(saved), watch.weights[step - 1])


class Interrupt(transformers.TrainerCallback):
    """Raises in the first evaluation of step 10."""

    due = True

    def on_prediction_step(self, args, state, control, **others):
        if self.due and state.global_step == 10:
            self.due = False
            raise KeyboardInterrupt


class Begin(transformers.TrainerCallback):
    """The weights with which training begins."""

    def on_train_begin(self, args, state, control, model=None, **others):
        self.weights = weights(model)


def evaluated(folder, *others, save_steps=4):
    """A trainer that resets after step 6 of 20, saves every ``save_steps`` and evaluates the average every 5."""
    callback = WSCCallback(warmup=0.3, average=Average(every=4), reset=Blend(), evaluate_average=True)
    trainer = trainer_for(tiny_model(), folder, *others, callback, save_strategy="steps", save_steps=save_steps)
    trainer.eval_dataset = trainer.train_dataset
    trainer.args.eval_strategy, trainer.args.eval_steps = transformers.IntervalStrategy.STEPS, 5
    return trainer


@pytest.mark.parametrize("stop", [4, 8])
def test_training_interrupted_in_an_evaluation_resumes_from_a_checkpoint_as_if_undisturbed(stop, tmp_path):
    undisturbed, trainer = evaluated(tmp_path / "undisturbed"), evaluated(tmp_path / "interrupted", Interrupt())
    undisturbed.train()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "interrupted" / f"checkpoint-{stop}"))
    assert_same(weights(undisturbed.model), weights(trainer.model))
    losses = [
        [row["eval_loss"] for row in each.state.log_history if "eval_loss" in row] for each in (undisturbed, trainer)
    ]
    assert losses[0] == losses[1]


def test_training_after_an_interrupted_evaluation_begins_with_the_weights_not_their_average(tmp_path):
    trainer, begin = evaluated(tmp_path, Interrupt()), Begin()
    (wsc,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, WSCCallback))
    watch = Watch(wsc)
    trainer.callback_handler.callbacks.insert(0, watch)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer_for(trainer.model, tmp_path / "again", wsc, begin).train()
    assert_same(begin.weights, watch.weights[-1])


def test_batch_norm_fits_the_average_after_a_pass_over_the_trainers_own_batches(tmp_path):
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)

        def forward(self, pixel_values, labels=None):
            logits = self.head(self.norm(self.head.weight.mean() * pixel_values))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"pixel_values": torch.randn(4), "labels": number % 2} for number in range(40)]
    trainer = trainer_for(Normed(), tmp_path, WSCCallback(reset=Blend()), lr_scheduler_type="constant")
    trainer.train_dataset = rows
    trainer.train()
    recompute_batch_norm(trainer.model, trainer.get_train_dataloader())
    batches = torch.stack([row["pixel_values"] for row in rows]).double()
    expected = trainer.model.head.weight.mean().detach() * batches.mean(0)  # of batches of one size
    torch.testing.assert_close(trainer.model.norm.running_mean, expected.float())


def test_trls_trainer_takes_the_callback(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from pycil_wsc.llm.tokens import train_tokenizer

    rows = [{"prompt": f"The number after {n} is", "completion": f" {n + 1}."} for n in range(32)]
    tokenizer = train_tokenizer((row["prompt"] + row["completion"] for row in rows), 300)
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes))
    callback = WSCCallback(warmup=0.25, reset=Blend(), average=Average(every=3, power=0))
    watch = Watch(callback)
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=8, learning_rate=1e-2, save_steps=4, bf16=False, use_cpu=True, report_to=[]
    )
    trainer = trl.SFTTrainer(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[callback, watch],
    )
    trainer.train()
    assert watch.resets == [0, *7 * [1]]
    mean = {name: torch.stack([watch.weights[step][name] for step in (1, 4, 7)]).mean(0) for name in watch.weights[0]}
    torch.testing.assert_close(weights(model), mean)
    folder = tmp_path / "checkpoint-8" / "average"
    torch.testing.assert_close(weights(transformers.AutoModelForCausalLM.from_pretrained(folder)), mean)
    assert transformers.AutoTokenizer.from_pretrained(folder)("The")["input_ids"] == tokenizer("The")["input_ids"]


def test_of_a_peft_model_the_adapters_alone_are_consolidated_and_their_average_is_saved(tmp_path):
    peft = pytest.importorskip("peft")
    tiny_model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    callback = WSCCallback(warmup=0.25, reset=Blend(), average=Average(every=3, power=0))
    watch = Watch(callback)
    trainer_for(model, tmp_path, callback, watch, save_strategy="steps", save_steps=20).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    for name, tensor in trained.items():
        mean = torch.stack([watch.weights[step][name] for step in (4, 7, 10, 13, 16, 19)]).mean(0)
        torch.testing.assert_close(tensor.detach(), mean)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20" / "average")
    torch.testing.assert_close(weights(loaded), weights(model))


@pytest.mark.slow
def test_a_resumed_peft_model_has_one_adapter(tmp_path):
    """The Trainer takes every folder with an adapter in a checkpoint for one of the model's."""
    peft = pytest.importorskip("peft")

    def trainer(folder, *callbacks):
        model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["c_attn"]))
        callback = WSCCallback(warmup=0.25, reset=Blend(), average=Average(every=3))
        return trainer_for(model, folder, callback, *callbacks, save_strategy="steps", save_steps=10)

    whole = trainer(tmp_path / "whole")
    whole.train()
    trainer(tmp_path / "stopped").train()
    shutil.rmtree(tmp_path / "stopped" / "checkpoint-20")
    again = trainer(tmp_path / "stopped")
    again.train(resume_from_checkpoint=True)
    assert list(again.model.peft_config) == ["default"]
    assert_same(weights(whole.model), weights(again.model))
    assert not list((tmp_path / "stopped" / "checkpoint-20" / "average").glob("*/"))
