"""Serves a saved learner over HTTP, and each new version as soon as it is saved.

SHELF=shelf python -m uvicorn --app-dir examples serve:app --workers 2
curl --data-binary @photo.jpg localhost:8000/predict
"""

import contextlib
import io
import os
import threading

from fastapi import Depends, FastAPI, HTTPException, Request
from PIL import Image

import pycil_wsc

learner = pycil_wsc.Learner.load(os.environ.get("SHELF", "shelf"), quiet=True)
pause = float(os.environ.get("RELOAD_SECONDS", "1"))


def watch(stop: threading.Event):
    while not stop.wait(pause):
        with contextlib.suppress(pycil_wsc.UserError):  # unreadable for now: the old version goes on
            learner.reload()


@contextlib.asynccontextmanager
async def reloading(app: FastAPI):
    stop = threading.Event()
    threading.Thread(target=watch, args=(stop,)).start()
    yield
    stop.set()


app = FastAPI(lifespan=reloading)


async def body(request: Request):
    return await request.body()


@app.post("/predict")
def predict(content: bytes = Depends(body)):  # in a thread of FastAPI's
    answers = learner.answers  # one version for the whole answer
    try:
        names, values = answers.top([Image.open(io.BytesIO(content))], min(3, len(answers.classes)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, pycil_wsc.UserError) as error:
        raise HTTPException(422, f"not a readable image: {error}") from None
    return {"version": answers.version, "answers": dict(zip(names[0].tolist(), values[0].tolist()))}
