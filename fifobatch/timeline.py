"""Pictures of a timeline: as text for a terminal, and with matplotlib. Runs in the thread that asks for one."""

import math
import shutil
import statistics
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fifobatch.measures import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["format_timeline", "plot_timeline"]

STRAGGLER = 3.0  # times the median load time
LABELLED = 8  # the most stragglers that are named
CHARACTER = 0.009  # the width of one in a picture's label, as a share of the axes
LEVELS = " ▁▂▃▄▅▆▇█"
Interval = tuple[float, float]


class _Drawing(NamedTuple):
    """What both pictures show. All times are seconds from the first submission on."""

    end: float
    lanes: dict[str, list[tuple[Span, Interval]]]
    waits: list[Interval]
    delivered: list[float]
    failed: list[float]
    median: float  # of the load times
    stragglers: list[Span]  # the slowest first
    pending: int  # chunks of which nothing is known but that they were submitted


def _draw(spans: Iterable[Span]) -> _Drawing:
    spans = list(spans)
    for span in spans:
        stations = [span.submitted, span.started, span.loaded, span.requested, span.delivered]
        if not all(time is None or math.isfinite(time) for time in stations) or span.load_seconds < 0:
            raise ValueError(f"{span} has a time that is no number, or was loaded before it was started")
    start = min((span.submitted for span in spans), default=0.0)
    # A run on one clock begins with a submission; for spans that were put together by hand it may be otherwise.
    others = [time for span in spans for time in (span.requested, span.started) if time is not None]
    start = min([start, *others])
    lanes: dict[int | None, list[tuple[Span, Interval]]] = {}
    for span in spans:
        if span.started is not None and span.loaded is not None:
            lanes.setdefault(span.worker, []).append((span, (span.started - start, span.loaded - start)))
    times = [time for span in spans for time in (span.submitted, span.loaded, span.delivered) if time is not None]
    loads = [span.load_seconds for span in spans if not math.isnan(span.load_seconds)]
    median = statistics.median(loads) if loads else math.inf
    slow = [span for span in spans if span.load_seconds > STRAGGLER * median]
    names = {worker: "in process" if worker is None else f"worker {worker}" for worker in lanes}
    return _Drawing(
        end=max(times, default=start) - start,
        lanes={
            names[worker]: lanes[worker]
            for worker in sorted(lanes, key=lambda worker: -1 if worker is None else worker)
        },
        waits=[
            (span.requested - start, span.delivered - start)
            for span in spans
            if span.requested is not None and span.delivered is not None
        ],
        delivered=[span.delivered - start for span in spans if span.delivered is not None and span.error is None],
        failed=[span.delivered - start for span in spans if span.delivered is not None and span.error is not None],
        median=median,
        stragglers=sorted(slow, key=lambda span: -span.load_seconds)[:LABELLED],
        pending=sum(span.delivered is None and span.loaded is None for span in spans),
    )


