"""`sparsedp init`, and `data.kind: table` from the command line: three strange files from a header to a trained model."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.jsonschema import config_schema
from sparsedp.cli.config.load import bundled_names, load_config, parse_yaml
from sparsedp.cli.main import main

try:
    import jsonschema
except ImportError:
    jsonschema = None

QUICK = ["--set", "training.epochs=1", "--set", "training.check=false", "--quiet", "--json"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(config: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["train", config, *QUICK, *options]) == 0
    return statement_of(capsys)


def statement_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    (statement,) = Path("runs").glob("*/release/statement.json")
    return json.loads(statement.read_text())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    return err


def clicks(rows: int = 300) -> str:
    """With a BOM, Windows line ends, quoted separators, gaps, Unicode and an empty last line."""
    draw = random.Random(1)
    lines = ["clicked;site;price;seen;title;user_id;when;row;empty"]
    for i in range(rows):
        site, price = draw.choice(["größe", "b", '"c;d"', ""]), draw.choice(["", "NA", "3.5", "-2", "1e3"])
        seen = "|".join(str(draw.randrange(50)) for _ in range(draw.randrange(6)))
        when = f"2026-03-{draw.randrange(1, 28):02d}"
        lines.append(
            f'{draw.choice(["yes", "no"])};{site};{price};{seen};"Red ""shoes""; {i % 7} left";u{i % 60};{when};{i};'
        )
    return "\ufeff" + "\r\n".join(lines) + "\r\n\r\n"


def test_a_click_log_with_columns_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("clicks.csv").write_text(clicks(), newline="")
    assert main(["init", "clicks.csv"]) == 0
    said = capsys.readouterr().out
    assert "sparsedp train clicks.yaml" in said and "row " in said and "it counts the rows" in said
    data = yaml.safe_load(Path("clicks.yaml").read_text())["data"]
    assert (data["label"], data["positive"], data["user"], data["time"]) == ("clicked", ["yes"], "user_id", "when")
    assert [*data["categorical"]] == ["site"] and [*data["numeric"]] == ["price"]
    assert [*data["sequence"]] == ["seen"] and [*data["text"]] == ["title"] and data["guessed"] is True
    written = " ".join(Path("clicks.yaml").read_text().replace("#", " ").split())
    assert (
        "sparsedp plan THIS_FILE --compare --look-at-data" in written and "keeps all that is learned of rare" in written
    )
    result = train("clicks.yaml", capsys)
    assert result["unit"] == "user"
    assert any("sparsedp init" in note for note in result["not_covered"])
    assert "clicks.yaml is there already" in refused(capsys, "init", "clicks.csv")
    assert main(["init", "clicks.csv", "--to", "other.yaml", "--label", "clicked"]) == 0


def test_numbers_without_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(2)
    rows = [
        f"{draw.random():.3f}\t{draw.randrange(4)}\t{draw.randrange(2)}\t{draw.randrange(10**6)}" for _ in range(200)
    ]
    Path("a b.tsv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    assert main(["init", "a b.tsv.gz"]) == 0
    data = yaml.safe_load(Path("a_b.yaml").read_text())["data"]
    assert data["label"] == "column_3" and data["columns"] == [f"column_{i}" for i in range(1, 5)]
    result = train("a_b.yaml", capsys, "--set", "model={kind: dlrm, dim: 4, bottom: [8], top: [8]}")
    assert result["unit"] == "example"


def test_parquet_with_lists_and_a_rating(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(3)
    n = 150
    table = {
        "stars": [draw.randrange(1, 6) for _ in range(n)],
        "tags": [[f"t{draw.randrange(9)}" for _ in range(draw.randrange(4))] for _ in range(n)],
        "zip": [10_000 + draw.randrange(30) for _ in range(n)],
    }
    Path("days").mkdir()
    for day in range(3):
        pq.write_table(pa.table({name: column[day::3] for name, column in table.items()}), f"days/day_{day}.parquet")
    assert main(["init", "days"]) == 0
    data = yaml.safe_load(Path("days.yaml").read_text())["data"]
    assert (data["label"], data["label_above"]) == ("stars", 3.0)
    assert [*data["sequence"]] == ["tags"] and [*data["categorical"]] == ["zip"]
    held_out = train("days.yaml", capsys, "--set", "data.held_out=[2]")
    assert held_out["unit"] == "example" and "100" in held_out["sampling"]


def test_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(4)
    lines = [f"{draw.randrange(1, 6)},c{i % 25},{draw.randrange(40)},{1_700_000_000 + i}" for i in range(400)]
    Path("log.csv").write_text("stars,customer_id,product,bought_time\n" + "\n".join(lines) + "\n")
    assert main(["init", "--sequence", "log.csv"]) == 0
    data = yaml.safe_load(Path("log.yaml").read_text())["data"]
    assert (data["user"], data["item"], data["time"]) == ("customer_id", "product", "bought_time")
    assert train("log.yaml", capsys, "--set", "data.length=8")["unit"] == "user"
    assert "no column is called like" not in refused(capsys, "init", "--sequence", "log.csv", "--to", "a.txt")


def test_columns_of_sequences_that_no_guess_would_find_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"ü{i % 30}\tFïlm {i % 7}\t{i % 5}\t{1_700_000_000 + i}" for i in range(200)]
    Path("log.tsv").write_text("Nutzer\tFilm\tSterne\tgesehen am\n" + "\n".join(lines) + "\n")
    assert "Name it: --user COLUMN" in refused(capsys, "init", "--sequence", "log.tsv")
    assert "no column is called like an item" in refused(capsys, "init", "--sequence", "log.tsv", "--user", "Nutzer")
    names = ["--user", "Nutzer", "--item", "Film", "--time", "gesehen am"]
    assert main(["init", "--sequence", "log.tsv", *names]) == 0
    data = yaml.safe_load(Path("log.yaml").read_text())["data"]
    assert (data["user"], data["item"], data["time"]) == ("Nutzer", "Film", "gesehen am")
    assert train("log.yaml", capsys, "--set", "data.length=8")["unit"] == "user"
    said = refused(capsys, "init", "--sequence", "log.tsv", "--to", "b.yaml", "--user", "nutzer")
    assert (
        "--user nutzer: the columns are Nutzer, Film, Sterne, gesehen am" in said and "Did you mean 'Nutzer'?" in said
    )
    twice = refused(capsys, "init", "--sequence", "log.tsv", "--to", "b.yaml", "--user", "Film", "--item", "Film")
    assert "the same column as --" in twice


@pytest.mark.parametrize("zipped", [False, True])
def test_the_batch_is_one_for_all_rows_not_for_those_that_were_looked_at(zipped: bool) -> None:
    draw = random.Random(5)
    text = "clicked,site\n" + "".join(f"{draw.randrange(2)},größe {draw.randrange(50)}\n" for _ in range(100_000))
    Path("log.csv").write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    assert main(["init", "log.csv"]) == 0
    assert yaml.safe_load(Path("log.yaml").read_text())["training"]["batch_size"] == 8192
    Path("days").mkdir()
    for day in range(3):  # each of them is looked at whole, and is a third of all
        Path(f"days/{day}.csv").write_text(text[:60_000].rpartition("\n")[0] + "\n")
    assert main(["init", "days"]) == 0
    assert yaml.safe_load(Path("days.yaml").read_text())["training"]["batch_size"] == 1024


@pytest.mark.parametrize("together, batch", [(True, 256), (False, 64)])
def test_the_batch_of_sequences_is_one_for_all_users(together: bool, batch: int) -> None:
    users = [user for user in range(5000) for _ in range(5)] if together else [i % 1000 for i in range(25_000)]
    rows = [f"{user},{i % 40},{1_700_000_000 + i}" for i, user in enumerate(users)]
    Path("log.csv").write_text("user,item,time\n" + "\n".join(rows) + "\n")
    assert main(["init", "--sequence", "log.csv"]) == 0
    assert yaml.safe_load(Path("log.yaml").read_text())["training"]["batch_size"] == batch


TABLE = [
    "train",
    "table",
    *QUICK,
    "--set",
    "data.paths=log.csv",
    "--set",
    "data.label=y",
    "--set",
    "training.batch_size=16",
]


def write_days() -> None:
    rows = [f"{i % 2},s{i % 7},2023-11-{14 + i // 100:02d} {i % 24:02d}:30:00" for i in range(400)]
    Path("log.csv").write_text("y,site,when\n" + "\n".join(rows) + "\n")


TIMES = [*TABLE, "--set", "data.categorical=[site]", "--set", "data.time=when", "--run-dir", "run"]


@pytest.mark.parametrize(
    ("every", "held_out", "message"),
    [
        ("day", "['2024-01-01']", "data.held_out: there are no rows in the day 2024-01-01; there are some from 2023-11-14 to 2023-11-17"),
        ("hour", "['2023-11-14T23:00', '2024-01-01T05:00']", "in the hour 2024-01-01T05:00; there are some from 2023-11-14T00:00 to"),
        ("week", "[2900, 2901]", "in the weeks 2025-07-31, 2025-08-07; there are some from 2023-11-09 to 2023-11-16"),
    ],
)  # fmt: skip
def test_periods_that_are_not_there_are_named_by_their_dates(
    every: str, held_out: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_days()
    assert message in refused(capsys, *TIMES, "--set", f"data.every={every}", "--set", f"data.held_out={held_out}")


def test_periods_of_time_are_shown_by_their_dates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_days()
    options = [option for option in TIMES if option not in ("--quiet", "--json")]
    stream = ["--set", "stream={composition: parallel, evaluate_next: true}", "--set", "data.every=day"]
    early = refused(capsys, *options, *stream, "--set", "data.held_out=['2023-11-15']")
    assert "period 2023-11-15 is held out, and the stream trains on periods up to 2023-11-17" in early
    assert "data.held_out=['2023-11-17']" in early
    held_out = ["--set", "data.held_out=['2023-11-16', '2023-11-17']"]
    assert main([*options, *stream, *held_out]) == 0
    said = "".join(capsys.readouterr())
    assert "Stream: periods 2023-11-14 to 2023-11-15" in said and "period 2023-11-15  loss" in said
    assert "Period 2023-11-15, before training on it" in said
    assert "period 2023-11-17" in said and "period 196" not in said
    assert main(["report", "run", "--quiet"]) == 0
    page = Path("run/private/report.html").read_text()
    assert "2023-11-16" in page and "2023-11-15, before training on it" in page


def test_users_of_a_table_can_be_named_and_yes_and_no_are_a_label(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i},k{i % 40},u{i % 3},{'Yes' if i % 3 else 'no'},g{i % 4}" for i in range(120)]
    Path("log.csv").write_text("nr,Kundin,user,geklickt?,ad\n" + "\n".join(rows) + "\n")
    assert main(["init", "log.csv", "--user", "Kundin"]) == 0
    data = yaml.safe_load(Path("log.yaml").read_text())["data"]
    assert (data["user"], data["label"], data["positive"]) == ("Kundin", "geklickt?", ["Yes"])
    assert [*data["categorical"]] == ["ad"]  # not user: there is another column for it
    assert train("log.yaml", capsys)["unit"] == "user"


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["good film", "bad film indeed", "so so"]
    Path("reviews.tsv").write_text("review\tlabel\n" + "".join(f"{words[i % 3]}\t{i % 2}\n" for i in range(100)))
    assert main(["init", "--text", "reviews.tsv"]) == 0
    data = yaml.safe_load(Path("reviews.yaml").read_text())["data"]
    assert (data["kind"], data["text"], data["label"], data["classes"]) == ("text", "review", "label", 2)
    assert train("reviews.yaml", capsys)["unit"] == "example"


def test_stars_of_texts_have_no_class_0(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"it was so {['bad', 'dull', 'good'][i % 3]} a film\t{1 + i % 5}" for i in range(150)]
    Path("stars.tsv").write_text("\n".join(["review\tstars", *rows, "an odd film\t99"]) + "\n")
    assert main(["init", "--text", "stars.tsv", "--label", "stars"]) == 0
    assert "5 classes" in capsys.readouterr().out
    data = yaml.safe_load(Path("stars.yaml").read_text())["data"]
    assert data["classes"] == ["1", "2", "3", "4", "5"]
    assert train("stars.yaml", capsys)["unit"] == "example"


def test_pairs_of_texts_with_named_classes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{['yes', 'no', 'maybe'][i % 3]},a film {i % 5},it is good {i % 7},u{i % 40},{i}" for i in range(200)]
    Path("pairs.csv").write_text("gold_label,premise,hypothesis,user,row\n" + "\n".join(lines) + "\n")
    assert main(["init", "--text", "pairs.csv"]) == 0
    config = yaml.safe_load(Path("pairs.yaml").read_text())
    data = config["data"]
    assert (data["text"], data["second"], data["label"]) == ("premise", "hypothesis", "gold_label")
    assert data["classes"] == ["maybe", "no", "yes"] and data["user"] == "user" and config["model"]["pair"] == "towers"
    statement = train("pairs.yaml", capsys)
    assert statement["unit"] == "user" and any("guessed" in line for line in statement["not_covered"])


def test_a_file_without_words_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("log.csv").write_text("y,site\n" + "".join(f"{i % 2},s{i % 9}\n" for i in range(100)))
    said = refused(capsys, "init", "--text", "log.csv")
    assert "--text: no column of log.csv is written in words; the columns are y, site" in said
    assert not Path("log.yaml").exists()


def test_texts_beside_other_columns_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["good film", "bad film indeed", "so so"]
    lines = [f"{words[i % 3]}\tc{i % 4}\t{i % 2}" for i in range(100)]
    Path("reviews.tsv").write_text("review\tcountry\tlabel\n" + "\n".join(lines) + "\n")
    assert main(["init", "--text", "reviews.tsv"]) == 0
    data = yaml.safe_load(Path("reviews.yaml").read_text())["data"]
    assert data["kind"] == "table" and [*data["text"]] == ["review"] and [*data["categorical"]] == ["country"]
    assert "--label nothing: the columns are" in refused(
        capsys, "init", "--text", "--label", "nothing", "reviews.tsv", "--to", "b.yaml"
    )


def write_labels(labels: list[str], name: str = "clicked") -> None:
    rows = [f"{label},s{i % 9},{i % 40}.5" for i, label in enumerate(labels)]
    Path("log.csv").write_text(f"{name},site,price\n" + "\n".join(rows) + "\n")


@pytest.mark.parametrize("strange", ["7", "NA", "nan", "", "abc"])
@pytest.mark.parametrize("options", [[], ["--label", "clicked"]])
def test_one_strange_value_does_not_change_what_a_label_is(
    strange: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_labels([str(i % 2) for i in range(499)] + [strange])
    assert main(["init", "log.csv", *options]) == 0
    said = capsys.readouterr().out
    assert "its values are 0 and 1; 1 row has another value or none, and will be left out" in said
    data = yaml.safe_load(Path("log.yaml").read_text())["data"]
    assert data["max_malformed"] == 0.01 and "label_above" not in data and "positive" not in data


def test_rows_with_a_strange_label_or_number_are_left_out_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i % 2},{i % 40}.5,s{i % 9}" for i in range(90)]
    rows[4], rows[33] = "7,1.5,s1", "1,abc,s2"
    Path("log.csv").write_text("clicked,price,site\n" + "\n".join(rows) + "\n")
    assert main(["init", "log.csv"]) == 0
    said = capsys.readouterr().out
    assert "0 and 1; 1 row has another value or none, and will be left out" in said
    assert "numbers; 1 row has another value, and will be left out" in said
    data = yaml.safe_load(Path("log.yaml").read_text())["data"]
    assert [*data["numeric"]] == ["price"] and data["max_malformed"] == 0.05
    assert "/79" in train("log.yaml", capsys)["sampling"]  # 88 rows are left, of which 9 are held out


@pytest.mark.parametrize(
    ("labels", "name", "expected"),
    [
        (["yes", "no"] * 100 + ["mayhap"], "clicked", {"positive": ["yes"], "negative": ["no"], "max_malformed": 0.01}),
        (["1", "2"] * 100 + ["900"], "group", {"positive": ["2"], "negative": ["1"], "max_malformed": 0.01}),
        (["-1", "1"] * 100, "clicked", {"label_above": 0.0}),
        (["none", "click"] * 100, "clicked", {"positive": ["click"], "negative": ["none"]}),
        ([*"12345"] * 60 + ["9999"], "stars", {"label_above": 3.0}),
        ([*"12345"] * 60 + ["good"], "stars", {"label_above": 3.0, "max_malformed": 0.01}),
        (["0", "1"] * 100 + ["NA"] * 50, "clicked", {"max_malformed": 0.5}),
        (["0", "1", "2"] * 100, "clicked", {"label_above": 1.0}),
        ([f"{i}.25" for i in range(201)], "clicked", {"label_above": 100.25}),
    ],
)
def test_labels_with_a_few_strange_values(labels: list[str], name: str, expected: dict[str, Any]) -> None:
    write_labels(labels, name)
    assert main(["init", "log.csv", "--label", name]) == 0
    data = yaml.safe_load(Path("log.yaml").read_text())["data"]
    keys = ("positive", "negative", "label_above", "max_malformed")
    assert {key: data[key] for key in keys if key in data} == expected


def test_numbers_of_which_none_occurs_often_are_a_label_for_whoever_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_labels([f"{i}.25" for i in range(200)], "target")
    assert "no column looks like a label" in refused(capsys, "init", "log.csv")


def test_rows_without_a_time_or_a_user_are_left_out_and_a_column_that_mostly_lacks_it_is_not_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [f"{i % 2},s{i % 7},2026-01-{1 + i % 28:02d},{'' if i % 5 else '2026-02-01'},u{i % 40}" for i in range(400)]
    rows[7] = "1,s1,NA,,u3"
    rows[8] = "1,s1,2026-01-02,,"
    Path("log.csv").write_text("clicked,site,when,expires,user\n" + "\n".join(rows) + "\n")
    assert main(["init", "log.csv"]) == 0
    assert "too many rows have none" in capsys.readouterr().out
    data = yaml.safe_load(Path("log.yaml").read_text())["data"]
    assert (data["time"], data["user"], data["max_malformed"]) == ("when", "user", 0.01)
    assert train("log.yaml", capsys)["unit"] == "user"


def test_classes_of_texts_with_a_strange_label(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{'7' if i == 9 else i % 2}\tgood film {i % 5}" for i in range(200)]
    Path("reviews.tsv").write_text("label\treview\n" + "\n".join(lines) + "\n")
    assert main(["init", "--text", "reviews.tsv"]) == 0
    data = yaml.safe_load(Path("reviews.yaml").read_text())["data"]
    assert (data["classes"], data["max_malformed"]) == (2, 0.01)
    assert train("reviews.yaml", capsys)["unit"] == "example"


@pytest.mark.filterwarnings("always::sparsedp.UtilityWarning")
@pytest.mark.parametrize(
    ("labels", "which"),
    [(["0"] * 200, "both"), ([str(i % 2) for i in range(180)] + ["1"] * 20, "held out")],
)
def test_labels_of_one_class_are_noticed(
    labels: list[str], which: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_labels(labels)
    assert main(["init", "log.csv"]) == 0
    assert main(["train", "log.yaml", *QUICK[:-2], "--run-dir", "run"]) == 0
    output = capsys.readouterr()
    training, held_out = "All labels to train on are 0: the model can learn nothing", "held-out labels are"
    assert (training in output.err, f"{held_out} {labels[-1]}: there is no AUC" in output.err) == (
        which == "both",
        True,
    )
    assert "–: only one class is held out" in output.out and "nan" not in output.out
    log = [json.loads(line) for line in Path("run/private/metrics.jsonl").read_text().splitlines()]
    assert any(held_out in row["message"] for row in log if row["kind"] == "warning")
    assert main(["report", "run", "--quiet"]) == 0
    page = Path("run/private/report.html").read_text()
    assert held_out in page and "–: only one class is held out" in page
    assert main(["report", "run", "--public", "--quiet"]) == 0
    released = [path.read_bytes() for path in Path("run/release").rglob("*") if path.is_file()]
    assert not any(held_out.encode() in content for content in released)  # it is about private data


def test_an_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--own-model"]) == 0
    assert Path("own_model.py").is_file() and isinstance(load_config("own_model.yaml"), Config)
    assert "own_model.py is there already" in refused(capsys, "init", "--own-model")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "no such file"),
        ("", [], "is empty"),
        ("a,b\n", [], "no rows under the header"),
        ("hello\n", [], "neither tabs nor commas"),
        ("a,b\nx,y\nz,w\nv,u\n", [], "no column looks like a label"),
        ("a,b\nx,1\nz,0\n", ["--label", "c"], "--label c: the columns are a, b"),
        ("a,label\nx,1\nx,0\n", [], "no column but the label, label, looks like one to learn from"),
        ("a,b\nx,1\n", ["--sequence"], "no column is called like"),
        ("a,b\nx,1\n", ["--sequence", "--label", "a"], "sequences have none"),
        ("a,b\nx,1\n", ["--item", "a"], "--item: is for --sequence"),
        ("a,b\nx,1\nz,0\n", ["--user", "c"], "--user c: the columns are a, b"),
        ("a,b\nx,1\n", ["--to", "no/folder.yaml"], "there is no folder no"),
        ("a,b\nx,1\n", ["--to", "a.csv"], "is there already"),
    ],
)
def test_init_refuses(
    content: str | None, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("a.csv").write_text(content)
    assert message in refused(capsys, "init", "a.csv", *options)
    assert not Path("a.yaml").exists()


def write_log() -> None:
    draw = random.Random(5)
    lines = [f"{draw.randrange(2)},{'abc'[draw.randrange(3)]},{draw.randrange(90)}" for _ in range(200)]
    Path("log.csv").write_text("y,site,age\n" + "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("columns", "private"),
    [
        ("data={categorical: {site: {file: sites.txt}}, numeric: {age: {buckets: [18, 65]}}}", False),
        ("data={sequence: {site: {buckets: 9}}, numeric: {age: {low: 0, high: 100}}}", False),
        ("data.categorical={site: {min_count: 2}}", True),
        ("data.sequence={site: {min_count: 2}}", True),
    ],
)
def test_the_statement_tells_what_was_counted(columns: str, private: bool, capsys: pytest.CaptureFixture[str]) -> None:
    write_log()
    Path("sites.txt").write_text("a\nb\n")
    key, _, given = columns.partition("=")
    values = yaml.safe_load(given) if key == "data" else {key.partition(".")[2]: yaml.safe_load(given)}
    options = [part for name, value in values.items() for part in ("--set", f"data.{name}={json.dumps(value)}")]
    assert main([*TABLE, *options]) == 0
    notes = statement_of(capsys)["not_covered"]
    assert any("counted on the private data without noise" in note for note in notes) == private


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["data.numeric={age: {buckets: 10}}"],
            "data.numeric.age.buckets: boundaries counted on private data have no guarantee",
        ),
        (["data.numeric={age: {buckets: quantiles}}"], "data.numeric.age.buckets: boundaries counted on private data"),
        (["data.numeric={age: {low: 1}}"], "column age: low and high are given together"),
        (
            ["data.numeric={age: {lwo: 1}}"],
            "data.numeric.age.lwo: unknown key; expected one of transform, low, high, buckets",
        ),
        (["data.categorical={site: {bucket: 9}}"], "Did you mean 'buckets'?"),
        (["data.categorical={site: {buckets: 9, min_count: 2}}"], "data.categorical.site: give one of"),
        (["data.categorical=[site]", "data.user=site"], "the user column 'site' is read as something else"),
        (["data.categorical=[sites]"], "lacks the columns sites; it has y, site, age. Did you mean 'site'?"),
        (["data.categorical=[site]", "data.label=yy"], "lacks the columns yy"),
        (["data.categorical=[site]", "data.label=sites"], "Did you mean 'site'? If that line is a row"),
        (
            ["data.categorical=[site]", "data.held_out=['2026-01-01']"],
            "data.held_out: dates are held out where data.time",
        ),
        (["data.categorical=[site]", "data.held_out=[3]"], "held_out=[the periods]"),
        (["data.categorical=[site]", "data.label=age"], "log.csv, line 2: age is neither 0 nor 1"),
        ([], "needs a column to learn from"),
        (["data.categorical=[site]", "data.separator=ab"], "data.separator: expected one character"),
        (["data.categorical=[site]", "data.paths=$NOWHERE/a"], "there is no environment variable NOWHERE"),
    ],
)
def test_tables_that_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_log()
    arguments = [argument for option in options for argument in ("--set", option)]
    assert message in refused(capsys, *TABLE, *arguments)
    assert not list(Path("runs").glob("log*"))


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether a value is as a JSON schema says, as far as ours goes."""
    if "$ref" in schema:
        return fits(value, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema:
        return any(fits(value, member, whole) for member in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int}
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if schema.get("type") in ("number", "integer"):
        low, high = schema.get("minimum", -1e99), schema.get("maximum", 1e99)
        return number and low <= value <= high and (schema["type"] == "number" or value == int(value))
    if "type" in schema and not isinstance(value, types[schema["type"]]):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        unique = len({*map(str, value)}) == len(value) or not schema.get("uniqueItems", False)
        return unique and all(fits(item, schema["items"], whole) for item in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        others = {} if others is True else {"enum": []} if others is False else others
        there = {*schema.get("required", [])} <= {*value}
        return there and all(fits(v, known.get(k, others), whole) for k, v in value.items())
    return True


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """By our own reading of the schema, and by jsonschema's, if that is installed."""
    ours = fits(value, schema, schema)
    if jsonschema is not None:
        assert jsonschema.Draft202012Validator(schema).is_valid(value) == ours, value
    return ours


WRONG = {
    "an unknown setting of a mechanism": ("demo", "privacy.mechanism", {"name": "adafest", "treshold": 3.0}),
    "a threshold that is a text": ("demo", "privacy.mechanism", {"name": "adafest", "threshold": "much"}),
    "an unknown mechanism": ("demo", "privacy.mechanism", "adafst"),
    "a mechanism without a name": ("demo", "privacy.mechanism", {"threshold": 3.0}),
    "an option of another mechanism": ("demo", "privacy.mechanism", {"name": "lazydp", "k": 3}),
    "an unknown option of a column": ("table", "data.categorical", {"site": {"bucket": 50}}),
    "0 said of a column": ("table", "data.categorical", {"site": 0}),
    "an option of another kind of column": ("table", "data.numeric", {"price": {"length": 3}}),
    "a column twice": ("table", "data.categorical", ["a", "a"]),
    "no epochs": ("demo", "training.epochs", 0),
    "a key that is misspelt": ("demo", "training.epoch", 3),
}
RIGHT = {
    "a mechanism's name": ("demo", "privacy.mechanism", "lazydp"),
    "a mechanism of one's own": ("demo", "privacy.mechanism", {"name": "mine.rules:Mine", "width": 3}),
    "AdaFEST+": ("demo", "privacy.mechanism", {"name": "adafest", "preselect": {"name": "fest", "counts": "public", "k": 9}}),
    "a threshold to be found": ("demo", "privacy.mechanism", {"name": "adafest", "threshold": "auto", "look_at": "counts"}),
    "columns with options": ("table", "data.categorical", {"site": None, "device": {"buckets": 50}}),
    "columns in a list": ("table", "data.text", ["title", "body"]),
}  # fmt: skip


def bundled(name: str) -> dict[str, Any]:
    folder = Path(main.__code__.co_filename).parent / "configs"
    values = parse_yaml((folder / f"{name}.yaml").read_text(), name)
    if name in ("table", "criteo"):
        values["data"] |= {"paths": "clicks.csv"}  # which is to be given
    return values


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return config_schema()


def test_the_json_schema_is_printed(capsys: pytest.CaptureFixture[str], schema: dict[str, Any]) -> None:
    if jsonschema is not None:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema


def test_the_json_schema_describes_keys_as_the_bundled_configurations_do(schema: dict[str, Any]) -> None:
    kinds = schema["$defs"]
    assert not [kind["description"] for kind in kinds.values() if re.match(r"\w+\(", kind.get("description", ""))]
    of_privacy, of_table = (kinds[name]["properties"] for name in ("PrivacyConfig", "TableData"))
    assert of_privacy["max_grad_norm"]["description"] == "every unit's gradient is clipped to this norm"
    assert of_table["negative"]["description"].startswith("these do, as in [no]")
    assert "description" not in kinds["TrainingConfig"]["properties"]["epochs"]  # stream.yaml's is about streams
    of_text, of_sequences = (kinds[name]["properties"]["length"] for name in ("TextData", "SequencesData"))
    assert of_text.get("description") != of_sequences.get("description")  # each its own


@pytest.mark.parametrize("name", bundled_names())
def test_every_bundled_configuration_is_as_the_json_schema_says(name: str, schema: dict[str, Any]) -> None:
    values = bundled(name)
    assert is_valid(values, schema), name
    assert not is_valid({**values, "trainig": {}}, schema)
    assert not is_valid({**values, "training": {**values["training"], "epochs": 0}}, schema)


@pytest.mark.parametrize("case", [*WRONG, *RIGHT])
def test_what_the_json_schema_marks(case: str, schema: dict[str, Any]) -> None:
    name, path, value = (WRONG | RIGHT)[case]
    values = bundled(name)
    section, key = path.split(".")
    values[section] = {**values[section], key: value}
    assert is_valid(values, schema) == (case in RIGHT)


def test_the_bundled_table_finds_its_threshold_in_the_data_and_the_statement_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_log()
    statement = train("table", capsys, *TABLE[2:], "--set", "data.categorical=[site]")
    assert any("threshold" in note and "without noise" in note for note in statement["not_covered"])
