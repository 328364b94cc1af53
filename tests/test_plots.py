"""Figures: reproducible bytes, one look a method, and the numbers shown are the numbers given.

Also the published numbers, which stand beside ours in tables and figures.
"""

from __future__ import annotations

import itertools

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from kvrepro import analyses, plots, published, results, stats
from kvrepro.errors import UserError
from kvrepro.plots import inside, theory
from kvrepro.tasks.base import CATEGORIES

ARMS = ("full", "snapkv", "selkv", "selkv/evict", "kvslimmer", "mine")


@pytest.fixture(scope="module")
def records() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for category, i in itertools.product(CATEGORIES, range(4)):
        base = rng.uniform(20, 80)
        for k, arm in enumerate(ARMS):
            kl = k * rng.uniform(0.05, 0.1)
            rows.append(
                {"sample": f"{category}/{i}", "task": category, "category": category, "method": arm, "arm": arm,
                 "retain": 1.0 if arm == "full" else 0.25, "score": base - 3 * k, "nll": 1 + kl, "kl": kl,
                 "agree": 1 - kl, "kept_entries": 0.25, "kept_bytes": 0.25}
            )  # fmt: skip
    return pd.DataFrame(rows)


def swept(records: pd.DataFrame, *shares: float) -> pd.DataFrame:
    """The arms again at each share, the closer to the full cache the more they keep."""
    full, rest = records[records["arm"] == "full"], records[records["arm"] != "full"]
    return pd.concat([full, *(rest.assign(retain=x, kl=rest["kl"] * (1 - x)) for x in shares)])


@pytest.fixture(scope="module")
def drawn(records) -> dict[str, plots.Figure]:
    """Every figure of the module, small."""
    rng = np.random.default_rng(1)
    positions = np.arange(200)
    mass = rng.dirichlet(np.ones(200))
    attention = pd.concat(
        pd.DataFrame({"position": positions, "variant": variant, "mass": mass * scale})
        for variant, scale in (("full", 1), ("evicted", 0.6), ("merged", 0.6), ("compensated", 0.9))
    )
    tokens = pd.concat(
        pd.DataFrame({"head": h, "position": positions, "state": rng.choice(list(inside.STATES), 200)})
        for h in range(2)
    )
    cosines = pd.DataFrame(
        [
            {"layer": layer, "kind": kind, "cosine": rng.uniform()}
            for layer, kind, _ in itertools.product(range(5), ("key", "value"), range(3))
        ]
    )
    comparison = stats.compare(records, ["score", "kl"], ["selkv", "snapkv"], "selkv/evict", n_boot=200)
    curves = pd.DataFrame(
        [
            {"layer": layer, "matrix": matrix, "share": share, "energy": share ** (1 / (layer + 1))}
            for layer, matrix, share in itertools.product(range(3), "QKV", np.linspace(0, 1, 5))
        ]
    )
    shares = pd.DataFrame(
        [
            {
                "layer": layer,
                "head": head,
                "matrix": matrix,
                "rank": rank,
                "share": rng.uniform(),
                "random": 0.9,
            }
            for layer, head, matrix, rank in itertools.product(range(3), range(2), "QKV", theory.RANKS)
        ]
    )
    pairs = pd.DataFrame(
        [
            {"part": part, "layer": layer, "concentration": rng.uniform(), "similarity": rng.uniform()}
            for part, layer in itertools.product(theory.PAIRS, range(6))
        ]
    )
    notes = dict.fromkeys(theory.PAIRS, "ρ = +0.12 [−0.34, +0.56]")
    angles = pd.DataFrame(
        [
            {"layer": layer, "kind": kind, "low": -0.1, "median": 0.02 * layer, "high": 0.3, "n": 9}
            for layer, kind in itertools.product(range(5), (*theory.COSINES, *theory.DISTANCES))
        ]
    )
    weights = pd.DataFrame(
        {"true": [0.22, 0.23, 5.0, -9.0], "exact": [0.51, 0.52, 0.9, 0.1], "curvature": [1.0, 2.0, -1.0, 3.0]}
    )
    alphas = pd.DataFrame(
        {"set": ["merged", "merged", "heaviest"], "alpha1": [0.0, 2e-5, 0.4], "alpha2": [2e-5, 2e-5, 0.4]}
    )
    panels = {"one-shot": swept(records, 0.1, 0.5, 0.9), "chunked": swept(records, 0.1, 0.5)}
    both = {"a": records, "b": records.assign(kl=2 * records["kl"])}
    return {
        "sweep": plots.sweep({name: analyses.sweep(frame, n_boot=200) for name, frame in panels.items()}),
        "lasting": plots.lasting(
            {name: analyses.lasting(frame, n_boot=99) for name, frame in panels.items()}
        ),
        "datasets": plots.datasets(analyses.by_dataset(records, "score"), "score", title="By dataset"),
        "across": plots.across(analyses.models(both, "kl", n_boot=200)),
        "spectra": plots.spectra(curves),
        "ranks": plots.ranks(shares, shares[shares["head"] == 0]),
        "similarity_spectrum": plots.similarity_spectrum(pairs, notes),
        "main_scores": plots.main_scores(stats.means(records, ["score", "kl"], ARMS, n_boot=200)),
        "categories": plots.categories(records, "score"),
        "categories_kl": plots.categories(records, "kl"),
        "intervals": plots.intervals(comparison),
        "sag": plots.sag(attention),
        "entries_map": plots.entries_map(tokens),
        "adjacent_similarity": plots.adjacent_similarity(cosines),
        "cardinality": plots.cardinality(pd.DataFrame({"cardinality": [1, 1, 1, 2, 4, 5, 9, 40]})),
        "angle_relation": plots.angle_relation(angles),
        "rule_weights": plots.rule_weights(weights),
        "merged_alphas": plots.merged_alphas(alphas),
    }


