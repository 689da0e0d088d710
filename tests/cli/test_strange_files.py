"""From strange files to reports, as the README says: init, plan --compare, train, report, export.

The files have columns of other names and languages, missing values, quoted separators and line ends, a byte order mark, Windows
line ends, an empty last line, ids that are held out alone, and in one column a million distinct values.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sparsedp.cli.main import main

pytestmark = pytest.mark.slow

DISTINCT, HELD_OUT = 1_000_000, 30_000
# Values of rows, each too long to stand among random bytes by chance.
SECRETS = (
    "Größe",
    "«ад»",
    "São Paulo",
    "東京",
    "c0000007",
    "ü17",
    "Fïlm",
    "r55",
    "тихо",
    "naïve",
)  # values of somebody's


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARSEDP_DATA", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def write(
    path: str, head: list[str], rows: Iterable[list[Any]], opener: Callable[..., Any] = open, **form: Any
) -> None:
    with opener(path, "wt", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, lineterminator="\r\n", **form)
        writer.writerow(head)
        writer.writerows(rows)
        file.write("\r\n")


def clicks(draw: random.Random) -> Iterator[list[Any]]:
    """A cookie is in one row alone; the ads of the last rows, which are held out, are new."""
    places, ages = ["São Paulo", "東京", "Łódź", "", "N/A", "🙂land"], ["", "NA", *map(str, range(18, 90))]
    for i in range(DISTINCT + HELD_OUT):
        new = i >= DISTINCT
        ad = draw.randrange(200) + 200 * new
        name = f"Größe{ad} «ад»" if ad % 3 else f'ad,{ad} "quoted"'
        tags = "|".join(str(draw.randrange(3000)) for _ in range(draw.randrange(4)))
        clicked = draw.random() < (0.8 if ad % 2 else 0.2)
        yield ["yes" if clicked else "no", f"c{i:07d}", name if draw.random() > 0.02 else "", draw.choice(places),
               "" if draw.random() < 0.05 else f"{draw.gammavariate(2, 3):.2f}", draw.choice(ages), tags,
               f"2026-03-{1 + i * 27 // (DISTINCT + HELD_OUT):02d} {draw.randrange(24):02d}:00:00"]  # fmt: skip


def ratings(draw: random.Random) -> Iterator[list[Any]]:
    for user in range(1500):
        film, seconds = draw.randrange(200), draw.randrange(1_500_000_000, 1_700_000_000)
        for _ in range(draw.randrange(3, 30)):
            film = (film * 7 + 3) % 200 if draw.random() < 0.7 else draw.randrange(200)
            seconds += draw.randrange(1, 10**6)
            yield [f"ü{user}", f"Fïlm {film}", draw.choice(["1", "5", ""]), seconds]


def reviews(draw: random.Random) -> Iterator[list[Any]]:
    words = [
        "gut",
        "schlecht",
        "тихо",
        "громко",
        "静か",
        "leise",
        "größe",
        "teuer",
        "naïve",
        "déjà",
        "vu",
        "ok",
        "broken",
        "works",
        "fast",
        "slow",
    ]
    for i in range(8000):
        chosen = draw.choices(words, k=draw.randrange(20))
        text = " ".join(chosen) + ('\nsecond line, with "quotes"' if i % 50 == 0 else "")
        useful = {1000: "7", 2000: "NA"}.get(i, int("gut" in chosen))
        yield [f"r{draw.randrange(2500)}", f"p{draw.randrange(900)}", draw.randint(1, 5), text, useful]


def run(*arguments: str) -> None:
    assert main([*arguments]) == 0, arguments


def afternoon(config: str, *train: str) -> dict[str, Any]:
    """All that the README types after `init`; returns the statement."""
    run("plan", config, "--compare", "--look-at-data", "--quiet", *train)
    run("train", config, "--run-dir", "run", "--quiet", *train)
    run("report", "run", "--quiet")
    run("report", "run", "--public", "--quiet")
    run("report", "run", "--markdown", "--quiet")
    run("export", "run", "--to", "out")
    page = Path("run/private/report.html").read_text()
    assert "<h2>What is promised</h2>" in page and "Traceback" not in page
    card = yaml.safe_load(Path("out/README.md").read_text().split("---\n")[1])
    assert card["library_name"] == "pytorch"
    assert {"model.pt", "statement.json", "README.md", "report.html"} <= {path.name for path in Path("out").iterdir()}
    for path in Path("out").iterdir():  # nothing that a row says is in what may leave
        content = path.read_bytes()
        forms = [form for secret in SECRETS for form in (secret, json.dumps(secret)[1:-1])]
        assert not [form for form in forms if form.encode() in content], path
    return json.loads(Path("out/statement.json").read_text())


def test_a_click_log_with_a_million_cookies(capsys: pytest.CaptureFixture[str]) -> None:
    head = ["geklickt?", "cookie", "anúncio", "place of visit", "preis (€)", "age", "seen tags", "när"]
    write("klick log.csv", head, clicks(random.Random(1)))
    run("init", "klick log.csv")
    config = yaml.safe_load(Path("klick_log.yaml").read_text())
    data = config["data"]
    assert (data["label"], data["positive"], data["time"]) == ("geklickt?", ["yes"], "när")
    assert [*data["categorical"]] == ["anúncio", "place of visit"] and [*data["sequence"]] == ["seen tags"]
    data["categorical"]["cookie"] = {"buckets": 100_000}  # init leaves it out: every row has another
    data["held_out"] = HELD_OUT / (DISTINCT + HELD_OUT)
    Path("mine.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    capsys.readouterr()
    statement = afternoon("mine.yaml", "--set=training.batch_size=8192", "--set=training.epochs=1")
    assert "malformed" not in capsys.readouterr().err
    assert f"/{DISTINCT}" in statement["sampling"] and 0 < statement["epsilon"] <= 3
    assert any("guessed" in entry for entry in statement["not_covered"])
    log = Path("run/private/metrics.jsonl").read_text()
    assert re.search(r'"auc": 0\.[5-9]', log)  # of ads that nobody trained on: by the other columns, if at all


def test_ratings_with_names_of_another_language() -> None:
    head = ["Nutzer", "Film", "Sterne", "gesehen am"]
    write("bewertungen.tsv.gz", head, ratings(random.Random(2)), gzip.open, delimiter="\t")
    run("init", "--sequence", "bewertungen.tsv.gz", "--user", "Nutzer", "--item", "Film", "--time", "gesehen am")
    statement = afternoon("bewertungen.yaml", "--set=training.batch_size=150", "--set=training.epochs=3")
    assert statement["unit"] == "user" and "/1500" in statement["sampling"]


def test_reviews_with_line_ends_in_their_texts_and_strange_labels(capsys: pytest.CaptureFixture[str]) -> None:
    head = ["reviewer", "product code", "Bewertung", "Text der Rezension", "useful"]
    write("reviews.csv", head, reviews(random.Random(3)))
    run("init", "--text", "reviews.csv", "--user", "reviewer")
    config = yaml.safe_load(Path("reviews.yaml").read_text())
    assert [*config["data"]["text"]] == ["Text der Rezension"] and config["data"]["label"] == "useful"
    assert "label_above" not in config["data"] and "2 rows have another value or none" in capsys.readouterr().out
    statement = afternoon("reviews.yaml", "--set=training.epochs=2")
    assert statement["unit"] == "user"
    texts = [path.read_text() for path in Path("run/private").glob("*.json*")]
    assert any(re.search(r'"auc": 0\.[6-9]', text) for text in texts)
