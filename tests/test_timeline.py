"""Pictures of timelines: of spans that were made by hand, so that it is known what has to be seen."""

import re
import sys

import matplotlib
import pytest

from fifobatch import Span, format_timeline, plot_timeline

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

T0 = 5000.0  # perf_counter has no zero of its own


def span(number, worker, started, loaded, delivered=None, *, requested=None, submitted=0.0, error=None):
    """Times in seconds from the first submission on."""
    times = {"submitted": submitted, "started": started, "loaded": loaded}
    times |= {"requested": requested, "delivered": delivered}
    times = {name: None if time is None else T0 + time for name, time in times.items()}
    return Span(number, worker, **times, bytes=0, error=error)


def under_way(number):
    return span(number, None, None, None)


# Two workers and ten seconds. Worker 1 has a straggler; the consumer waits for 2 + 4 of the seconds.
SPANS = [
    span(0, 0, 0, 2, 2, requested=0),
    span(1, 1, 0, 1, 3, requested=3),
    span(2, 0, 2, 4, 4, requested=4),
    span(3, 1, 1, 9, 10, requested=6),
    span(4, 0, 4, 6, 6, requested=6),
]
WIDTH = 57  # for 40 columns: four a second


def rows(text):
    """Return the drawn lines by what they are called: what is drawn, and the percentage."""
    found = {}
    for line in text.split("\n\n")[0].splitlines()[1:]:
        match = re.fullmatch(r"(worker \d+|in process|delivered|waiting)(?: {1,2}|$)(.*)", line)
        name, drawn = match[1], line[len("delivered") + 2 :]
        share = re.search(r" *(\d+)%$", drawn)
        found[name] = (drawn[: share.start()] if share else drawn, share and int(share[1]))
    return found


# -- as text


def test_text_has_a_lane_a_worker_then_deliveries_then_waiting():
    assert list(rows(format_timeline(SPANS, WIDTH))) == ["worker 0", "worker 1", "delivered", "waiting"]


def test_lanes_are_in_order_of_workers_whoever_came_first():
    found = rows(format_timeline([span(0, 10, 0, 1, 1), span(1, 2, 0, 1, 2)], WIDTH + 1))
    assert [name for name in found if name.startswith("worker")] == ["worker 2", "worker 10"]


def test_text_shades_a_lane_where_it_was_loading():
    found = rows(format_timeline(SPANS, WIDTH))
    lane, _ = found["worker 0"]
    assert (lane[0], lane[8], lane[16]) == ("▐", "▐", "▐")  # three chunks begin at 0, 2 and 4 s
    assert re.sub(r"[▐ 0-9]", "█", lane[:24]) == "█" * 24
    assert lane[24:].strip() == ""
    assert found["worker 1"][0].startswith("▐█")
    assert found["worker 1"][0].rstrip().endswith("█")
    assert len(found["worker 1"][0].rstrip()) == 36  # until 9 s


def test_text_shades_a_column_by_the_share_of_it_that_was_spent():
    [(lane, share), *_] = rows(format_timeline([span(0, 0, 0, 0.125, 10)], WIDTH)).values()
    assert lane.rstrip() == "▄"
    assert share == 1


def test_text_says_how_much_of_the_time_each_lane_was_loading():
    found = rows(format_timeline(SPANS, WIDTH))
    assert (found["worker 0"][1], found["worker 1"][1]) == (60, 90)


def test_text_names_a_chunk_where_there_is_room():
    found = rows(format_timeline(SPANS, WIDTH))
    assert " 0 " in found["worker 0"][0]
    assert " 3 " in found["worker 1"][0]
    narrow = rows(format_timeline(SPANS, 27))
    assert re.search(r"\d", narrow["worker 0"][0]) is None
    assert " 3 " in narrow["worker 1"][0]


def test_text_counts_deliveries_a_column():
    assert rows(format_timeline(SPANS, WIDTH))["delivered"][0] == f"{'':8}1{'':3}1{'':3}1{'':7}1{'':14}1"


def test_text_counts_to_nine_in_a_column():
    spans = [span(number, 0, 0, 1, 5) for number in range(9)] + [span(9, 0, 0, 1, 10)]
    assert rows(format_timeline(spans, WIDTH))["delivered"][0].split() == ["9", "1"]
    assert rows(format_timeline([*spans, span(10, 0, 0, 1, 5)], WIDTH))["delivered"][0].split() == ["+", "1"]


def test_text_shades_where_the_consumer_waited_and_counts_it_once():
    waiting, share = rows(format_timeline(SPANS, WIDTH))["waiting"]
    assert share == 60  # seconds 0 to 2 and 6 to 10
    assert waiting == "█" * 8 + " " * 16 + "█" * 16
    twice = [*SPANS, span(5, 0, 9, 9.5, 10, requested=9)]
    assert rows(format_timeline(twice, WIDTH))["waiting"] == (waiting, share)


def test_text_names_the_slowest_with_their_times():
    assert format_timeline(SPANS, WIDTH).splitlines()[-1] == "slowest: chunk 3 (8 s)"
    assert "slowest" not in format_timeline([*SPANS[:3], SPANS[4]], WIDTH)