def texts(figure: plots.Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_saving_twice_gives_the_same_bytes_and_names_no_date_or_version(drawn, tmp_path):
    for name, figure in drawn.items():
        first = {path.name: path.read_bytes() for path in plots.save(figure, tmp_path / "a", name)}
        again = {path.name: path.read_bytes() for path in plots.save(figure, tmp_path / "b", name)}
        assert first == again
        assert set(first) == {f"{name}.png", f"{name}.svg", f"{name}.csv"}
        assert b"Software" not in first[f"{name}.png"]
        for word in (b"<dc:date>", b"Matplotlib v"):
            assert word not in first[f"{name}.svg"]


def test_drawing_leaves_the_callers_settings_and_no_open_figure(drawn, records):
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    plots.categories(records)
    assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == []
    assert drawn["sag"]._repr_png_().startswith(b"\x89PNG")


def test_nothing_that_is_drawn_lies_outside_the_figure(drawn):
    for name, figure in drawn.items():
        width, height = figure.get_size_inches()
        drawn_in = figure.get_tightbbox()  # of all artists, in inches
        assert -0.02 <= drawn_in.x0 < drawn_in.x1 <= width + 0.02, name
        assert -0.02 <= drawn_in.y0 < drawn_in.y1 <= height + 0.02, name


def test_the_figures_show_what_they_were_given(drawn, records):
    table = results.by_category(records, "score").droplevel("retain")
    shown = texts(drawn["categories"])
    assert f"{table.loc['selkv', 'code']:.1f}" in shown
    assert f"{table.loc['full', 'average']:.1f}" in shown
    assert {"full cache", "SelKV", "KVSlimmer", "mine"} <= set(shown)

    shown = texts(drawn["intervals"])
    row = drawn["intervals"].data.iloc[0]
    assert f"{row['diff']:+.2f}" in shown
    assert any("SelKV: evict only" in text and "n = 24" in text for text in shown)
    band = drawn["intervals"].axes[0].collections[0].get_datalim(drawn["intervals"].axes[0].transData)
    assert (band.x0, band.x1) == pytest.approx((-row["detectable"], row["detectable"]))

    bars = drawn["cardinality"].data.set_index("tokens")["entries"]
    assert dict(bars[bars > 0]) == {"1": 3, "2": 1, "4": 1, "5-8": 1, "9-16": 1, "33-64": 1}
    assert drawn["cardinality"].data["share_of_tokens"].sum() == pytest.approx(1)

    heads = drawn["ranks"].data.set_index(["rank", "matrix", "layer"])
    assert len(heads) == 2 * 3 * 3
    assert (heads["low"] <= heads["mean"]).all()
    assert (heads["mean"] <= heads["high"]).all()
    assert sum("ρ = +0.12 [−0.34, +0.56]" in text for text in texts(drawn["similarity_spectrum"])) == 3

    shown = texts(drawn["rule_weights"])
    assert any("a minimum: 75% of the pairs,\n67% of them between" in text for text in shown)
    cells = drawn["rule_weights"].data
    assert cells["pairs"].sum() == 4  # what lies beyond stands in the outermost columns
    assert cells.loc[cells["true rule"] == "a maximum", "true"].item() == pytest.approx(1.9)
    assert cells["pairs"].max() == 2
    alphas = drawn["merged_alphas"].data.set_index("set")
    assert alphas.loc["merged"].query("share > 0")["share"].tolist() == [0.25, 0.75]
    assert alphas.loc["merged"].query("share == 0.75")["low"].item() < 2e-5
    assert any("n = 9 a layer" in text for text in texts(drawn["angle_relation"]))

    sag = drawn["sag"].data
    assert list(sag["position"]) == [0, 32, 64, 96, 128, 160, 192]
    assert sag["full"].sum() == pytest.approx(1)
    assert list(sag.columns) == ["position", "full", "evicted", "merged", "compensated"]


def test_a_sweep_shows_every_arm_at_every_share_of_its_panel(drawn, records):
    figure = drawn["sweep"]
    table = figure.data
    # metrics x (the full cache and the arms at each share)
    assert len(table) == 3 * (1 + 3 * 5) + 3 * (1 + 2 * 5)
    assert list(table["panel"].unique()) == ["one-shot", "chunked"]
    one_shot, chunked = figure.axes[0], figure.axes[1]  # KL
    assert one_shot.get_yscale() == "log"
    assert [tick.get_text() for tick in figure.axes[-1].get_xticklabels()] == ["10%", "50%", "90%"]
    assert one_shot.get_title(loc="left") == "one-shot, n = 24" and "nats a token" in one_shot.get_ylabel()
    assert len(one_shot.lines) == len(chunked.lines) == 5  # the full cache is no distance from itself
    assert [len(line.get_xdata()) for line in chunked.lines] == [2] * 5
    assert sum(line.get_linestyle() == ":" for line in figure.axes[2].lines) == 1  # NLL: the full cache
    colors = {plots.look(arm).color for arm in ARMS if arm != "full"}
    assert {line.get_color() for line in one_shot.lines} == colors
    x = np.array([line.get_xdata() for line in one_shot.lines])
    assert len(np.unique(x)) == x.size and np.abs(x - [0.1, 0.5, 0.9]).max() < 0.05  # none covers another
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["full cache", "SnapKV", "SelKV", "SelKV: evict only", "KVSlimmer", "mine"]
    row = table.query("panel == 'one-shot' and metric == 'kl' and arm == 'selkv' and retain == 0.1").iloc[0]
    assert row["mean"] == pytest.approx(0.9 * records[records["arm"] == "selkv"]["kl"].mean())
    assert row["low"] < row["mean"] < row["high"]


def test_a_kl_of_zero_has_a_place_on_the_logarithmic_axis(records):
    none = records.assign(kl=records["kl"].where(records["arm"] != "selkv", 0.0))
    figure = plots.sweep({"": analyses.sweep(swept(none, 0.1, 0.9), n_boot=50)})
    line = next(line for line in figure.axes[0].lines if line.get_color() == plots.look("selkv").color)
    assert list(line.get_ydata()) == [1e-4, 1e-4]
    stored = figure.data.query("arm == 'selkv' and metric == 'kl'")
    assert set(stored["mean"]) == {0.0}  # the table has the number


def test_lasting_differences_have_a_line_each(drawn):
    figure = drawn["lasting"]
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["SelKV minus SnapKV", "SelKV minus SelKV: evict only"]
    colors = {line.get_color() for line in figure.legends[0].get_lines()}
    assert len(colors) == 2  # though the arm is the same
    assert set(figure.data["retain"]) == {0.1, 0.5, 0.9}
    assert "below 0 is better" in figure.axes[0].get_ylabel() and "above 0" in figure.axes[4].get_ylabel()


def test_datasets_are_named_with_their_category_and_count(drawn, records):
    ticks = [tick.get_text() for tick in drawn["datasets"].axes[0].get_xticklabels()]
    assert ticks == [f"{name}\n{name}, n = 4" for name in CATEGORIES]
    means = records.groupby(["arm", "task"])["score"].mean()
    assert f"{means['selkv', 'code']:.1f}" in texts(drawn["datasets"])


def test_models_stand_apart_with_their_intervals_and_counts(drawn):
    axis = drawn["across"].axes[0]
    one, other = (line for line in axis.lines if line.get_label().startswith(("a,", "b,")))
    assert [one.get_label(), other.get_label()] == ["a, n = 24", "b, n = 24"]
    assert (np.asarray(other.get_ydata()) - np.asarray(one.get_ydata()) > 0.1).all()
    assert np.allclose(other.get_xdata(), 2 * np.asarray(one.get_xdata()))
    assert len(axis.collections) == 2 and "full cache" not in texts(drawn["across"])


def test_intervals_that_do_not_exist_are_left_out(tmp_path, records):
    one_each = records[records["sample"].str.endswith("/0")]
    comparison = stats.compare(one_each, ["kl"], ["selkv", "kvslimmer"], "full", n_boot=50)
    assert comparison["low"].isna().all()
    plots.save(plots.intervals(comparison), tmp_path, "single")  # no warning, no error
    plots.save(plots.main_scores(stats.means(one_each, ["score"], ARMS, n_boot=50)), tmp_path, "means")


def test_what_cannot_be_drawn_is_refused(records, tmp_path):
    two = pd.concat([records, records[records["arm"] == "selkv"].assign(retain=0.1)])
    with pytest.raises(UserError, match="one retention an arm"):
        plots.categories(two)
    with pytest.raises(UserError, match="unknown token state lost; use kept, merged, dropped"):
        plots.entries_map(pd.DataFrame({"head": [0], "position": [0], "state": ["lost"]}))
    with pytest.raises(UserError, match="add the variant full"):
        plots.sag(pd.DataFrame({"position": [0], "variant": ["evicted"], "mass": [1.0]}))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write figures to"):
        plots.save(plots.categories(records), tmp_path / "file" / "figures", "x")


# --- the palette --------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009: full protanopia and deuteranopia, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
SHOWN_TOGETHER = (
    ("full", "streaming-llm", "snapkv", "selkv", "selkv/on-snapkv", "kvslimmer"),
    ("selkv", "selkv/evict", "selkv/merge-all", "selkv/gate"),
    (
        "selkv",
        "selkv/gate",
        "selkv/gate+count",
        "selkv/gate+gated-count",
        "selkv/alpha-1",
        "selkv/merge-all+ratio",
    ),
    ("full", "h2o", "snapkv", "pyramidkv", "look-m", "selkv", "kvslimmer"),
    ("full", "streaming-llm", "snapkv", "selkv", "bifocal", "selkv/evict"),
    ("streaming-llm", "h2o", "snapkv", "pyramidkv", "look-m", "bifocal", "selkv", "selkv/evict"),
    ("streaming-llm", "asymkv", "kvslimmer", "kvslimmer/drop-lighter"),
    ("full", "asymkv", "kvslimmer", "kvslimmer-released"),
    ("kvslimmer", "kvslimmer/diagonal", "kvslimmer/mass", "kvslimmer/mean", "kvslimmer/drop-lighter"),
    ("kvslimmer", "kvslimmer/plain-sum", "kvslimmer/plain-mean", "kvslimmer/mass-values", "kvslimmer/as-key"),
    ("kvslimmer", "kvslimmer/clamped", "kvslimmer/ratio", "kvslimmer/ratio-alpha-1", "kvslimmer/no-bias"),
)


def lab(color: str, blindness: np.ndarray) -> np.ndarray:
    """CIELAB of a colour as a person with this colour vision sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(blindness @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_every_arm_has_a_look_of_its_own():
    assert set(plots.LOOKS) == set(results.ARMS)
    assert len({look.color for look in plots.LOOKS.values()}) == len(plots.LOOKS)
    assert len({look.label for look in plots.LOOKS.values()}) == len(plots.LOOKS)
    assert plots.look("mine").label == "mine"
    assert plots.look("bifocal/window-8") == plots.Look("#555555", "o", "Selector: window 8")  # not ours
    assert plots.look("bifocal/sharp").color == plots.look("bifocal").color


@pytest.mark.parametrize("vision", BLINDNESS)
@pytest.mark.parametrize("arms", SHOWN_TOGETHER, ids=lambda arms: arms[1])
def test_arms_in_one_figure_differ_for_every_eye_and_from_white(arms, vision):
    """A CIELAB distance of 10 is plainly visible side by side; markers differ as well."""
    seen = {arm: lab(plots.look(arm).color, BLINDNESS[vision]) for arm in arms}
    for one, other in itertools.combinations(arms, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 10, (one, other)
        assert plots.look(one).marker != plots.look(other).marker, (one, other)
    assert all(np.linalg.norm(color - [100, 0, 0]) > 25 for color in seen.values())


# --- published numbers --------------------------------------------------------------------------------------------


def test_published_numbers_load_and_are_found_by_name():
    table = published.load()
    assert tuple(table.columns) == published.COLUMNS
    assert len(table) > 30
    setting = "25% retention; 3500 tokens"
    assert published.lookup("SelKV", "Gemma-2-9B-IT", "LongBench-16", setting, "SelKV") == 42.31
    with pytest.raises(
        UserError, match=r"no number for SelKV in SelKV .*it has Gemma-2-9B-IT, LongBench-16, 25%"
    ):
        published.lookup("SelKV", "GPT-2", "LongBench-16", setting, "SelKV")


def test_published_averages_stand_beside_ours(records):
    ours = results.main_table(records)
    table = published.beside(ours)
    assert list(table.index) == list(ours.index)
    assert list(table["here"]) == list(ours["average"])
    gemma = table["SelKV: Gemma-2-9B-IT (25% retention; 3500 tokens)"]
    assert (gemma["full"], gemma["snapkv"], gemma["selkv"]) == (42.98, 42.16, 42.31)
    assert np.isnan(gemma["kvslimmer"])
    assert table["KVSlimmer, AsymKV: Llama-3.1-8B-Instruct (cache 2048)"]["kvslimmer"] == 44.04
    assert (table.notna().sum() >= 2).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("paper,value\n", r"bad.csv, line 1: the header is not ours"),
        ("{header}\nSelKV,m,b,s,Full,average,42\n", r"line 2 has 7 fields, not 8"),
        ("{header}\nSelKV,m,b,s,Full,average,42,\nSelKV,m,,s,Full,average,42,\n", r"line 3 has no benchmark"),
        ("{header}\nSelKV,m,b,s,Full,average,high,\n", r"line 2: value 'high' is not a finite number"),
        ("{header}\nSelKV,m,b,s,Full,average,nan,\n", r"line 2: value 'nan' is not a finite number"),
        ("{header}\nSelKV,m,b,s,Full,average,1,\nSelKV,m,b,s,Full,average,2,\n", r"line 3 repeats .*line 2"),
        ('{header}\n"SelKV,m\n', r"bad.csv, line \d cannot be read"),
    ],
)
def test_a_malformed_published_row_is_named_by_file_and_line(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text.replace("{header}", ",".join(published.COLUMNS)))
    with pytest.raises(UserError, match=message):
        published.load(tmp_path)


def test_a_folder_without_published_numbers_is_refused(tmp_path):
    with pytest.raises(UserError, match="no published numbers in"):
        published.load(tmp_path)
