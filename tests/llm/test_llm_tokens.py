"""Labels, truncation and batches, tested on the model's inputs."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_llm import configured
from support.tokens import word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from pycil_wsc.errors import UserError
from pycil_wsc.llm import tokens
from pycil_wsc.llm.corpus import shuffled
from pycil_wsc.llm.model import load_model, tiny_llama
from pycil_wsc.llm.token_batches import IGNORED, collate, micro_batches, summed_losses
from pycil_wsc.llm.tokens import (
    Example,
    Frame,
    encode,
    encode_prompts,
    frame,
    load_tokenizer,
    raw_frame,
    train_tokenizer,
)


def test_a_hand_made_example_has_the_labels_it_should():
    tokenizer = word_tokenizer()
    short, long = encode(tokenizer, [("what is", "it"), ("what is it", "a cat")], 9, 9, raw_frame(tokenizer))
    assert short == Example((1, 3, 4, 5, 2), prompt=3) and long == Example((1, 3, 4, 5, 6, 7, 2), prompt=4)
    batch = collate([long, short], pad=0)
    assert batch.ids.tolist() == [[1, 3, 4, 5, 6, 7, 2], [1, 3, 4, 5, 2, 0, 0]]
    assert batch.kept.tolist() == [2, 3, 4, 5] and batch.counts.tolist() == [3, 2]
    assert batch.targets.tolist() == [[IGNORED, 6, 7, 2], [5, 2, IGNORED, IGNORED]]


def test_a_tokeniser_without_a_beginning_puts_none():
    without = word_tokenizer(bos_token=None)
    assert encode(without, [("what is", "it")], 9, 9, raw_frame(without)) == [Example((3, 4, 5, 2), prompt=2)]


@pytest.mark.parametrize(
    "max_prompt, max_answer, ids, prompt",
    [
        (3, 9, (1, 4, 5, 6, 7, 2), 3),
        (9, 2, (1, 3, 4, 5, 6, 2), 4),
        (2, 2, (1, 5, 6, 2), 2),
        (4, 3, (1, 3, 4, 5, 6, 7, 2), 4),
    ],
)
def test_truncation_keeps_beginning_and_end_tokens_the_prompts_end_and_the_answers_beginning(
    max_prompt, max_answer, ids, prompt
):
    tokenizer = word_tokenizer()
    encoded = encode(tokenizer, [("what is it", "a cat")], max_prompt, max_answer, raw_frame(tokenizer))
    assert encoded == [Example(ids, prompt)]


def merging_tokenizer():
    """Bytes, and ``:A`` as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: number for number, token in enumerate([*alphabet, ":A", "</s>"])}, [(":", "A")]))
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="</s>")


def test_a_token_that_spans_prompt_and_answer_is_not_used():
    tokenizer = merging_tokenizer()
    assert tokenizer.tokenize("Stance:A")[-1] == ":A", "the tokeniser merges across the boundary"
    (example,) = encode(tokenizer, [("Stance:", "A")], 99, 99, raw_frame(tokenizer))
    (prompt,) = encode_prompts(tokenizer, ["Stance:"], 99, raw_frame(tokenizer))
    assert list(example.ids[: example.prompt]) == prompt, "training sees the prompt that a test sees"
    assert tokenizer.decode(example.ids[example.prompt : -1]) == "A" and example.ids[-1] == tokenizer.eos_token_id


def test_what_looks_like_a_special_token_in_a_text_is_text():
    tokenizer = train_tokenizer(["some text <|end|>"], 300)
    (example,) = encode(tokenizer, [("a <|end|> b", "c")], 99, 99, raw_frame(tokenizer))
    assert example.ids.count(tokenizer.eos_token_id) == 1


def test_a_tokeniser_without_padding_gets_one(llm_settings, tmp_path):
    """As Llama-3's."""
    tokenizer = word_tokenizer(pad_token=None)
    tokenizer.save_pretrained(tmp_path / "llama")
    loaded = load_tokenizer(replace(configured(llm_settings)[0], model=str(tmp_path / "llama")), [])
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == ("</s>", "<s>", "</s>")


