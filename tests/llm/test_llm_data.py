"""TRACE's folder format: reading, errors, replay and warnings."""

import json

import pytest

pytest.importorskip("rapidfuzz")
pytest.importorskip("sacrebleu")

from pycil_wsc.errors import UserError
from pycil_wsc.llm.data import TASKS, Item, TaskData, TaskInfo, Turn, load_pool, load_task, warnings_of


def rows(count, start=0):
    return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(start, start + count)]


def write_task(root, name, train=rows(5), evaluation=rows(2, 5), test=rows(3, 7), info=None):
    folder = root / name
    folder.mkdir()
    for split, content in (("train", train), ("eval", evaluation), ("test", test), ("task", info)):
        if content is not None:
            (folder / f"{split}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_task_is_what_its_files_say(tmp_path):
    write_task(tmp_path, "FOMC", train=[{"prompt": "Grüezi 态度：\n", "answer": " A\n", "source": "ignored"}])
    loaded = load_task(tmp_path, "FOMC")
    assert loaded.train == (Item("Grüezi 态度：\n", " A\n"),)  # nothing stripped
    assert [item.answer for item in loaded.eval] == ["6", "7"] and len(loaded.test) == 3
    assert loaded.info == TASKS["FOMC"] == TaskInfo("exact_match", 3)


def test_the_order_and_epochs_are_traces():
    assert list(TASKS) == [
        "C-STANCE",
        "FOMC",
        "MeetingBank",
        "Py150",
        "ScienceQA",
        "NumGLUE-cm",
        "NumGLUE-ds",
        "20Minuten",
    ]
    assert [info.epochs for info in TASKS.values()] == [5, 3, 7, 5, 3, 5, 5, 7]


def test_your_own_task_is_a_folder_that_says_its_metric_or_none(tmp_path):
    write_task(tmp_path, "plain", evaluation=None)
    write_task(tmp_path, "scored", info={"metric": "rouge_l", "epochs": 2})
    write_task(tmp_path, "20Minuten", info={"epochs": 1})
    assert load_task(tmp_path, "plain").info.metric == "exact_match" and load_task(tmp_path, "plain").eval == ()
    assert load_task(tmp_path, "scored").info == TaskInfo("rouge_l", 2)
    assert load_task(str(tmp_path), "20Minuten").info == TaskInfo("sari", 1)


def test_the_pool_needs_no_test_answers(tmp_path):
    write_task(tmp_path, "Lima", test=[{"prompt": "Why?", "answer": ""}])
    assert load_pool(tmp_path, "Lima") == load_task_train(tmp_path)


def message(role, content):
    return {"role": role, "content": content}


def test_a_list_of_messages_is_the_turns_and_the_answer_to_the_last_and_a_single_turn_is_a_prompt(tmp_path):
    turns = [
        message("system", "Be brief."),
        message("user", "Hi"),
        message("assistant", "Yes?"),
        message("user", "Why?"),
    ]
    answer = message("assistant", "So.")
    both = {"messages": [message("user", "Ignored"), answer], "prompt": "Who?", "answer": "I."}
    rows = [{"messages": [*turns, answer]}, {"messages": [message("user", "Why?"), answer]}, both]
    write_task(tmp_path, "chats", train=rows)
    several, single, plain = load_task(tmp_path, "chats").train
    assert several.prompt == tuple(Turn(**turn) for turn in turns) and several.answer == "So."
    assert several.question == "Why?"
    assert single == Item("Why?", "So.") and plain == Item("Who?", "I.")


def test_items_of_one_prompt_are_hashed_as_they_always_were():
    """The fingerprint of a run's data, which finished runs are compared by, has their text."""
    assert repr(Item("Why?", "So.")) == "Item(prompt='Why?', answer='So.')"


@pytest.mark.parametrize(
    "messages, says",
    [
        ("Why?", "'messages': not a list of two or more messages"),
        ([message("assistant", "So.")], "'messages': not a list of two or more messages"),
        ([message("user", "a"), message("user", "b")], "ends with a message of user and one of user"),
        ([message("system", "a"), message("assistant", "b")], "ends with a message of system and one of assistant"),
        ([message("user", "a"), message("asistant", "b")], "message 2: role 'asistant' is unknown; did you mean 'assi"),
        ([message("user", ["a"]), message("assistant", "b")], "message 1: no text 'content'"),
        (["Why?", message("assistant", "b")], "message 1: not an object"),
        ([message("user", "\ud800"), message("assistant", "b")], "message 1, 'content': has a lone surrogate"),
        ([message("user", "a"), message("assistant", " ")], "'answer': empty"),
        (
            [message("user", "a"), message("system", "b"), message("user", "c"), message("assistant", "d")],
            "has a system prompt that is not the first message",
        ),
    ],
)
def test_bad_messages_are_one_line_with_file_row_and_message(tmp_path, messages, says):
    folder = write_task(tmp_path, "chats", train=[*rows(1), {"messages": messages}])
    with pytest.raises(UserError) as caught:
        load_task(tmp_path, "chats")
    message = str(caught.value)
    assert message.startswith(f"{folder / 'train.json'}, row 2") and says in message and "\n" not in message


def load_task_train(root):
    return tuple(Item(**row) for row in json.loads((root / "Lima" / "train.json").read_text()))


@pytest.mark.parametrize(
    "train, says",
    [
        ([*rows(2), {"prompt": "p"}], "row 3 (counted from 1): no text 'answer'"),
        ([{"prompt": "p", "anwser": "a"}], "row 1 (counted from 1): no text 'answer'"),
        ([*rows(1), {"prompt": "p", "answer": " \n"}], "row 2 (counted from 1), 'answer': empty"),
        ([{"prompt": "p", "answer": 3}], "row 1 (counted from 1): no text 'answer'"),
        ([{"prompt": None, "answer": "a"}], "row 1 (counted from 1): no text 'prompt'"),
        ([{"prompt": "\ud800", "answer": "a"}], "has a lone surrogate"),
        ([["p", "a"]], "row 1 (counted from 1): not an object"),
        ({"prompt": "p", "answer": "a"}, "not a list of rows"),
        ([], "not a list of rows"),
        ('[{"prompt": "p",\n "answer": a}]', "not valid JSON (Expecting value: line 2 column 12"),
        ('{"prompt": "p", "answer": "a"}\n{"prompt": "q", "answer": "b"}', "not valid JSON (Extra data: line 2"),
        ("[" * 100_000, "not valid JSON"),
        (None, "train.json: cannot be read (No such file"),
    ],
)
def test_bad_rows_are_one_line_with_file_and_row(tmp_path, train, says):
    folder = write_task(tmp_path, "mine", train=train)
    with pytest.raises(UserError) as caught:
        load_task(tmp_path, "mine")
    message = str(caught.value)
    assert message.startswith(str(folder / "train.json")) and says in message and "\n" not in message


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (write_task(tmp_path, "mine") / "test.json").write_bytes(b'[{"prompt": "\xff", "answer": "a"}]')
    with pytest.raises(UserError, match=r"test\.json: not valid JSON \('utf-8'"):
        load_task(tmp_path, "mine")


@pytest.mark.parametrize(
    "info, says",
    [
        ({"metrics": "sari"}, "unknown key 'metrics'; did you mean 'metric'?"),
        ({"metric": "rouge"}, "metric: 'rouge' is not one of exact_match, choice, rouge_l"),
        ({"metric": 1}, "metric: expected a string, got 1"),
        ({"epochs": 0}, "epochs: 0 is below 1"),
        ({"epochs": True}, "epochs: expected a whole number, got true"),
        (["sari"], "not a JSON object"),
    ],
)
def test_a_bad_task_file_is_one_line(tmp_path, info, says):
    folder = write_task(tmp_path, "mine", info=info)
    with pytest.raises(UserError) as caught:
        load_task(tmp_path, "mine")
    assert str(caught.value).startswith(str(folder / "task.json")) and says in str(caught.value)


def test_a_folder_that_is_not_there_is_named_with_the_nearest(tmp_path):
    write_task(tmp_path, "NumGLUE-cm")
    with pytest.raises(UserError, match="did you mean 'NumGLUE-cm'"):
        load_task(tmp_path, "NumGLUE_cm")
    with pytest.raises(UserError, match="no such folder"):
        load_task(tmp_path / "nowhere", "FOMC")


def items(*prompts):
    return tuple(Item(prompt, "x") for prompt in prompts)


def test_clean_tasks_give_no_warning():
    assert list(warnings_of(TaskData("clean", items("a", "b"), items("c"), items("d")))) == []


@pytest.mark.parametrize(
    "train, evaluation, test, says",
    [
        ("ab", "c", "adb", "2 of 3 test prompts are training prompts too"),
        ("aab", "c", "d", "train has 2 different prompts in 3 rows"),
        ("ab", "c", "dde", "test has 2 different prompts in 3 rows"),
        ("ab", "cd", "dc", "eval and test hold the same prompts"),
        ("ab", "cd", "de", "1 of 2 different test prompts are in eval too"),
    ],
)
def test_each_trap_is_measured_and_warned_about_by_itself(train, evaluation, test, says):
    (line,) = warnings_of(TaskData("FOMC", items(*train), items(*evaluation), items(*test)))
    assert line.startswith(says)