def format_timeline(spans: Iterable[Span], width: int | None = None) -> str:
    """Draw a timeline as text: a line a worker, then when batches were delivered, and when the consumer waited.

    Example:
        >>> from fifobatch import Span, format_timeline
        >>> times = dict(requested=0.0, bytes=0, error=None)
        >>> spans = [
        ...     Span(0, worker=0, submitted=0.0, started=0.0, loaded=1.9, delivered=2.0, **times),
        ...     Span(1, worker=1, submitted=0.0, started=0.5, loaded=1.0, delivered=1.0, **times)]
        >>> print(format_timeline(spans, width=77))
                   0 s                                                      2 s
        worker 0   ▐██████████████████████████ 0 ███████████████████████████     95%
        worker 1                  ▐█████ 1 ██████                                25%
        delivered                                1                            1
        waiting    ████████████████████████████████████████████████████████████ 100%
        <BLANKLINE>
        █ loading, with the chunk's number where it fits (% of the time)
        delivered: batches a column; waiting: the consumer was inside next()

    Args:
        spans: What ``timeline()`` returns.
        width: Columns to use; None for the terminal's width, or 80 where there is none.
    """
    drawing = _draw(spans)
    if not drawing.lanes and not drawing.delivered and not drawing.failed:
        return f"Nothing was loaded yet; {drawing.pending:,} chunks are under way." if drawing.pending else NOTHING
    label = max(len(name) for name in [*drawing.lanes, "delivered"]) + 2
    width = shutil.get_terminal_size((80, 24)).columns if width is None else width
    columns = max(10, width - label - 6)
    scale = columns / max(drawing.end, 1e-9)
    rows = [(f"{'':{label}}0 s{_brief(drawing.end):>{columns - 3}}", "")]
    for name, lane in drawing.lanes.items():
        cells, busy = _shade([interval for _, interval in lane], scale, columns)
        for span, (begin, end) in lane:
            first, last = math.ceil(begin * scale - 1e-9), math.floor(end * scale + 1e-9)
            if last - first >= 2:
                cells[first] = "▐"  # where the one before ends
                number = f" {span.number} "
                if last - first > len(number) + 1:
                    at = first + (last - first + 1 - len(number)) // 2
                    cells[at : at + len(number)] = number
        rows.append((f"{name:{label}}" + "".join(cells), f"{busy / max(drawing.end, 1e-9):5.0%}"))
    counts = [0] * columns
    for time in [*drawing.delivered, *drawing.failed]:
        counts[min(columns - 1, int(time * scale))] += 1
    marks = [_digit(count) for count in counts]
    for time in drawing.failed:
        marks[min(columns - 1, int(time * scale))] = "x"
    rows.append((f"{'delivered':{label}}" + "".join(marks), ""))
    cells, waited = _shade(drawing.waits, scale, columns)
    rows.append((f"{'waiting':{label}}" + "".join(cells), f"{waited / max(drawing.end, 1e-9):5.0%}"))
    lines = [f"{left:{label + columns}}{right}".rstrip() for left, right in rows]
    notes = ["█ loading, with the chunk's number where it fits (% of the time)"]
    failed = ", x where an error was" if drawing.failed else ""
    notes.append(f"delivered: batches a column{failed}; waiting: the consumer was inside next()")
    if drawing.stragglers:
        slow = (f"chunk {span.number} ({_brief(span.load_seconds)})" for span in drawing.stragglers)
        notes.append("slowest: " + ", ".join(slow))
    return "\n".join([*lines, "", *(textwrap.fill(note, label + columns + 6) for note in notes)])


NOTHING = "Nothing was loaded yet."


def _shade(intervals: list[Interval], scale: float, columns: int) -> tuple[list[str], float]:
    """Return a character a column, by the share of it that the intervals cover, and how long they are in all.

    Where they overlap, that counts once.
    """
    covered = [0.0] * columns
    total, reached = 0.0, 0.0
    for begin, end in sorted(intervals):
        begin = max(begin, reached)
        if end <= begin:
            continue
        total, reached = total + end - begin, end
        for column in range(int(begin * scale), min(columns, int(end * scale) + 1)):
            covered[column] += max(0.0, min(column + 1, end * scale) - max(column, begin * scale))
    return [LEVELS[min(8, math.ceil(8 * share - 1e-6))] for share in covered], total


def _digit(count: int) -> str:
    return " " if not count else str(count) if count < 10 else "+"


