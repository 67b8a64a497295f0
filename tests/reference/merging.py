"""Slow twins of merges of weights, element by element, written from the papers."""


def ties(start, states, keep, scale):
    """Yadav et al., 2023: trim each change to its largest elements, elect signs by mass, average what agrees.

    ``start`` and each of ``states``: a flat list of numbers, the whole model.
    """
    trimmed = []
    for state in states:
        change = [now - before for now, before in zip(state, start)]
        kept = sorted(range(len(change)), key=lambda place: -abs(change[place]))[: round(keep * len(change))]
        trimmed.append([value if place in kept else 0.0 for place, value in enumerate(change)])
    merged = []
    for before, *changes in zip(start, *trimmed):
        positive = sum(changes) > 0
        agreeing = [change for change in changes if change and (change > 0) == positive]
        merged.append(before + scale * (sum(agreeing) / len(agreeing) if agreeing else 0.0))
    return merged


def largest(start, states, scale):
    """Marczak et al., 2024: of each element's changes, the largest."""
    merged = []
    for before, *after in zip(start, *states):
        change = 0.0
        for now in after:
            if abs(now - before) >= abs(change):
                change = now - before
        merged.append(before + scale * change)
    return merged


def weighted_by_fisher(before, now, share, fisher_before, fisher_now):
    """Marouf et al., 2024; where there is no information, the plain mean."""
    merged = []
    for old, new, f_old, f_new in zip(before, now, fisher_before, fisher_now):
        one, two = (1 - share) * f_old, share * f_new
        merged.append((one * old + two * new) / (one + two) if one + two else (1 - share) * old + share * new)
    return merged