def test_text_has_one_scale_up_to_the_last_event():
    assert format_timeline(SPANS, WIDTH).splitlines()[0] == f"{'':11}0 s{'10 s':>37}"


@pytest.mark.parametrize(
    ("end", "text"), [(0.25, "250 ms"), (0.9999, "1 s"), (12.34, "12.3 s"), (999.9, "1,000 s"), (12345.6, "12,346 s")]
)
def test_text_writes_times_without_exponents(end, text):
    assert format_timeline([span(0, 0, 0, end, end)], WIDTH).splitlines()[0].endswith(f" {text}")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_keeps_to_the_width(width):
    many = [span(number, number % 4, number, number + 1 + 9 * (number % 25 == 0), number + 11) for number in range(300)]
    for spans in (SPANS, many):
        lengths = [len(line) for line in format_timeline(spans, width).splitlines()]
        assert max(lengths) <= width
        assert max(lengths[:-3]) >= width - 1


def test_text_takes_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert format_timeline(SPANS) == format_timeline(SPANS, 100)


def test_text_takes_80_columns_where_there_is_no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)
    assert format_timeline(SPANS) == format_timeline(SPANS, 80)


def test_text_is_readable_even_where_there_is_no_width():
    assert [len(drawn) <= 10 for drawn, _ in rows(format_timeline(SPANS, 1)).values()] == [True] * 4


def test_text_says_that_nothing_was_loaded():
    assert format_timeline([]) == "Nothing was loaded yet."


def test_text_says_what_is_under_way_before_anything_was_loaded():
    assert format_timeline([under_way(0), under_way(1)]) == "Nothing was loaded yet; 2 chunks are under way."


def test_text_leaves_out_what_is_under_way_once_something_was_loaded():
    assert format_timeline([*SPANS, under_way(5)], WIDTH) == format_timeline(SPANS, WIDTH)


def test_text_marks_where_an_error_was_delivered():
    spans = [*SPANS[:4], span(4, 0, 4, 6, 6, requested=6, error="ValueError")]
    text = format_timeline(spans, WIDTH)
    assert rows(text)["delivered"][0] == f"{'':8}1{'':3}1{'':3}1{'':7}x{'':14}1"
    assert "x where an error was" in text.replace("\n", " ")
    assert "x where" not in format_timeline(SPANS, WIDTH)


def test_text_shows_an_error_that_no_worker_is_known_for():
    text = format_timeline([span(0, None, None, None, 2, requested=0, error="WorkerDiedError")], WIDTH)
    assert list(rows(text)) == ["delivered", "waiting"]
    assert "x" in rows(text)["delivered"][0]


def test_text_calls_the_lane_of_no_worker_in_process():
    assert "in process" in format_timeline([span(0, None, 0, 1, 1)], WIDTH).splitlines()[1]


# -- as a picture


@pytest.fixture
def plot():
    """Return ``plot_timeline`` that returns the axes; the figures are closed in the end."""
    figures = []

    def plot(spans, **arguments):
        figure = plot_timeline(spans, **arguments)
        figures.append(figure)
        return figure.axes[0]

    yield plot
    for figure in figures:
        pyplot.close(figure)


