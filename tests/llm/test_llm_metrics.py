"""Scores of text against the packages that TRACE uses, slow definitions and hand-worked examples."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("rapidfuzz")
pytest.importorskip("sacrebleu")

from pycil_wsc.llm.metrics import (
    METRICS,
    VERSIONS,
    rouge_l,
    rouge_l_union,
    sari,
    score,
    summary,
    trivial_scores,
)

EVERY = [(metric, version) for metric in METRICS for version in VERSIONS]
prose = st.text(alphabet="ab cC.é\n", max_size=40)
words = st.lists(st.sampled_from("abc"), min_size=1, max_size=8).map(" ".join)


def one(metric, prediction, answer, version, prompt="p"):
    return score(metric, [prediction], [answer], [prompt], version)


@pytest.mark.parametrize(
    "metric, prediction, answer, trace, fixed",
    [
        ("exact_match", "12", "12", 1, 1),
        ("exact_match", " 12\n", "12", 0, 1),
        ("exact_match", "12", "13", 0, 0),
        ("exact_match", "", "12", 0, 0),
        ("exact_match", "C.", "C", 0, 1),
        ("exact_match", "'C'。\n", "C", 0, 1),
        ("exact_match", "(C).", "C", 0, 1),
        ("exact_match", "C. Neutral", "C", 0, 0),
        ("exact_match", "-5", "5", 0, 0),
        ("exact_match", ".5", "5", 0, 0),
        ("exact_match", "5%", "5", 0, 0),
        ("exact_match", "", "...", 0, 0),
        ("choice", "B\nBecause", "B\nAs", 1, 1),
        ("choice", " B", "B\nAs", 0, 1),
        ("choice", "(b) it is", "B\nAs", 0, 1),
        ("choice", "Because", "B\nAs", 1, 0),
        ("choice", "", "B\nAs", 0, 0),
    ],
)
def test_labels_are_compared_as_trace_does_and_as_it_should(metric, prediction, answer, trace, fixed):
    assert (one(metric, prediction, answer, "trace"), one(metric, prediction, answer, "fixed")) == (trace, fixed)


@settings(deadline=None)
@given(prose, prose)
def test_traces_rouge_is_the_rouge_packages_with_arguments_exchanged(prediction, answer):
    package = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"])
    try:
        expected = package.get_scores(answer, prediction, avg=True)["rouge-l"]["f"]
    except ValueError:  # no sentence at all
        expected = 0.0
    assert rouge_l_union(prediction, answer) == pytest.approx(expected, abs=1e-12)


def test_exchanging_the_arguments_matters_where_subsequences_tie():
    prediction, answer = "a c a", "c a a"  # "a a" or "c a": the package takes the one found first
    package = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"])
    assert (
        package.get_scores(answer, prediction)[0]["rouge-l"]["f"]
        == pytest.approx(rouge_l_union(prediction, answer))
        == pytest.approx(1)
    )
    assert (
        package.get_scores(prediction, answer)[0]["rouge-l"]["f"]
        == pytest.approx(rouge_l_union(answer, prediction))
        == pytest.approx(0.5)
    )


def test_a_sentence_too_long_for_the_package_is_computed():
    long = " ".join(f"w{i}" for i in range(700))
    assert rouge_l_union(long, long) == pytest.approx(1)
    assert rouge_l_union(long, "w3 w9") == pytest.approx(2 * 2 / 702)


@settings(deadline=None)
@given(prose, prose)
def test_the_fixed_rouge_is_rouge_scores(prediction, answer):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    assert rouge_l(prediction, answer) == pytest.approx(scorer.score(answer, prediction)["rougeL"].fmeasure)


@settings(deadline=None)
@given(st.text(alphabet="ab <>", max_size=30), st.text(alphabet="ab <>", max_size=30))
def test_traces_edit_similarity_is_fuzzywuzzys(prediction, answer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for python-Levenshtein
        fuzz = pytest.importorskip("fuzzywuzzy.fuzz")
    assert one("edit_similarity", prediction, answer, "trace") == pytest.approx(
        fuzz.ratio(prediction, answer) / 100 if prediction and answer else 0
    )


def test_traces_edit_similarity_of_a_long_text_has_difflibs_heuristic():
    assert one("edit_similarity", "abc", "abc", "trace") == 1
    assert one("edit_similarity", "ab", "ba", "trace") == 0.5
    assert one("edit_similarity", "abc", "abd", "trace") == 0.67  # whole percent
    assert one("edit_similarity", "b", "ab" * 150, "trace") == 0  # from 200 characters on difflib ignores frequent ones


@settings(deadline=None)
@given(st.text(alphabet="abc", max_size=12), st.text(alphabet="abc", max_size=12))
def test_the_fixed_edit_similarity_is_twice_the_longest_common_subsequence_over_the_lengths(prediction, answer):
    total = len(prediction) + len(answer)
    expected = 2 * longest_common_subsequence(prediction, answer) / total if total else 1
    assert one("edit_similarity", f" {prediction}\n", answer, "fixed") == pytest.approx(expected)


def longest_common_subsequence(first, second):
    table = np.zeros((len(first) + 1, len(second) + 1), int)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
    return table[-1, -1]


@pytest.mark.parametrize("version", VERSIONS)
def test_literals_of_code_are_put_in_their_place(version):
    masked = "f ( '<STR_LIT:utf-8>' , <NUM_LIT:5> , <NUM_LIT> , '<CHAR_LIT:x>' , '<STR_LIT>' )"
    assert one("edit_similarity", "f ( 'utf-8' , 5 , 0 , 'x' , '' )", masked, version) == 1


def test_sari_of_the_documented_example():
    references = [
        "About 95 species are currently known .",
        "About 95 species are now accepted .",
        "95 species are now accepted .",
    ]
    assert 100 * sari(
        "About 95 species are currently accepted .", "About 95 you now get in .", references
    ) == pytest.approx(26.9536, abs=5e-5)


@settings(max_examples=60, deadline=None)
@given(words, words, st.lists(words, min_size=1, max_size=3))
def test_sari_is_its_definition_counted_one_gram_at_a_time(source, output, references):
    assert sari(source, output, references) == pytest.approx(slow_sari(source, output, references))


def slow_sari(source, output, references):
    scores = []
    for n in range(1, 5):
        grams = [
            [tuple(text.split()[i : i + n]) for i in range(len(text.split()) - n + 1)]
            for text in (source, output, *references)
        ]
        in_source, in_output = ((lambda gram, k=k: len(references) * grams[k].count(gram)) for k in (0, 1))
        wanted = lambda gram: sum(reference.count(gram) for reference in grams[2:])  # noqa: E731
        every = {gram for text in grams for gram in text}
        kept = {g: min(in_source(g), in_output(g)) for g in every if min(in_source(g), in_output(g))}
        right = {g: min(count, wanted(g)) for g, count in kept.items()}
        should = sum(min(in_source(g), wanted(g)) for g in every)
        scores.append(f1(mean([right[g] / kept[g] for g in kept]), sum(right.values()) / should if should else 1))
        dropped = {g: in_source(g) - in_output(g) for g in every if in_source(g) > in_output(g)}
        scores.append(mean([max(0, count - wanted(g)) / count for g, count in dropped.items()]))
        new, missing = ([g for g in every if present(g) and not in_source(g)] for present in (in_output, wanted))
        scores.append(f1(mean([bool(wanted(g)) for g in new]), mean([bool(in_output(g)) for g in missing])))
    return sum(scores) / 12


def mean(values):
    return sum(values) / len(values) if values else 1


def f1(precision, recall):
    return 2 * precision * recall / (precision + recall) if precision + recall else 0


def test_text_is_cut_as_sacrebleus_13a_does_and_lower_cased():
    assert sari("Das ist gut.", "DAS ist gut .", ["das ist gut."]) == 1


def test_the_fixed_sari_has_the_paragraph_as_source_and_gives_nothing_for_nothing():
    prompt = (
        "Provide a simplified version of the following paragraph in German.\n\n"
        "Paragraph:\nDas Haus ist alt.\n\nSimplification:"
    )
    assert one("sari", "Ein Haus", "Das Haus", "trace", prompt) == sari(prompt, "Ein Haus", ["Das Haus"])
    assert one("sari", " Ein Haus\n", "Das Haus\n", "fixed", prompt) == sari(
        "Das Haus ist alt.", "Ein Haus", ["Das Haus"]
    )
    assert one("sari", "Ein Haus", "Das Haus", "fixed", "Kürze: Das Haus ist alt.") == sari(
        "Kürze: Das Haus ist alt.", "Ein Haus", ["Das Haus"]
    )
    assert one("sari", " ", "Das Haus", "fixed", prompt) == 0 < one("sari", "", "Das Haus", "trace", prompt)


@pytest.mark.parametrize("metric, version", EVERY)
def test_no_prediction_crashes_a_metric(metric, version):
    odd = [
        "",
        " ",
        ".",
        "...",
        ". .",
        "\n",
        "\0",
        "😀",
        "<STR_LIT:",
        "<STR_LIT>",
        "态度",
        "a" * 3000,
        "w " * 600,
        "(",
        "B",
    ]
    for answer in ("B", "B. Well.", "<STR_LIT>", "..."):
        assert all(0 <= one(metric, text, answer, version) <= 1 for text in odd)


@pytest.mark.parametrize("metric, version", EVERY)
def test_the_answer_itself_scores_one_and_the_score_is_a_mean(metric, version):
    answers, prompts = ["A dog. It barks", "b"], ["Say: a big dog barks", "q"]
    assert score(metric, answers, answers, prompts, version) == pytest.approx(1, abs=1e-7)
    wrong = one(metric, "zz", answers[1], version, prompts[1])
    right = one(metric, answers[0], answers[0], version, prompts[0])
    assert wrong < right
    assert score(metric, [answers[0], "zz"], answers, prompts, version) == pytest.approx((right + wrong) / 2)


@pytest.mark.parametrize(
    "call",
    [
        ("rouge", ["a"], ["a"], ["p"]),
        ("exact_match", ["a"], ["a", "b"], ["p", "q"]),
        ("exact_match", ["a"], ["a"], ["p"], "new"),
    ],
)
def test_misuse_is_refused(call):
    with pytest.raises((ValueError, KeyError)):
        score(*call)


def task(metric, *pairs):
    prompts, answers = zip(*pairs)
    return metric, answers, prompts


def test_the_majority_is_the_best_constant():
    assert trivial_scores(*task("exact_match", ("1", "A"), ("2", "B"), ("3", "A"), ("4", "A"))) == {"majority": 0.75}
    assert trivial_scores(*task("choice", ("1", "A\nx"), ("2", "B\ny"), ("3", "B\nz")), "fixed") == {
        "majority": pytest.approx(2 / 3)
    }
    assert trivial_scores(*task("choice", ("1", "(B)"), ("2", "(A)"), ("3", "(B)")), "fixed") == {
        "majority": pytest.approx(2 / 3)
    }
    answers = [("1", "Yes"), ("2", "Yes."), ("3", "Yes!"), ("4", "no"), ("5", "no")]
    assert trivial_scores(*task("exact_match", *answers), "fixed") == {"majority": pytest.approx(3 / 5)}


@pytest.mark.parametrize("answers", [["A", "(B)", "c."], ["1", "(2)", "3: three"]])
def test_the_right_choice_is_right_whether_letters_or_digits(answers):
    assert score("choice", answers, answers, ["?"] * 3, "fixed") == 1
    assert score("choice", answers[1:] + answers[:1], answers, ["?"] * 3, "fixed") == 0


def test_the_lead_is_five_hundred_characters_of_the_transcript():
    prompt = "Write a summary of the following meeting transcripts.\nMeeting transcripts:\nThe vote is open.\nSummary:"
    assert trivial_scores(*task("rouge_l", (prompt, "The vote is open")), "fixed") == {"lead": 1}
    assert trivial_scores(*task("rouge_l", ("open " * 100 + "closed " * 100, "open " * 100)), "fixed") == {"lead": 1}


def test_shuffled_answers_are_those_of_all_other_items_in_turn():
    pairs = [("p", "ab"), ("p", "ba"), ("p", "zz")]
    assert trivial_scores(*task("edit_similarity", *pairs)) == {
        "shuffled": pytest.approx((0.5 + 0 + 0.5 + 0 + 0 + 0) / 6)
    }
    assert trivial_scores(*task("edit_similarity", pairs[0])) == {}


def test_saris_trivial_answers_are_nothing_and_the_source():
    assert trivial_scores(*task("sari", ("ein Hund bellt", "ein Hund bellt"))) == {
        "empty": sari("ein Hund bellt", "", ["ein Hund bellt"]),
        "source": 1,
    }


def test_the_summary_of_a_hand_worked_matrix():
    result = summary([[0.9], [0.6, 0.8], [0.7, 0.5, 0.85]])
    assert result["op"] == pytest.approx([0.9, 0.7, 2.05 / 3]) and result["last_average"] == result["op"][-1]
    assert result["bwt"] == pytest.approx([0, -0.3 / 2, (-0.2 - 0.3 + 0) / 3])
    assert result["new_score"] == pytest.approx((0.9 + 0.8 + 0.85) / 3)
    assert result["forgetting"] == pytest.approx((0.2 + 0.3) / 2)
    assert summary([[0.4]]) == {"last_average": 0.4, "op": [0.4], "bwt": [0.0], "new_score": 0.4, "forgetting": 0.0}
