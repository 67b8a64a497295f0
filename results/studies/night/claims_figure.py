"""The figure of docs/claims_in_detail.md: how far each method is above Replay, by the fraction of images in memory."""

from figure import NAMES, OTHER, TEXT, WSC, pyplot, save
from findings import SHARES, Claim, by_seed, differences, papers_table
from night_runs import DISTILLING, EXPANDING, SEEDS, table_of
from over_seeds import interval

TITLES = {"here": "here: 50 classes, 16 pixels, 5 seeds", "the paper": "the paper: CIFAR-100"}
METHODS = ("wsc", *DISTILLING, *EXPANDING)
STYLES = {"wsc": (WSC, "o")} | {name: ("#2563eb", marker) for name, marker in zip(DISTILLING, "sD^", strict=True)}
STYLES |= {name: ("#9333ea", marker) for name, marker in zip(EXPANDING, "sD^", strict=True)}


def gains(found):
    """{"here" or "the paper": {method: {share: [gain over Replay, half-width of its 95 % interval]}}} of records.

    The gain is that of runs with the same seed, in points of average accuracy, where all seeds have run. The paper has
    means over seeds only, so that its half-widths are 0.
    """
    ours, papers = by_seed(table_of(found), "average"), papers_table("accuracy")
    shown = {"here": {}, "the paper": {}}
    for method in METHODS:
        claim = Claim(method, [(method,)], [("replay",)])
        for share, values in differences(claim, ours).items():
            if values.count() == SEEDS:
                shown["here"].setdefault(method, {})[share] = [round(value, 4) for value in interval(values)]
        theirs = differences(claim, papers).iloc[0]
        shown["the paper"][method] = {share: [round(float(theirs[share]), 4), 0.0] for share in SHARES}
    return shown


def draw(path, found):
    """Write the figure of records: a panel of the runs here and one of the paper's table."""
    plt, shown = pyplot(), gains(found)
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 4.4), sharex=True, sharey=True, layout="constrained")
    for axis, (source, methods) in zip(axes, shown.items(), strict=True):
        axis.axhline(0, color=TEXT, linewidth=1)
        for method, by_share in methods.items():
            line(axis, method, by_share)
        axis.set_title(TITLES[source], fontsize=12)
        axis.set_xticks([4, *SHARES[3:]])
        axis.tick_params(colors=TEXT, labelcolor=OTHER)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(TEXT)
    axes[0].set_ylabel("average accuracy over Replay's, points", color=OTHER)
    figure.supxlabel("fraction of each class's images in memory, %", fontsize=12, color=OTHER)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=7, frameon=False, fontsize=10, handlelength=1.4)
    save(figure, path, shown)


def line(axis, method, by_share):
    """One method: its mean gains, with a band over their 95 % intervals."""
    shares, means = list(by_share), [mean for mean, _ in by_share.values()]
    bands = zip(*((mean - half, mean + half) for mean, half in by_share.values()), strict=True)
    color, marker = STYLES[method]
    width = 2.2 if method == "wsc" else 1
    axis.plot(shares, means, color=color, marker=marker, markersize=4, linewidth=width, label=NAMES[method])
    axis.fill_between(shares, *bands, color=color, alpha=0.15, linewidth=0)