def lanes(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def bars(axes):
    """Return (lane, start, end) of the bars."""
    [collection] = [each for each in axes.collections if type(each) is PolyCollection and each.get_array() is not None]
    boxes = [path.get_extents() for path in collection.get_paths()]
    return [(round((box.y0 + box.y1) / 2), pytest.approx(box.x0), pytest.approx(box.x1)) for box in boxes]


def waits(axes):
    [collection] = [each for each in axes.collections if each.get_label() == "consumer waits"]
    boxes = [path.get_extents() for path in collection.get_paths()]
    return [(pytest.approx(box.x0), pytest.approx(box.x1)) for box in boxes if box.width]


def marks(axes, label):
    return [list(line.get_xdata()) for line in axes.lines if line.get_label() == label]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def extents(axes, *artists):
    """Draw, and return where the artists are."""
    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    return [artist.get_window_extent(renderer) for artist in artists]


def overlap(boxes):
    return any(one.overlaps(two) for index, one in enumerate(boxes) for two in boxes[:index])


def test_picture_has_a_lane_a_worker_and_one_for_deliveries(plot):
    axes = plot(SPANS)
    assert lanes(axes) == ["worker 0", "worker 1", "delivered"]
    assert axes.yaxis_inverted()


def test_picture_has_a_bar_a_chunk_where_it_was_loaded(plot):
    assert bars(plot(SPANS)) == [(0, 0, 2), (0, 2, 4), (0, 4, 6), (1, 0, 1), (1, 1, 9)]


def test_picture_colours_bars_by_load_time(plot):
    axes = plot(SPANS)
    [collection] = [each for each in axes.collections if each.get_array() is not None]
    assert list(collection.get_array()) == pytest.approx([2, 2, 2, 1, 8])
    assert len({to_hex(collection.to_rgba(seconds)) for seconds in (1, 2, 8)}) == 3
    assert "load time (s)" in [other.get_ylabel() for other in axes.figure.axes]


def test_picture_is_bright_only_where_a_chunk_was_a_straggler(plot):
    [collection] = [each for each in plot(SPANS[:1] + SPANS[2:3]).collections if each.get_array() is not None]
    assert collection.get_clim() == (0, pytest.approx(6))  # three times the median


def test_picture_marks_each_delivery(plot):
    [times] = marks(plot(SPANS), "batch delivered")
    assert sorted(times) == pytest.approx([2, 3, 4, 6, 10])


def test_picture_shades_where_the_consumer_waited(plot):
    assert sorted(waits(plot(SPANS)), key=str) == sorted([(0, 2), (6, 10)], key=str)


def test_picture_says_how_many_batches_how_long_and_how_much_was_waiting(plot):
    assert plot(SPANS).get_title(loc="left") == "5 batches in 10 s; the consumer waited 60% of the time"
    assert plot(SPANS[:1]).get_title(loc="left") == "1 batch in 2 s; the consumer waited 100% of the time"


def test_picture_labels_stragglers(plot):
    assert texts(plot(SPANS)) == ["chunk 3: 8 s"]


def test_picture_says_its_units_and_what_the_signs_are(plot):
    axes = plot(SPANS)
    assert axes.get_xlabel() == "seconds since the first chunk was submitted"
    [legend] = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["consumer waits", "batch delivered"]


CROWDED = [
    span(number, number % 2, number * 0.1, number * 0.1 + 0.1 + 0.5 * (number in (0, 2, 3, 4, 298, 299)), 40)
    for number in range(300)
]


@pytest.mark.parametrize("spans", [CROWDED, CROWDED[:20], CROWDED[:150]])
def test_labels_neither_overlap_nor_leave_the_axes(plot, spans):
    axes = plot(spans)
    frame, *boxes = extents(axes, axes, *axes.texts)
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
    assert boxes
    assert not overlap(boxes)


def test_a_crowded_picture_labels_the_slowest_first(plot):
    spans = [span(number, 0, number, number + 1, 100) for number in range(90)]
    spans += [span(90, 0, 90, 94, 100), span(91, 0, 92, 97, 100)]
    assert texts(plot(spans)) == ["chunk 91: 5 s"]


def test_nothing_around_a_picture_overlaps(plot):
    spans = [
        span(n, n % 2, n, n + 1, n + 2, requested=n, error="ValueError" if n % 7 == 0 else None) for n in range(2000)
    ]
    axes = plot(spans)
    figure = axes.figure
    boxes = extents(axes, axes, axes._left_title, axes.xaxis.label, figure.axes[1], *figure.legends)
    assert not overlap(boxes)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_mark_at_the_very_end_is_inside_the_picture(plot):
    axes = plot(SPANS)
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] > 10


def test_pictures_can_have_the_same_scale(plot):
    assert plot(SPANS, seconds=20).get_xlim() == (0, pytest.approx(20.2))
    assert plot(SPANS, seconds=1).get_xlim() == plot(SPANS).get_xlim()
    assert "in 10 s; the consumer waited 60%" in plot(SPANS, seconds=20).get_title(loc="left")


def test_picture_marks_errors_apart(plot):
    axes = plot([*SPANS[:4], span(4, 0, 4, 6, 6, requested=6, error="ValueError")])
    assert marks(axes, "error delivered") == [pytest.approx([6])]
    [times] = marks(axes, "batch delivered")
    assert sorted(times) == pytest.approx([2, 3, 4, 10])
    assert axes.get_title(loc="left").startswith("4 batches and 1 failed in 10 s;")
    assert axes.figure.legends[0].get_texts()[-1].get_text() == "error delivered"


def test_picture_shows_an_error_that_no_worker_is_known_for(plot):
    axes = plot([span(0, None, None, None, 2, requested=0, error="WorkerDiedError")])
    assert lanes(axes) == ["delivered"]
    assert axes.get_title(loc="left").startswith("0 batches and 1 failed in 2 s;")


def test_picture_of_nothing_says_so(plot):
    for spans in ([], [under_way(0)]):
        assert plot(spans).get_title(loc="left") == "Nothing was loaded yet."


def test_picture_leaves_out_what_is_under_way(plot):
    assert bars(plot([*SPANS, under_way(5)])) == bars(plot(SPANS))


def test_picture_calls_the_lane_of_no_worker_in_process(plot):
    assert lanes(plot([span(0, None, 0, 1, 1)])) == ["in process", "delivered"]


def test_names_of_many_lanes_do_not_overlap(plot):
    axes = plot([span(worker, worker, 0, 1, 1) for worker in range(200)])
    boxes = extents(axes, *axes.get_yticklabels())
    assert len(boxes) > 30
    assert not overlap(boxes)
    assert lanes(axes)[-1] == "delivered"


def test_nothing_keeps_a_picture_but_the_caller():
    before = pyplot.get_fignums()
    plot_timeline(SPANS)
    assert pyplot.get_fignums() == before


def test_without_matplotlib_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib, which is not here: pip install .*format_timeline"):
        plot_timeline(SPANS)
