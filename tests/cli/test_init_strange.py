"""`sparsedp init` on files that are not as they look: what it says and writes is what training then reads."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsedp.cli.main import main


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(lines: Iterable[str], name: str = "log.csv", encoding: str = "utf-8") -> None:
    Path(name).write_text("\n".join(lines) + "\n", encoding=encoding, newline="")


def init(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["init", *words, "--to", "log.yaml"]) == code
    out, err = capsys.readouterr()
    return err.removeprefix("sparsedp: error: ").strip() if code else out


def data() -> dict[str, Any]:
    return yaml.safe_load(Path("log.yaml").read_text(encoding="utf-8"))["data"]


def trained(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", "log.yaml", "--no-measure"]) == 0
    return capsys.readouterr().err


def log(column: Callable[[int], str], count: int = 60, header: str = "clicked,site,x") -> list[str]:
    return [header, *(f"{i % 2},s{i % 9},{column(i)}" for i in range(count))]


def test_lines_that_are_no_rows_are_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    write([line + (",more" if i in (7, 9) else "") for i, line in enumerate(log(lambda i: f"{i % 5}.5", 100))])
    said = init(capsys, "log.csv")
    assert (
        "98 rows looked at\n  2 lines are no rows and will be left out, the first: log.csv, line 8: 4 fields, expected 3"
        in said
    )
    assert data()["max_malformed"] == 0.05
    trained(capsys)


def test_a_file_of_which_most_lines_are_no_rows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write(["clicked,site", *(f"{i % 2},café{i % 9}" for i in range(50))], encoding="latin-1")
    said = init(capsys, "log.csv", code=2)
    assert said.startswith(
        "50 of 50 lines are malformed, more than max_malformed=0.5 allows: log.csv, line 2: is not text in UTF-8;"
    )
    assert "and 30 more. Save the file as UTF-8." in said
    write(["clicked,größe", "1,2"], encoding="latin-1")
    assert init(capsys, "log.csv", code=2).endswith("log.csv, line 1: is not text in UTF-8. Save the file as UTF-8")
    write(["clicked,site", *(f"{i % 2},s" for i in range(30)), '1,"never closed', *(f"{i % 2},s" for i in range(30))])
    assert "line 32: a quote begins there that is never closed" in init(capsys, "log.csv", code=2)


def test_a_header_with_a_name_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write(log(str, header="clicked,site,site"))
    assert init(capsys, "log.csv", code=2).endswith(
        "log.csv: the header has site twice: give every column a name of its own"
    )
    write(["b,a,a", *("ab"[i % 2] + ",a," + "abc"[i % 3] for i in range(60))])  # a row: letters stand above letters
    said = init(capsys, "log.csv", "--label", "column_1")
    assert "61 rows looked at\n  the first line is taken for a row, not for a header\n" in said


def test_the_index_that_pandas_writes_has_no_name_and_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    write([f"{'' if i == 0 else i - 1},{line}" for i, line in enumerate(log(lambda i: f"{i % 5}.5"))])
    assert "60 rows looked at\n  a column without a name: left out\n" in init(capsys, "log.csv")
    assert [*data()["categorical"]] == ["site"] and [*data()["numeric"]] == ["x"]
    trained(capsys)


@pytest.mark.parametrize(
    "date",
    [
        lambda i: f"{1 + i % 28:02}/03/2026" if i % 2 else f"2026-03-{1 + i % 28:02}",
        lambda i: f"03/{1 + i % 28:02}/2026 12:{i:02}",
        lambda i: f"{1 + i % 28}.3.2026",
    ],
)
def test_dates_in_a_form_that_is_not_read_are_no_words(
    date: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(log(date))
    assert "x        left out     its values look like dates; write them as in 2026-03-01" in init(capsys, "log.csv")
    assert "time" not in data() and "text" not in data() and "sequence" not in data()


def test_a_time_of_which_no_value_is_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write(log(lambda i: f"03/{1 + i % 28:02}/2026"))
    assert init(capsys, "log.csv", "--time", "x", code=2) == (
        "x as the time: its values are no times: each is neither seconds since 1970 nor a date as in 2026-03-01 or 2026-03-01T12:00:00"
    )
    write(["who,what,when", *(f"u{i % 7},i{i % 5},03/{1 + i % 28:02}/2026" for i in range(60))])
    said = init(capsys, "--sequence", "log.csv", "--user", "who", "--item", "what", "--time", "when", code=2)
    assert said.startswith("when as the time: its values are no times")
    assert not Path("log.yaml").exists()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda i: f'"{1 + i % 9},{i:03}.50"' if i % 3 else "900", None),
        (lambda i: f'"{1 + i % 9}.{i:03},50"' if i % 3 else "900", None),
        (lambda i: f'"{100 + i % 9},{200 + i % 5}"', "sequence"),
        (lambda i: f'"{i % 9},{i % 5},{i}"', "sequence"),
    ],
)
def test_numbers_with_separators_between_thousands_are_no_lists(
    value: Callable[[int], str], kind: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(log(value))
    said = init(capsys, "log.csv")
    assert ("numbers with separators between thousands" in said) == (kind is None)
    assert [key for key in ("numeric", "sequence", "text") if key in data()] == ([] if kind is None else [kind])


def test_why_a_column_is_what_it_is_is_true_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    write(log(lambda i: f"2026-03-{1 + i % 28:02}")[1:])
    said = init(capsys, "log.csv")
    assert "column_3  time         its values are dates\n" in said
    write(log(lambda i: str(1_700_000_000 + i), header="clicked,site,ts"))
    Path("log.yaml").unlink()
    assert "ts       time         its values are seconds, and its name says so\n" in init(capsys, "log.csv")
    Path("log.yaml").unlink()
    write(["clicked,site", *(f"1,s{i % 9}" for i in range(60))])
    assert "all of its values here mean the same, from which nothing can be learned" in init(capsys, "log.csv")


def test_yes_and_no_in_several_spellings_are_a_label_for_whoever_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["yes", "no", "1", "0", "True", "false", "1.0", "NO"]
    write(["sold,site", *(f"{words[i % 8]},s{i % 9}" for i in range(60))])
    init(capsys, "log.csv", "--label", "sold")
    assert data()["positive"] == ["1", "1.0", "True", "yes"] and data()["negative"] == ["0", "NO", "false", "no"]
    trained(capsys)
    Path("log.yaml").unlink()
    write(["sold,site", *(f"{['view', 'cart', 'buy'][i % 3]},s{i % 9}" for i in range(60))])
    assert "Which of them do is yours to write, as data.positive" in init(capsys, "log.csv", "--label", "sold", code=2)


def test_a_small_file_gets_a_batch_that_it_can_fill(capsys: pytest.CaptureFixture[str]) -> None:
    for rows, batch in ((12, 4), (4, 1), (20, 16)):
        write(log(lambda i: f"{i % 5}.5", rows))
        init(capsys, "log.csv")
        assert yaml.safe_load(Path("log.yaml").read_text())["training"]["batch_size"] == batch
        trained(capsys)
        Path("log.yaml").unlink()


# ------------------------------------------------------------------ texts


def review(i: int) -> str:
    return "a good and fine film" if i % 2 else "a bad and dull film"


def test_texts_longer_than_a_field_of_the_csv_module_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [review(i) + " and so on" * (20_000 if i == 3 else 1) for i in range(60)]
    write(["text\tlabel", *(f"{text}\t{'pos' if i % 2 else 'neg'}" for i, text in enumerate(texts))], "log.tsv")
    assert "log.tsv: 60 rows looked at\n" in init(capsys, "--text", "log.tsv")
    trained(capsys)


def test_tabs_within_quotes_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with open("log.tsv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["text", "label"])
        writer.writerows([review(i) + ("\tindeed" if i % 5 == 0 else ""), "pos" if i % 2 else "neg"] for i in range(60))
    assert "60 rows looked at\n  text" in init(capsys, "--text", "log.tsv")
    assert data()["quotes"] is True and data()["classes"] == ["neg", "pos"]
    trained(capsys)


def test_quotes_within_texts_between_tabs_are_part_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    write(["text\tlabel", *(f'"quoted" {review(i)} "open\t{"pos" if i % 2 else "neg"}' for i in range(60))], "log.tsv")
    init(capsys, "--text", "log.tsv")
    assert "quotes" not in data()
    trained(capsys)
    Path("log.yaml").unlink()
    write(['"text"\t"label"', *(f'"{review(i)}"\t"{"pos" if i % 2 else "neg"}"' for i in range(60))], "log.tsv")
    init(capsys, "--text", "log.tsv")
    assert data()["quotes"] is True and data()["text"] == "text"
    trained(capsys)


def test_rows_without_a_text_are_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        ["text\tlabel", *(f"{review(i) if i % 15 else ''}\t{'pos' if i % 2 else 'neg'}" for i in range(60))], "log.tsv"
    )
    assert "4 rows have another value or none, and will be left out" in init(capsys, "--text", "log.tsv")
    assert data()["max_malformed"] == 0.2
    trained(capsys)


def test_line_separators_of_unicode_end_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    write(log(lambda i: f"a\u2028b\x85c{i % 3}"))
    assert "log.csv: 60 rows looked at\n  clicked" in init(capsys, "log.csv")


def test_a_folder_says_how_much_of_it_was_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    Path("days").mkdir()
    for day in (1, 2, 10):
        write(log(lambda i: f"{i % 5}.5"), f"days/day_{day}.csv")
    said = init(capsys, "days")
    assert said.startswith("day_1.csv: 60 rows looked at\n  the first of 3 files; the others were not looked at\n")