def test_a_tokeniser_without_an_end_is_refused(llm_settings, tmp_path):
    word_tokenizer(eos_token=None).save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match="no token for the end of a text"):
        load_tokenizer(replace(configured(llm_settings)[0], model=str(tmp_path / "endless")), [])


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 200), st.sampled_from([0.0, 0.05, 0.1, 0.5])
)
def test_groups_hold_every_example_once_and_little_padding(lengths, most, padding):
    examples = [Example(tuple(range(length)), number) for number, length in enumerate(lengths)]
    groups = micro_batches(examples, most, padding)
    assert sorted(example.prompt for group in groups for example in group) == list(range(len(examples)))
    for group in groups:
        area = len(group) * max(map(len, group))
        assert area <= most or len(group) == 1
        assert area - sum(map(len, group)) <= padding * area


@pytest.mark.parametrize("ratio, count", [(0, 0), (0.3, 7), (1, 24)])
def test_the_head_of_each_earlier_file_is_replayed_after_the_pool(ratio, count, llm_settings):
    config, corpus = configured(llm_settings, llm__replay_ratio=ratio)
    pool, head = corpus.pool, corpus.tasks[0].train[:count]  # int(0.3 * 24)
    assert [epoch.replay for epoch in corpus.epochs(config, 0)] == [False, False, True]
    assert corpus.epochs(config, 0)[-1].examples == [corpus.encoded[item] for item in pool]
    assert corpus.epochs(config, 1)[-1].examples == [corpus.encoded[item] for item in (*pool, *head)]


def test_steps_hold_every_item_once_in_an_order_that_the_address_decides():
    epoch = shuffled(10, 4, 1, 0, 0)
    assert list(map(len, epoch)) == [4, 4, 2] and sorted(sum(epoch, [])) == list(range(10))
    assert (
        epoch == shuffled(10, 4, 1, 0, 0)
        and len({str(shuffled(10, 4, *address)) for address in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))}) == 4
    )


def test_losses_of_padded_batches_are_those_of_each_example_alone(llm_settings):
    """Against the logits of the whole sequence, without padding and without a batch."""
    config, corpus = configured(llm_settings)
    model, examples = load_model(config, corpus.tokenizer), list(corpus.encoded.values())[20:28]
    assert len(set(map(len, examples))) > 1 and len({example.prompt for example in examples}) > 1
    losses = summed_losses(model, collate(examples, corpus.tokenizer.pad_token_id))
    for loss, example in zip(losses, examples, strict=True):
        ids = torch.tensor([example.ids])
        expected = cross_entropy(
            model(ids).logits[0, example.prompt - 1 : -1], ids[0, example.prompt :], reduction="sum"
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_in_a_folder_is_loaded_without_a_hub(llm_settings, tmp_path):
    config, corpus = configured(llm_settings)
    torch.manual_seed(1)
    model = tiny_llama(config, corpus.tokenizer)
    for part in (model, corpus.tokenizer):
        part.save_pretrained(tmp_path / "model")
    config, corpus = configured(llm_settings, llm__model=str(tmp_path / "model"))
    loaded = load_model(config, corpus.tokenizer)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), loaded.parameters(), strict=True))
    assert (
        loaded.lm_head.weight is loaded.model.embed_tokens.weight
        and json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"]
    )


@pytest.mark.parametrize("model", ["no/such-folder-here", "./nowhere"])
def test_an_absent_model_is_one_clear_line(model, llm_settings):
    with pytest.raises(UserError, match="llm.model") as error:
        configured(llm_settings, llm__model=model)
    assert "\n" not in str(error.value)


def test_the_tiny_model_follows_from_the_seed(llm_settings):
    config, corpus = configured(llm_settings)
    torch.manual_seed(5)
    first = load_model(config, corpus.tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), load_model(config, corpus.tokenizer).parameters()))
    other = load_model(replace(config, seed=1), corpus.tokenizer)
    drawn = [name for name, parameter in first.named_parameters() if "norm" not in name]  # the others begin as ones
    assert drawn and not any(torch.equal(first.get_parameter(name), other.get_parameter(name)) for name in drawn)
    assert len(corpus.tokenizer) == 300 == first.config.vocab_size and tokens.PAD == corpus.tokenizer.pad_token


CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}|{{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant|{% endif %}"
)


def chat_tokenizer():
    tokenizer = train_tokenizer(["what is it a cat user assistant"], 300)
    tokenizer.add_tokens(["<|turn|>", "<s>"], special_tokens=True)
    tokenizer.chat_template = CHAT
    return tokenizer


def chosen(settings, **changes):
    return replace(configured(settings)[0], **changes)


def test_a_chat_template_frames_prompt_and_answer(llm_settings):
    """The tokens are those of the template's own text; a special token in a prompt is text."""
    tokenizer = chat_tokenizer()
    around = frame(tokenizer, chosen(llm_settings, chat_template=True))
    (example,) = encode(tokenizer, [("what is it", "a cat")], 99, 99, around)
    turns = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a cat"}]
    assert tokenizer.decode(example.ids) + "\n" == tokenizer.apply_chat_template(turns, tokenize=False)
    (prompt,) = encode_prompts(tokenizer, ["what is it"], 99, around)
    given = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt) == given and list(example.ids[: example.prompt]) == prompt
    assert example.ids[-1] == tokenizer.convert_tokens_to_ids("<|turn|>"), "the end of the turn is learned"
    (tricked,) = encode_prompts(tokenizer, ["a <|turn|> b"], 99, around)
    assert tricked.count(example.ids[-1]) == 1, "the template's own"
    short = encode_prompts(tokenizer, ["what is it a cat"], len(around.before) + len(around.after) + 2, around)[0]
    assert short[: len(around.before)] == list(around.before) and short[-len(around.after) :] == list(around.after)
    with pytest.raises(UserError, match="llm.max_prompt: 4 is too short"):
        encode_prompts(tokenizer, ["what"], 4, around)


TALK = [("system", "a cat"), ("user", "what"), ("assistant", "it is"), ("user", "what is it")]


def rendered(tokenizer, talk, **options):
    messages = [{"role": role, "content": content} for role, content in talk]
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_several_turns_have_the_templates_own_text_and_the_last_answer_alone_is_learned(llm_settings):
    tokenizer = chat_tokenizer()
    around = frame(tokenizer, chosen(llm_settings, chat_template=True))
    example, single = encode(tokenizer, [(TALK, "a cat"), ("what", "it")], 99, 99, around)
    assert tokenizer.decode(example.ids) + "\n" == rendered(tokenizer, [*TALK, ("assistant", "a cat")])
    prompt = rendered(tokenizer, TALK, add_generation_prompt=True)
    assert tokenizer.decode(example.ids[: example.prompt]) == prompt
    assert encode(tokenizer, [([("user", "what")], "it")], 99, 99, around) == [single]
    (tricked,) = encode_prompts(tokenizer, [[*TALK[:3], ("user", "a <|turn|> b")]], 99, around)
    assert tricked.count(example.ids[-1]) == 4, "the template's own"


def test_a_long_conversation_loses_its_earliest_turns_then_the_beginning_of_the_last(llm_settings):
    tokenizer = chat_tokenizer()
    around = frame(tokenizer, chosen(llm_settings, chat_template=True))
    talk = [*TALK[:1], ("user", "one"), ("assistant", "two"), *TALK[1:]]
    without = [[talk[0], *talk[start:]] for start in (1, 3, 5)]  # the earliest turns
    texts = [rendered(tokenizer, each, add_generation_prompt=True) for each in without]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    for limit in range(lengths[2], lengths[0] + 3):
        (prompt,) = encode_prompts(tokenizer, [talk], limit, around)
        fitting = [text for text, length in zip(texts, lengths) if length <= limit]
        assert tokenizer.decode(prompt) == fitting[0]
    (prompt,) = encode_prompts(tokenizer, [talk], lengths[2] - 1, around)
    assert len(prompt) == lengths[2] - 1 and tokenizer.decode(prompt).startswith("<s>system|a cat<|turn|>\n<s>user|")
    with pytest.raises(UserError, match="llm.max_prompt: 5 is too short"):
        encode_prompts(tokenizer, [talk], 5, around)


