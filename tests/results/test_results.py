"""The results room: what runs write, and what readers make of earlier schemas."""

import json

import pytest
from support.small_runs import results

from pycil_wsc import registry
from pycil_wsc.config.dropped import DROPPED
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UnusableRun
from pycil_wsc.launch.command import main
from pycil_wsc.report.studies import STUDIES
from pycil_wsc.results import SCHEMA, Record, find_runs, read_result
from pycil_wsc.results.identity import STUDIED
from pycil_wsc.results.old_schemas import EXPANDED, LANGUAGE_INCIDENTAL, _unused_memory


def as_in_schema_1(contents):
    return {name: value for name, value in contents.items() if name not in ("schema", "identity")}


@pytest.mark.parametrize("keys", [{"model_name": "wsc"}, {"model_name": "replay", "consolidate": True, "max_tasks": 2}])
def test_a_run_writes_the_identity_that_readers_derive_for_earlier_results(keys, undisturbed):
    folder, result = undisturbed(**keys)
    (record,) = find_runs([folder]).records
    assert result["schema"] == SCHEMA
    assert Record.of(as_in_schema_1(result)).identity == record.identity
    assert read_result(folder / "result.json")["matrix"] == result["matrix"]


@pytest.mark.slow
def test_a_language_model_writes_the_identity_that_readers_derive_for_earlier_results(llm_settings, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llm_settings))
    assert main(["--config", str(path)]) == 0
    (result,) = results(llm_settings).values()
    assert result["schema"] == SCHEMA
    assert Record.of(as_in_schema_1(result)).identity == Record.of(result).identity


def test_what_did_not_decide_an_earlier_language_models_result_does_not_now():
    from pycil_wsc.keys import RESULT
    from pycil_wsc.llm.config import KEYS

    decided_nothing = {name for name, key in KEYS.items() if key.decides not in RESULT}
    assert LANGUAGE_INCIDENTAL - {"label", *DROPPED} == decided_nothing


@pytest.mark.parametrize("schema", [2.0, True, "2", None, SCHEMA + 1])
def test_another_schema_is_one_line(schema, undisturbed):
    _, result = undisturbed(model_name="replay")
    with pytest.raises(UnusableRun, match="is a result of another version"):
        Record.of(result | {"schema": schema})


def test_a_result_of_the_present_schema_without_an_identity_is_refused(undisturbed):
    _, result = undisturbed(model_name="replay")
    with pytest.raises(UnusableRun, match="'identity' is missing"):
        Record.of({name: value for name, value in result.items() if name != "identity"})


@pytest.mark.parametrize("model_name, grows", [("der", True), ("replay", False)])
def test_a_run_records_whether_its_network_grows_and_readers_know_it_of_earlier_results(model_name, grows, undisturbed):
    _, result = undisturbed(model_name=model_name)
    assert result["expands"] is grows
    assert Record.of(result).expands is grows
    before = {name: value for name, value in result.items() if name != "expands"}
    assert Record.of(before).expands is grows
    assert Record.of(result | {"expands": not grows}).expands is not grows, "the run decides, not a list of names"


def test_what_readers_know_of_earlier_methods_is_what_the_methods_say_of_themselves():
    assert {name for name, learner in registry.learners.items() if learner.Plan.expands} >= EXPANDED
    for name, learner in registry.learners.items():
        for fixed_memory in (False,) if name in ("gss", "hal", "xder") else (True, False):
            config = resolve({"model_name": name, "fixed_memory": fixed_memory, "memory_size": 100})
            unused, _ = config.memory_keys
            read = unused in learner.Plan(config).also_reads()
            assert (unused in _unused_memory(config.recorded())) != read, name


def test_the_keys_of_the_papers_studies_are_those_that_the_tables_of_the_report_vary():
    varied = [key for study in STUDIES for key in study.studied]
    assert set(STUDIED) == set(varied)
    assert list(STUDIED)[-1] == "exemplars", "which names of runs have last"
