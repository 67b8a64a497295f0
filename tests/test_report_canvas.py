"""No figure loses text: with many methods and long names every legend, label and title lies inside the canvas."""

import pytest
import synthetic

from pycil_wsc.report.figures import figures
from pycil_wsc.report.groups import group_runs
from pycil_wsc.report.style import drawing
from pycil_wsc.results import Record

METHODS = ("der", "foster", "memo", "finetune", "replay", "icarl", "bic", "wa", "joint", "wsc", "icarl+wsc", "a" * 40)


@pytest.mark.parametrize("memories", [(20,), (20, 200)])
def test_every_text_lies_inside_the_canvas(memories):
    runs = [synthetic.result(name, memory, losses=1, classes=20) for name in METHODS for memory in memories]
    runs += [synthetic.result("wa", 20, losses=1, classes=20, milestones=[i, i + 9, 150]) for i in (2, 3, 4)]
    (group,) = group_runs([Record.of(run) for run in runs])[0]
    with drawing():
        for plot in figures(group):
            plot.figure.draw_without_rendering()
            drawn, (width, height) = plot.figure.get_tightbbox(), plot.figure.get_size_inches()
            assert drawn.x0 >= -0.02 and drawn.y0 >= -0.02, plot.slug
            assert drawn.x1 <= width + 0.02 and drawn.y1 <= height + 0.02, plot.slug
