"""Runs of one setting, the places they take in the paper's studies, and the names that tell them apart."""

import json
import re
from collections import Counter, defaultdict

from pycil_wsc.config.options import INCIDENTAL
from pycil_wsc.report import paper

SAME_ROW = INCIDENTAL | {"model_name", "consolidate", "memory_size", "memory_per_class", "fixed_memory", "seed"}
STUDIED = {
    "wsc.importance": "moment",
    "wsc.reset": "blend",
    "wsc.reset_every": "once",
    "wsc.average": True,
    "wsc.retain": 0.2,
    "exemplars": "herding",
}
ORDER = ["der", "foster", "memo", "finetune", "replay", "icarl", "bic", "wa", "joint", "wsc"]


class Group:
    """The runs of one :class:`~pycil_wsc.report.runs.Setting`. A study varies one key of ``STUDIED``; other runs have its usual value."""

    not_named = ()  # keys that never name a run, beside SAME_ROW
    alone = True  # no other group was tested on held-out training data

    def __init__(self, setting, records):
        self.setting, self.records = (
            setting,
            sorted(records, key=lambda record: (method_rank(record.method), record.memory, record.config["seed"])),
        )
        self.usual = {name: self._usual(name) for name in STUDIED}
        self.reference = paper.tables(setting)

    def _usual(self, name):
        """The paper's value where there is a run with it, else the value that most runs have."""
        values = Counter(position(record, name) for record in self.records if name in record.config)
        return STUDIED[name] if STUDIED[name] in values or not values else values.most_common(1)[0][0]

    def deviations(self, record):
        """The studied keys in which ``record`` is not as usual."""
        return {name for name in STUDIED if name in record.config and position(record, name) != self.usual[name]}

    def base(self):
        """The runs that belong to no study: what the main tables and figures show."""
        return [record for record in self.records if not self.deviations(record)]

    @property
    def slug(self):
        """Names the files of the group."""
        share = 100 * self.setting.validation_split
        dataset, convnet = (
            re.sub(r"[^\w.]+", "-", name).strip("-.")[-60:]
            for name in (self.setting.dataset, self.setting.convnet_type)
        )
        return f"{dataset}-b{self.setting.init_cls}-inc{self.setting.increment}-{convnet}{'' if self.setting.fixed_memory else '-total'}{f'-validation{share:g}' if share else ''}"

    @property
    def title(self):
        setting, tasks = (
            self.setting,
            Counter(len(record.data["curve"]) for record in self.records).most_common(1)[0][0],
        )
        first = f", the first of {setting.init_cls}" if setting.init_cls != setting.increment else ""
        name = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "imagenet100": "ImageNet-100"}.get(
            setting.dataset, setting.dataset
        )
        held_out = (
            f", tested on {100 * setting.validation_split:g} % held out of the training data"
            if setting.validation_split
            else ""
        )
        return f"{name}, {tasks} tasks of {setting.increment} classes{first}, {setting.convnet_type}{held_out}"

    @property
    def memory_title(self):
        return "exemplars per class" if self.setting.fixed_memory else "exemplars in all"


def group_runs(records):
    """One :class:`Group` for each setting, and what was left out: ``(groups, [(path, why)])``. The same run twice counts once."""
    settings, doubles = defaultdict(list), []
    for record in records:
        settings[record.setting].append(record)
    groups = []
    for setting, found in sorted(settings.items(), key=lambda item: (item[0].dataset, -item[0].increment, item[0])):
        first = {}
        for record, name in label(found, lambda record: record.method).items():
            same = first.setdefault((name, record.memory, record.config["seed"]), record)
            if same is not record:
                doubles.append((record.path, f"the same run as {same.path}; counted once"))
        groups.append(Group(setting, first.values()))
    for group in groups:
        group.alone = sum(bool(setting.validation_split) for setting in settings) < 2
    return groups, doubles


def label(records, base, studied=()):
    """``{record: name}``: the ``base`` name, and the keys that tell apart runs of one base name. ``studied`` keys are in the base name."""
    alike = defaultdict(list)
    for record in records:
        if (name := base(record)) is not None:
            alike[name].append(record)
    names = {}
    for name, members in alike.items():
        keys = telling_keys(members, SAME_ROW | set(studied))
        for record in members:
            keys_here = {*keys, *unusual(record) - set(studied)}
            shown = [key for key in record.config if key in keys_here]
            names[record] = " ".join([name, *(f"{key}={_plain(record.config[key])}" for key in shown)])
    return names


def telling_keys(records, skipped):
    """The fewest keys, in the configuration's order, that tell the records' configurations apart. A record of an older version may lack a key."""
    keys, parts = [], {record: () for record in records}
    names = dict.fromkeys(name for record in records for name in record.config)
    for name in names:
        values = {record: json.dumps(record.config[name]) if name in record.config else None for record in records}
        if name in skipped or len(set(values.values()) - {None}) < 2:
            continue
        finer = {record: (*parts[record], values[record]) for record in records}
        if len(set(finer.values())) > len(set(parts.values())):
            keys, parts = [*keys, name], finer
    return keys


def position(record, name):
    """The value of a studied key; exemplars chosen at random are no study of the paper."""
    value = record.config.get(name, STUDIED[name])
    return (
        STUDIED[name]
        if (name, value) == ("exemplars", "random")
        else _plain(value)
        if isinstance(value, (list, dict))
        else value
    )


def unusual(record):
    """The studied keys in which ``record`` is not as the paper's method is."""
    return {name for name, value in STUDIED.items() if position(record, name) != value}


def method_rank(method):
    """The paper's order: expanding methods first, then the others, consolidated ones and WSC last."""
    base = method.removesuffix("+wsc")
    return (ORDER.index(base) if base in ORDER else len(ORDER), method != base, method)


def _plain(value):
    return value if isinstance(value, str) else json.dumps(value)