def _brief(seconds: float) -> str:
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def plot_timeline(spans: Iterable[Span], seconds: float | None = None) -> "Figure":
    """Draw a timeline with matplotlib.

    A lane a worker with a bar a chunk, coloured by how long it took to load; below, a mark for each delivery. While the
    consumer waited, the background is shaded. Of the chunks that took more than three times the median, the slowest are
    labelled, where there is room.

    Args:
        spans: What ``timeline()`` returns.
        seconds: How far the time axis goes at least, so that timelines can be compared.

    Returns:
        The figure, for ``savefig`` or as the value of a notebook's cell. pyplot does not keep it.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: A span has a time that is no number.
    """
    try:
        from matplotlib import patheffects, pyplot
        from matplotlib.collections import PolyCollection
    except ImportError as error:
        raise ImportError(
            "plot_timeline() draws with matplotlib, which is not here: pip install 'fifobatch[notebook]', "
            "or print(format_timeline(...)), which needs nothing"
        ) from error
    drawing = _draw(spans)
    rows = len(drawing.lanes) + 1
    figure, axes = pyplot.subplots(figsize=(9, min(12.0, 1.95 + 0.34 * rows)), layout="constrained")
    boxes, loads = [], []
    for row, lane in enumerate(drawing.lanes.values()):
        for span, (begin, end) in lane:
            boxes.append([(begin, row - 0.4), (end, row - 0.4), (end, row + 0.4), (begin, row + 0.4)])
            loads.append(span.load_seconds)
    # cividis: made to look alike with and without colour blindness (Nuñez, Anderton and Renslow, PLOS ONE 13(7), 2018).
    bars = PolyCollection(boxes, array=loads, cmap="cividis", edgecolors="white", zorder=2)
    bars.set_linewidth(0.5 if len(boxes) < 100 * rows else 0)  # else the edges would cover what they surround
    bars.set_clim(0, max([*loads, STRAGGLER * drawing.median]) if loads else 1.0)  # bright: a straggler
    axes.add_collection(bars)
    figure.colorbar(bars, ax=axes, label="load time (s)", pad=0.01)
    axes.broken_barh(
        [(begin, end - begin) for begin, end in drawing.waits],
        (-0.6, rows + 0.2),
        facecolors="0.87",
        zorder=0,
        label="consumer waits",
    )
    axes.plot(drawing.delivered, [rows - 1] * len(drawing.delivered), "k|", markersize=9, label="batch delivered")
    if drawing.failed:
        axes.plot(drawing.failed, [rows - 1] * len(drawing.failed), "x", color="#D55E00", label="error delivered")
    halo = [patheffects.withStroke(linewidth=2.5, foreground="white")]
    places = {
        span: (row, sum(interval) / 2) for row, lane in enumerate(drawing.lanes.values()) for span, interval in lane
    }
    end = max(drawing.end, seconds or 0.0) or 1.0
    labels: list[tuple[int, float, float]] = []
    for span in drawing.stragglers:
        row, middle = places[span]
        text = f"chunk {span.number}: {_brief(span.load_seconds)}"
        half = CHARACTER * len(text) * end / 2
        middle = min(max(middle, half), end - half)
        if all(row != other or abs(middle - at) >= half + reach for other, at, reach in labels):
            labels.append((row, middle, half))
            axes.text(middle, row, text, fontsize=8, ha="center", va="center", path_effects=halo, zorder=3)
    axes.set_xlim(0, 1.01 * end)  # a mark at the very end is seen, too
    axes.set_ylim(rows - 0.4, -0.6)  # worker 0 at the top
    names = [*drawing.lanes, "delivered"]
    step = math.ceil(rows / 40)
    shown = [*range(0, rows - step, step), rows - 1]
    axes.set_yticks(shown, [names[row] for row in shown])
    axes.set_xlabel("seconds since the first chunk was submitted")
    _, waited = _shade(drawing.waits, 1.0, 1)
    counts = f"{len(drawing.delivered):,} {'batch' if len(drawing.delivered) == 1 else 'batches'}"
    counts += f" and {len(drawing.failed):,} failed" if drawing.failed else ""
    title = f"{counts} in {_brief(drawing.end)}; the consumer waited {waited / max(drawing.end, 1e-9):.0%} of the time"
    axes.set_title(title if names[1:] or drawing.waits else NOTHING, fontsize=10, loc="left")
    figure.legend(loc="outside lower right", ncols=3, frameon=False, fontsize=8)
    pyplot.close(figure)  # a notebook would show it now, and once more as the value of its cell; a script would keep it
    return figure
