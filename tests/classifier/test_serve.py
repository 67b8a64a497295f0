"""`examples/serve.py`: requests during an update get answers of the old version or the new one, and none is lost."""

import ast
import asyncio
import importlib.util
import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.months import photos
from support.small_learners import FILES, Learner, learned

pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")
testclient = pytest.importorskip("fastapi.testclient", reason="fastapi and httpx are not installed")
SERVE = Path(__file__).parents[2] / "examples/serve.py"
REQUESTS = 200


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """The server of a saved learner, which looks for a new version every 10 ms."""
    learned(photos(tmp_path / "january", ["cat", "ant"], 1), **FILES).save(tmp_path / "shelf")
    monkeypatch.setenv("SHELF", str(tmp_path / "shelf"))
    monkeypatch.setenv("RELOAD_SECONDS", "0.01")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # which the server sets
    spec = importlib.util.spec_from_file_location("serve", SERVE)
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    return serve


def contents(count):
    """Different images, as PNG files."""
    rng = np.random.default_rng(0)
    files = [io.BytesIO() for _ in range(count)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(file, "png")
    return [file.getvalue() for file in files]


def expected(learner, content):
    """The three most likely classes by the probabilities of a learner of this version."""
    rows = dict(zip(learner.classes, learner.predict_proba([Image.open(io.BytesIO(content))])[0].tolist()))
    return {name: rows[name] for name in sorted(rows, key=rows.get, reverse=True)[:3]}


class Update(threading.Thread):
    """Learns and saves a second version. It does not end before ``enough`` requests have been answered meanwhile."""

    def __init__(self, folder, asked):
        super().__init__()
        self.folder, self.asked = folder, asked
        self.began, self.enough = threading.Event(), threading.Event()
        self.answered = []  # requests, when learning began and when it ended

    def run(self):
        learner = Learner.load(self.folder / "shelf", quiet=True, on_progress=self.wait)
        learner.learn(photos(self.folder / "february", ["bee", "cat"], 2))
        self.answered.append(len(self.asked.found))
        learner.save(self.folder / "shelf")

    def wait(self, _):
        if not self.began.is_set():
            self.answered.append(len(self.asked.found))
            self.began.set()
        assert self.enough.wait(120)


class Asked:
    """Requests, and the answers found: (number of the image, answer)."""

    def __init__(self, client, images):
        self.client, self.images = client, images
        self.open = self.most = 0  # requests without an answer yet
        self.found = []

    async def ask(self, number):
        self.open += 1
        self.most = max(self.most, self.open)
        response = await self.client.post("/predict", content=self.images[number % len(self.images)])
        self.open -= 1
        assert response.status_code == 200
        self.found.append((number % len(self.images), response.json()))
        return response.json()["version"]

    async def all(self, numbers):
        return await asyncio.gather(*map(self.ask, numbers))


async def during_an_update(serve, folder, images):
    """The requests of a session, its update, and the versions that answered before, meanwhile and after."""
    import httpx

    transport = httpx.ASGITransport(serve.app)
    async with (
        serve.app.router.lifespan_context(serve.app),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        asked = Asked(client, images)
        update = Update(folder, asked)
        before = await asked.all(range(20))
        update.start()
        assert await asyncio.to_thread(update.began.wait, 120)
        together = asyncio.ensure_future(asked.all(range(REQUESTS)))
        while len(asked.found) < 20 + REQUESTS // 2:
            await asyncio.sleep(0.001)
        update.enough.set()
        meanwhile = await together
        while 2 not in meanwhile:  # requests go on until the new version answers
            meanwhile += await asked.all(range(8))
        update.join()
        after = await asked.all(range(20))
    return asked, update, (before, meanwhile, after)


@pytest.mark.slow
def test_two_hundred_requests_at_a_time_during_an_update_have_right_answers_and_none_is_lost(serve, tmp_path):
    images = contents(8)
    session = asyncio.wait_for(during_an_update(serve, tmp_path, images), 240)
    asked, update, (before, meanwhile, after) = asyncio.run(session)
    assert asked.most == REQUESTS, "all of them wait for their answers at the same time"
    assert update.answered[0] == 20 and update.answered[1] >= 20 + REQUESTS // 2, "answered while it learned"
    assert set(before) == {1} and set(meanwhile) <= {1, 2} and set(after) == {2}
    assert len(asked.found) == 20 + len(meanwhile) + 20 >= REQUESTS + 40 and asked.open == 0
    learners = {number: Learner.load(tmp_path / "shelf", version=number) for number in (1, 2)}
    right = {
        (version, i): expected(each, image) for version, each in learners.items() for i, image in enumerate(images)
    }
    for image, answer in asked.found:
        wanted = right[answer["version"], image]
        assert list(answer["answers"]) == list(wanted)
        assert list(answer["answers"].values()) == pytest.approx(list(wanted.values()), abs=1e-6)


def test_what_is_no_image_is_an_answer_too(serve):
    with testclient.TestClient(serve.app) as client:
        response = client.post("/predict", content=b"no image")
        assert response.status_code == 422 and "not a readable image" in response.json()["detail"]


def test_a_damaged_version_is_not_served_and_the_next_one_is(serve, tmp_path, caplog):
    (good,) = contents(1)
    with testclient.TestClient(serve.app) as client:
        (tmp_path / "shelf/learner.safetensors").write_bytes(b"damaged")
        wait_for(lambda: "the new version cannot be served" in caplog.text)
        assert client.post("/predict", content=good).json()["version"] == 1, "the version that was loaded goes on"
        learned(photos(tmp_path / "february", ["bee", "dog"], 1), **FILES).save(tmp_path / "other")
        (tmp_path / "other/learner.safetensors").replace(tmp_path / "shelf/learner.safetensors")
        wait_for(lambda: set(client.post("/predict", content=good).json()["answers"]) == {"bee", "dog"})


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_server_has_fifty_lines():
    """Of code, without its description and empty lines."""
    text = SERVE.read_text()
    body = text.replace(ast.get_docstring(ast.parse(text), clean=False), "").replace('""""""', "")
    assert len([line for line in body.splitlines() if line.strip()]) <= 50


@pytest.mark.parametrize("side, status", [(9000, 422), (600, 200)])
def test_a_small_file_of_many_pixels_is_refused_before_it_is_decoded(side, status, serve):
    content = io.BytesIO()
    Image.new("1", (side, side)).save(content, "png")
    with testclient.TestClient(serve.app) as client:
        assert client.post("/predict", content=content.getvalue()).status_code == status
        assert len(content.getvalue()) < 20_000


def test_a_large_request_is_not_read_to_its_end_and_formats_are_few(serve, monkeypatch):
    monkeypatch.setattr(serve, "LARGEST", 1000)
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "pcx")
    with testclient.TestClient(serve.app) as client:
        assert client.post("/predict", content=b"x" * 1001).status_code == 413
        assert client.post("/predict", content=content.getvalue()).status_code == 422


def test_the_server_looks_for_new_versions_until_it_ends_even_by_an_error(serve):
    async def failing():
        async with serve.reloading(serve.app):
            raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(failing())
    for _ in range(1000):
        if threading.active_count() <= before:
            return
        time.sleep(0.01)
    pytest.fail("its thread goes on")
