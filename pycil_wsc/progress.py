"""Live feedback: one bar per task on a terminal, one line per task anywhere."""

import sys

from tqdm import tqdm


class TaskBar:
    """The bar of one task. On anything but a terminal only :meth:`close` prints."""

    def __init__(self, title, task, num_tasks):
        self.label = f"{title} task {task.index + 1}/{num_tasks}".strip()
        self.bar = None

    def start(self, phase, first, epochs, batches):
        """A phase of ``epochs`` epochs begins with epoch ``first``."""
        self._remove()
        self.phase, self.epochs, self.images = phase, epochs, 0
        layout = "{desc} {bar:20} {percentage:3.0f}% {remaining} left{postfix}"
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(desc=self._description(first), total=epochs * batches, initial=first * batches, leave=False, disable=quiet, bar_format=layout)

    def step(self, images):
        self.images += images
        self.bar.update()

    def epoch(self, epoch, loss, accuracy):
        """Epoch ``epoch`` ended with this mean loss and training accuracy in percent."""
        self.bar.set_description_str(self._description(min(epoch + 1, self.epochs - 1)))
        seconds = self.bar.format_dict["elapsed"]
        self.bar.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.1f}%, {self.images / max(seconds, 1e-9):,.0f} images/s")

    def close(self, line):
        self._remove()
        print(f"{self.label}  {line}", flush=True)

    def _description(self, epoch):
        return f"{self.label} {self.phase} epoch {epoch + 1}/{self.epochs}"

    def _remove(self):
        if self.bar is not None:
            self.bar.close()
