"""Places the names of points in a chart so that no name covers another one or a point."""

from collections.abc import Sequence

Box = tuple[float, float, float, float]  # left, top, right, bottom
MARK = 7.0  # half the size of a point's mark, with a margin
FARTHEST = 60  # rows that a name may move away from its point


def place_labels(
    points: Sequence[tuple[float, float]], widths: Sequence[float], height: float, bounds: Box
) -> list[tuple[float, float]]:
    """The left end and the middle of each name: beside its point, or the nearest rows above or below that are free.

    Units are pixels, y grows downwards. A name that fits nowhere within `bounds` stays to the right of its point.
    """
    taken = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in points]
    places = []
    for (x, y), width in zip(points, widths, strict=True):
        sides = (x + MARK + 4, x - MARK - 4 - width)
        rows = sorted(range(-FARTHEST, FARTHEST + 1), key=lambda row: (abs(row), -row))
        boxes = [
            (left, y + (row - 0.5) * height, left + width, y + (row + 0.5) * height) for row in rows for left in sides
        ]
        box = next((b for b in boxes if inside(b, bounds) and not any(overlap(b, t) for t in taken)), boxes[0])
        taken.append(box)
        places.append((box[0], (box[1] + box[3]) / 2))
    return places


def inside(box: Box, bounds: Box) -> bool:
    return box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
