"""One more task for a learner: looked at, learned, judged."""
