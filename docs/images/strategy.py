"""Draws `strategy.svg`, read from a real plan: what each device holds. `python docs/images/strategy.py` writes it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from amsp_jax import DataRanks
from amsp_jax.engine.plan import plan_parameters

STRATEGY = "params=replica grads=node opt_state=full"
RANKS = DataRanks(per_node=4, num_nodes=2)
FILE = Path(__file__).with_name("strategy.svg")

INK, MUTED, EMPTY, CARD, EDGE, NODE = "#1f2933", "#5f6c7b", "#e6eaef", "#ffffff", "#d3d9e0", "#f1f4f7"
ROWS = {
    "P": ("Parameters", "replica: all on every device", "#2f6fde"),
    "G": ("Gradients", "node: one copy in each node", "#e8912d"),
    "OS": ("Optimizer states", "full: one copy over all devices", "#2a9d6f"),
}
IN_NODE = "every microbatch: reduce-scatter the gradients inside the node"
BETWEEN_NODES = "once a step: reduce-scatter the gradients between nodes, update, all-gather the parameters over all 8"

# In one unit throughout: a cell is an eighth of every leaf.
CELL, CELL_HEIGHT, GAP, PAD = 1.0, 1.25, 0.14, 0.7
ROW_STEP, LABELS, CARD_GAP = 1.85, 12.5, 0.7
CARD_WIDTH, CARD_HEIGHT = RANKS.total * CELL + 2 * PAD, len(ROWS) * ROW_STEP + 1.9
NODE_WIDTH = RANKS.per_node * (CARD_WIDTH + CARD_GAP) - CARD_GAP + 2 * PAD
BELOW_CARDS, NODE_HEIGHT, NODE_GAP = 1.6, CARD_HEIGHT + 2.3, 2.4


def holdings() -> dict[str, list[set[int]]]:
    """For P, G and OS, the eighths of a leaf that each device holds, device by device."""
    size = RANKS.total
    plan = plan_parameters(STRATEGY, {"leaf": jax.ShapeDtypeStruct((size,), jnp.float32)}, RANKS, jax.devices())
    shardings = {"P": plan.param_shardings, "G": plan.grad_shardings, "OS": plan.opt_shardings}
    held = {}
    for name, tree in shardings.items():
        index_of = tree["leaf"].devices_indices_map((size,))
        held[name] = [set(range(size)[index_of[device][0]]) for device in jax.devices()]
    return held


def box(ax: Axes, x: float, y: float, width: float, height: float, color: str, edge: str = "none") -> None:
    """A rectangle with round corners; (x, y) is its lower left."""
    style = "round,pad=0,rounding_size=0.35"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge, linewidth=0.8))


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """A line with a head at both ends."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "<->", "color": color, "lw": 1.3, "shrinkA": 0, "shrinkB": 0})


def cells(ax: Axes, x: float, top: float, held: set[int], color: str) -> None:
    """One component on one device: the eighths that it holds in color."""
    for i in range(RANKS.total):
        place = (x + i * CELL + GAP / 2, top - CELL_HEIGHT)
        ax.add_patch(Rectangle(place, CELL - GAP, CELL_HEIGHT, color=color if i in held else EMPTY, linewidth=0))


def draw_node(ax: Axes, node: int, bottom: float, held: dict[str, list[set[int]]]) -> None:
    """A node with its devices and, to the left, the names of the rows."""
    box(ax, LABELS, bottom, NODE_WIDTH, NODE_HEIGHT, NODE)
    cards = bottom + BELOW_CARDS
    tops = [cards + CARD_HEIGHT - 1.7 - i * ROW_STEP for i in range(len(ROWS))]
    ax.text(0, cards + CARD_HEIGHT - 0.85, f"Node {node}", color=INK, va="center", weight="bold", size=12)
    for (label, meaning, color), top in zip(ROWS.values(), tops, strict=True):
        ax.text(0, top - 0.28, label, color=color, va="center", weight="bold")
        ax.text(0, top - 1.1, meaning, color=MUTED, va="center", size=8.5)
    for local in range(RANKS.per_node):
        device = node * RANKS.per_node + local
        x = LABELS + PAD + local * (CARD_WIDTH + CARD_GAP)
        box(ax, x, cards, CARD_WIDTH, CARD_HEIGHT, CARD, EDGE)
        title = (x + CARD_WIDTH / 2, cards + CARD_HEIGHT - 0.85)
        ax.text(*title, f"device {device}", color=MUTED, ha="center", va="center")
        for (name, (_, _, color)), top in zip(ROWS.items(), tops, strict=True):
            cells(ax, x + PAD, top, held[name][device], color)
    draw_traffic(ax, LABELS + PAD, LABELS + NODE_WIDTH - PAD, bottom + BELOW_CARDS / 2, IN_NODE, ROWS["G"][2], NODE)


def draw_traffic(ax: Axes, left: float, right: float, y: float, text: str, color: str, background: str) -> None:
    """A horizontal arrow with its text on it."""
    arrow(ax, (left, y), (right, y), color)
    around = {"facecolor": background, "edgecolor": "none", "pad": 3}
    ax.text((left + right) / 2, y, text, color=INK, ha="center", va="center", bbox=around)


def draw_between(ax: Axes, bottom: float) -> None:
    """The gap between two nodes: an arrow for each pair of devices that hold the same part of G."""
    for local in range(RANKS.per_node):
        x = LABELS + PAD + local * (CARD_WIDTH + CARD_GAP) + CARD_WIDTH / 2
        arrow(ax, (x, bottom + 0.1), (x, bottom + NODE_GAP - 0.1), ROWS["OS"][2])
    around = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    middle = (LABELS + NODE_WIDTH / 2, bottom + NODE_GAP / 2)
    ax.text(*middle, BETWEEN_NODES, color=INK, ha="center", va="center", bbox=around)


def main() -> None:
    """Writes the picture."""
    plt.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans", "svg.hashsalt": STRATEGY})
    figure = plt.figure()
    ax = figure.add_axes((0, 0, 1, 1))
    held = holdings()
    for node in range(RANKS.num_nodes):
        bottom = (RANKS.num_nodes - 1 - node) * (NODE_HEIGHT + NODE_GAP)
        draw_node(ax, node, bottom, held)
        if bottom:
            draw_between(ax, bottom - NODE_GAP)
    width, height = LABELS + NODE_WIDTH, RANKS.num_nodes * (NODE_HEIGHT + NODE_GAP) - NODE_GAP
    margin, inches = 0.7, 11
    ax.set(xlim=(-margin, width + margin), ylim=(-margin, height + margin))
    ax.axis("off")
    figure.set_size_inches(inches, inches * (height + 2 * margin) / (width + 2 * margin))
    figure.savefig(FILE, facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS.total)
    main()
