"""What several tests share: see ``test_report.py``."""

ODD = [
    None,
    "",
    "text",
    True,
    -1,
    10**400,
    float("nan"),
    float("inf"),
    [],
    [[]],
    [None],
    {},
    {"a": 1},
    [[1], [2, 3, 4]],
]