def test_several_turns_without_a_template_or_of_roles_that_it_refuses_are_one_clear_line(llm_settings):
    tokenizer = chat_tokenizer()
    with pytest.raises(UserError, match="llm.data: an item has messages of several turns, which need a chat template"):
        encode_prompts(tokenizer, [TALK], 99, raw_frame(tokenizer))
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    )
    around = frame(tokenizer, chosen(llm_settings, chat_template=True))
    with pytest.raises(UserError, match=r"does not take messages of system, user, assistant, user \(no system\)"):
        encode_prompts(tokenizer, [TALK], 99, around)


@pytest.mark.parametrize(
    "date", ["{{ date_string }}", "{{ strftime_now('%d %b %Y') }}", '{{ strftime_now( "%d %b %Y" ) }}']
)
def test_the_date_in_a_template_is_the_same_every_day(date, llm_settings):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = date + CHAT
    around = frame(tokenizer, chosen(llm_settings, chat_template=True))
    assert tokenizer.decode(around.before).startswith("26 Jul 2024")


@pytest.mark.parametrize(
    "wanted, model, template, chat",
    [
        (None, "some/Model-Instruct", CHAT, True),
        (None, "some/Model", None, False),
        (None, "meta-llama/Llama-3.2-1B-Instruct", CHAT, False),
        (True, "meta-llama/Llama-3.2-1B-Instruct", CHAT, True),
        (False, "some/Model-Instruct", CHAT, False),
    ],
)
def test_the_chat_template_is_used_where_there_is_one_but_not_for_the_papers_model(
    wanted, model, template, chat, llm_settings
):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    around = frame(tokenizer, chosen(llm_settings, chat_template=wanted, model=model))
    assert around.chat == chat
    if not chat:
        assert around == Frame((tokenizer.bos_token_id,), (), (tokenizer.eos_token_id,))


def test_a_chat_template_that_is_not_there_is_one_clear_line(llm_settings):
    with pytest.raises(UserError, match="llm.chat_template: the tokeniser of 'tiny-llama' has none"):
        configured(llm_settings, llm__chat_template=True)


def test_tasks_of_messages_are_trained_and_tested(llm_settings, tmp_path):
    from pycil_wsc.llm.trainer import LanguageRun

    tokenizer = chat_tokenizer()
    tiny_llama(configured(llm_settings)[0], tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    talk = [{"role": role, "content": content} for role, content in TALK]
    rows = [{"messages": [*talk, {"role": "assistant", "content": answer}]} for answer in ("a cat", "it")]
    for name in ("colours", "shapes"):
        for split in ("train", "test"):
            (tmp_path / "data" / "small" / name / f"{split}.json").write_text(json.dumps(rows))
    config, corpus = configured(llm_settings, llm__model=str(tmp_path / "model"), llm__epochs=[1, 1])
    assert {tokenizer.decode(prompt) for prompts in corpus.test_prompts for prompt in prompts} == {
        rendered(tokenizer, TALK, add_generation_prompt=True)
    }
    assert LanguageRun(config, corpus).execute()["steps"] == 4  # one step of each task, and one of replay each


def test_hyper_parameters_are_chosen_on_the_eval_items(llm_settings, tmp_path):
    with pytest.raises(UserError, match="llm.test_on: task 'colours' has no eval.json"):
        configured(llm_settings, llm__test_on="eval")
    rows = [{"prompt": f"A held-out item {number}:", "answer": "A"} for number in range(3)]
    for name in ("colours", "shapes"):
        (tmp_path / "data" / "small" / name / "eval.json").write_text(json.dumps(rows))
    _, corpus = configured(llm_settings, llm__test_on="eval", llm__test_items=2)
    assert [item.prompt for item in corpus.tasks[0].test] == ["A held-out item 0:", "A held-out item 1:"]
    assert not any("eval" in line for line in corpus.warnings)
