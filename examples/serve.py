"""Serves a saved learner over HTTP, and each new version as soon as it is saved.

SHELF=shelf UNKNOWN=0.05 python -m uvicorn --app-dir examples serve:app --workers 2
curl --data-binary @photo.jpg localhost:8000/predict
"""

import contextlib
import io
import logging
import os
import threading

from fastapi import Depends, FastAPI, HTTPException, Request
from PIL import Image

import pycil_wsc

learner = pycil_wsc.Learner.load(os.environ.get("SHELF", "shelf"), quiet=True)
unknown = float(os.environ["UNKNOWN"]) if "UNKNOWN" in os.environ else None  # the share of known images to refuse
learner.predict([], unknown=unknown)  # says at once if the learner cannot tell what is unknown
pause = float(os.environ.get("RELOAD_SECONDS", "1"))
LARGEST = 20_000_000  # bytes of a request
Image.MAX_IMAGE_PIXELS = 16_000_000  # twice as many are refused before they are decoded: a small file can have billions
turns = threading.BoundedSemaphore(os.cpu_count() or 1)  # so many images are decoded at the same time


def watch(stop: threading.Event):
    while not stop.wait(pause):
        try:
            learner.reload()
        except pycil_wsc.UserError as error:  # the old version goes on
            logging.getLogger("uvicorn.error").warning("the new version cannot be served: %s", error)
            stop.wait(60 * pause)


@contextlib.asynccontextmanager
async def reloading(app: FastAPI):
    stop = threading.Event()
    threading.Thread(target=watch, args=(stop,), daemon=True).start()
    try:
        yield
    finally:
        stop.set()


app = FastAPI(lifespan=reloading)


async def body(request: Request):
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > LARGEST:
            raise HTTPException(413, f"more than {LARGEST:,} bytes")
    return bytes(content)


@app.post("/predict")
def predict(content: bytes = Depends(body)):  # in a thread of FastAPI's
    answers = learner.answers  # one version for the whole answer
    try:
        image = Image.open(io.BytesIO(content), formats=["JPEG", "PNG", "WEBP"])
        with turns:
            (answer,) = answers.each([image], unknown=unknown, k=min(3, len(answers.classes)))
    except (OSError, ValueError, Image.DecompressionBombError, pycil_wsc.UserError):
        raise HTTPException(422, "not a readable image") from None
    if answer.problem:
        raise HTTPException(422, "not a readable image")
    return {"version": answers.version, "name": answer.name, "familiarity": answer.familiarity, "answers": answer.top}
