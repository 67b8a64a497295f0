"""The report's page as a real browser draws it, on the screens of a computer and of a telephone."""

import html
import json
import shutil
import subprocess
from pathlib import Path
from unittest.mock import patch

import matplotlib
import pytest
from PIL import ImageFont
from support import synthetic

from pycil_wsc import report

BROWSERS = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome")
COMPUTER, TELEPHONE = 1280, 390  # pixels
TEXTS = {"10 exemplars per class": 9.5, "accuracy on all classes seen (%)": 9, "classes of task": 9}  # sizes in points

# Each screen is a frame. A figure's image is measured where it is, then its texts in a copy of it of the same size.
MEASURE = """
const screens = [...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument;
  const images = [...page.querySelectorAll("figure img")].map(image => {
    const box = image.getBoundingClientRect();
    const source = atob(image.currentSrc.split(",")[1]);
    const svg = page.importNode(new DOMParser().parseFromString(source, "image/svg+xml").documentElement, true);
    svg.style.width = box.width + "px";
    svg.style.height = box.height + "px";
    page.body.append(svg);
    const scale = box.width / svg.viewBox.baseVal.width;
    const texts = [...svg.querySelectorAll("g[id^=text]")].map(text => {
      const ink = text.getBoundingClientRect();
      const comment = [...text.childNodes].find(node => node.nodeType === Node.COMMENT_NODE);
      return {text: comment.data.trim(), width: ink.width / scale, height: ink.height / scale};
    });
    svg.remove();
    return {left: box.left, right: box.right, scale, texts};
  });
  return {width: page.documentElement.scrollWidth, images};
});
document.querySelector("pre").textContent = JSON.stringify(screens);
"""


@pytest.fixture(scope="module")
def screens(tmp_path_factory):
    """What a browser shows of a report: ``{width of the screen: measures of the page and its images}``."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "screens.html").write_text(framed(small_report(folder / "runs").read_text()))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [browser, *options, "--dump-dom", (folder / "screens.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "<pre>" not in shown.stdout:
        pytest.skip(f"{browser} did not open the page: {shown.stderr[-300:]}")
    measures = shown.stdout.partition("<pre>")[2].partition("</pre>")[0]
    return dict(zip((COMPUTER, TELEPHONE), json.loads(html.unescape(measures))))


def small_report(folder):
    """The page of a report with figures of curves in two panels, of one panel, and of maps."""
    from pycil_wsc.report import page

    def some(group):
        return (plot for plot in figures(group) if plot.slug in ("curves", "accuracy-time", "matrix-m10"))

    figures = page.figures
    made = [synthetic.result(name, memory, classes=20) for name in ("replay", "wsc") for memory in (10, 100)]
    synthetic.write(folder, *made)
    with patch.object(page, "figures", some):
        return report.write_report(folder)


def framed(page):
    """A page that shows ``page`` on both screens and measures it there."""
    frames = ""
    for width in (COMPUTER, TELEPHONE):
        frames += f'<iframe style="border: 0; width: {width}px; height: 800px" srcdoc="{html.escape(page)}"></iframe>'
    return f"<!doctype html><meta charset=utf-8>{frames}<pre></pre><script>onload = () => {{{MEASURE}}}</script>"


@pytest.mark.slow
@pytest.mark.parametrize("width", [COMPUTER, TELEPHONE])
def test_text_in_a_figure_has_the_size_of_its_font(width, screens):
    """The same text, set by Pillow in the same font, is as wide and as high."""
    found = {text["text"]: text for image in screens[width]["images"] for text in image["texts"]}
    for text, points in TEXTS.items():
        left, top, right, bottom = font(100 * points).getbbox(text)
        across, down = sorted((found[text]["width"], found[text]["height"]), reverse=True)  # it may be rotated
        assert across == pytest.approx((right - left) / 100, rel=0.02)
        assert down == pytest.approx((bottom - top) / 100, rel=0.04)


def font(size):
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / "DejaVuSans.ttf"), size, layout_engine=ImageFont.Layout.BASIC)


@pytest.mark.parametrize("width", [COMPUTER, TELEPHONE])
def test_every_figure_is_seen_whole_and_its_text_can_be_read(width, screens):
    page = screens[width]
    assert page["width"] <= width and len(page["images"]) == 3
    for image in page["images"]:
        assert 0 <= image["left"] < image["right"] <= width
        assert 9 * image["scale"] >= 10  # pixels of the smaller axis labels
