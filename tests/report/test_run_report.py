"""`sparsedp report` on runs of every kind: finished, interrupted, damaged, old, hostile; what it shows, and what may leave."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from report.runs import CONFIG, PLAN, STATEMENT, make_run, step_row, totals
from sparsedp import concerns
from sparsedp.audit.membership import largest_tpr
from sparsedp.cli.main import main
from sparsedp.cli.runfolder import _PRIVATE, RELEASED
from sparsedp.errors import ConfigError
from sparsedp.report import who_may_read
from sparsedp.report.model_card import model_card
from sparsedp.report.page import differences, render, section
from sparsedp.report.plain_words import guesses
from sparsedp.report.run_record import read_run

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">|`\'"{{7*7}}&lt;\n---\nx: y'


class Page(HTMLParser):
    """The text of a page, and its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._hidden = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += " " + data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def evaluation(step: int, **metrics: Any) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": step,
        **(metrics or {"auc": 0.7, "log_loss": 0.5}),
        "epsilon": 1.0 + step / 200,
    }


def test_a_finished_run(tmp_path: Path) -> None:
    rows = [step_row(step) for step in range(10, 201, 10)] + [
        evaluation(100),
        evaluation(200, auc=0.7654, log_loss=0.4321),
    ]
    provenance = {
        "machine": {"system": "Linux"},
        "data": {
            "settings_sha256": "5e77",
            "files": [{"path": "/d/a.csv", "sha256": "da7a", "bytes": 12, "of": "all of it"}],
        },
        "sessions": [{"started": "2026-11-18T10:00:00+00:00", "after_step": 0}],
    }
    audits = [{"sentence": "At least 0.3 is shown.", "attack": "white box", "contradicts": False}]
    path = make_run(tmp_path / "run", rows, totals=totals(), provenance=provenance, bound=audits, code={"sha256": {"mine": "c0de"}},
                    result={"planned_steps": 200, "evaluation": "done", "planted_auc": 0.81})  # fmt: skip
    page = Page(render([read_run(path)]))
    for words in (
        "epsilon 2.5", "1e-06", "Nothing about the weights is more than 12.18 times as likely", "PRIVATE: not for release",
        "The size of the data set, 54000, is public.", "Choices made by looking at private data.", "Epsilon over steps",
        "AUC 0.7654 0.81 Higher is better.", "log loss 0.4321", "items.weight 1,000 8", "67 %", "At least 0.3 is shown.",
        "forward 1.0 s 12.5 %", "everything else 2.0 s 25.0 %", "SHA-256 da7a", "torch 2.13.0", "c0de", "5e77", "killed",
        "release/model.pt", "private/metrics.jsonl", "those with access to the data", "steps 200 200", "epsilon at most 3 2.5",
        "examples in a batch, mean 512 ± 23 510", "rows touched in a step – 90", "at its peak) – 500",
    ):  # fmt: skip
        assert words in page.words, words
    titles = {
        attributes["aria-label"].split(".")[0] for tag, attributes in page.tags if attributes.get("role") == "img"
    }  # type: ignore[union-attr]
    assert titles >= {
        "Epsilon spent", "Training loss", "AUC, held out", "log loss, held out", "Learning rate", "Rows in a step, all tables",
        "Share of units that were clipped", "Seconds of a step", "items",
    }  # fmt: skip
    assert f"In all logged steps: {concerns.mostly_noise(25, 40, 'adafest')}" in page.words
    folder = shlex.quote(str(path))
    assert f"sparsedp plan {folder}/private/config.yaml --json > {folder}/private/predictions.json" in page.words


def test_what_is_promised_in_words_follows_from_epsilon() -> None:
    for epsilon, delta in ((0.1, 1e-6), (1.0, 0.0), (8.0, 1e-5), (50.0, 1e-6)):
        # TPR and FPR of the best attack: at even odds, it is right in (TPR + 1 - FPR) / 2 of all cases.
        best = max((float(largest_tpr(f / 10_000, epsilon, delta)) + 1 - f / 10_000) / 2 for f in range(10_001))
        assert guesses(epsilon, delta) == pytest.approx(best, abs=1e-4)
    assert guesses(0.0, 0.0) == 0.5 and guesses(1e4, 1e-6) == 1.0


@pytest.mark.parametrize(
    ("statement", "plan", "words"),
    [
        ({"epsilon": "infinity"}, {}, "no guarantee"),
        (
            {"not_covered": ["Seeded, do not release: whoever knows the seed can take the noise away."]},
            {},
            "seeded: not for release",
        ),
        ({}, {"poisson_sampling": False}, "epsilon not proven"),
    ],
)
def test_a_promise_that_does_not_hold_is_not_praised(tmp_path: Path, statement: Any, plan: Any, words: str) -> None:
    path = make_run(tmp_path / "run", statement=STATEMENT | statement, plan=PLAN | plan)
    of = section(read_run(path))
    assert of.status == ("bad", words)
    assert words.split()[-1] in " ".join(of.words) or "promised" in of.words[0]
    assert words in Page(render([read_run(path)])).words
    assert words in model_card(read_run(path, public=True))


def test_an_interrupted_run_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", [step_row(10), step_row(20)], statement=None, totals=totals(25))
    page = Page(render([read_run(path)]))
    assert "not finished after step 25 of 200" in page.words and f"sparsedp train --resume {path}" in page.words
    assert "have spent an epsilon of" in page.words
    public = Page(render([read_run(path, public=True)]))
    assert "not finished" in public.words and "after step" not in public.words


@pytest.mark.parametrize("keep", ["nothing", "empty", "old"])
def test_folders_with_little_in_them(tmp_path: Path, keep: str) -> None:
    path = make_run(tmp_path / "run", [], result={}, totals={})
    for file in [*path.glob("*/*")]:
        if keep == "nothing":
            file.unlink()
        elif keep == "empty":
            file.write_bytes(b"")
    if keep == "old":  # before there were tables in a row, parts of times, environments
        (path / "private/metrics.jsonl").write_text('{"kind": "step", "step": 7, "loss": 0.5}\n')
        (path / "release/environment.json").unlink()
        (path / "release/statement.json").write_text('{"epsilon": 1.5, "delta": 1e-6}')
        (path / "release/plan.json").write_text('{"noise_multiplier": 1.0}')
    page = Page(render([read_run(path)]))
    assert ("epsilon 1.5" in page.words) == (keep == "old")
    assert ("statement.json cannot be read" in page.words) == (keep == "empty")
    assert model_card(read_run(path, public=True))


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", totals=totals())
    with (path / "private/metrics.jsonl").open("ab") as file:
        file.write(
            b'{"kind": "step", "st\n\xff\xfe\n[1]\n"text"\n{"kind": "step", "step": "x"}\n' + b"[" * 100_000 + b"\n"
        )
    (path / "private/result.json").write_text('{"auc": ')
    (path / "private/config.yaml").write_text("a: [")
    (path / "private/bound.json").write_text("[1, {}]")
    (path / "release/plan.json").write_text("[]")
    of = section(read_run(path))
    warned = "\n".join(of.warnings)
    assert "6 lines of private/metrics.jsonl cannot be read" in warned and "plan.json holds something else" in warned
    assert "private/result.json cannot be read" in warned and "private/config.yaml cannot be read" in warned
    assert "bound.json holds no audit that is known here" in warned
    assert [one.title for one in of.charts["loss"]] == ["Training loss", "Learning rate"]


def test_losses_that_are_no_numbers_and_runs_that_diverge_are_warned_of(tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2, loss=None), step_row(3, loss="infinity"), step_row(4, loss=1e26)]
    warned = "\n".join(section(read_run(make_run(tmp_path / "run", rows))).warnings)
    assert (
        "2 of 4 logged losses are not finite numbers" in warned
        and "diverged" in warned
        and "was not evaluated" in warned
    )
    nothing = [step_row(step, loss=None, clipped_share=1.0, kept_mass=0.01) for step in range(5)]
    of = section(read_run(make_run(tmp_path / "nothing", nothing)))
    assert all(one.title != "Training loss" for one in of.charts["loss"])
    assert "Nearly every unit was clipped" in "\n".join(of.warnings) and "hardly learn" in "\n".join(of.warnings)


def test_an_audit_that_speaks_against_the_claim_comes_first(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", bound=[{"sentence": "At least 9.", "attack": "white", "contradicts": True}])
    assert section(read_run(path)).warnings[0].startswith("AN AUDIT SHOWS MORE")


def test_an_audit_beside_the_run_that_it_made(tmp_path: Path) -> None:
    target = make_run(tmp_path / "membership/runs/target")
    attacked = {"sentence": "LiRA: area 0.9.", "attacks": [], "above_the_claim": True}
    (tmp_path / "membership/membership.json").write_text("{}")
    (tmp_path / "membership/result.json").write_text(json.dumps(attacked))
    assert section(read_run(target)).audits == [("membership inference", True, "LiRA: area 0.9.")]
    run = make_run(tmp_path / "audit/run")
    (tmp_path / "audit/bound.json").write_text('[{"sentence": "At least 1.", "attack": "black box"}]')
    assert [sentence for _, _, sentence in section(read_run(run)).audits] == ["At least 1."]
    assert section(read_run(run, public=True)).audits == []


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", [], statement=STATEMENT | {"steps": 60_000}, plan=PLAN | {"steps": 60_000})
    line = json.dumps(step_row(0))
    with (path / "private/metrics.jsonl").open("w") as file:
        for step in range(1, 60_001):
            file.write(line.replace('"step": 0', f'"step": {step}') + "\n")
    seen: list[int] = []
    page = render([read_run(path, progress=seen.append)])
    assert len(page) < 1_000_000 and seen == [10_000 * i for i in range(1, 7)]
    assert "Lines are means of neighbouring steps" not in page  # all are the same
    assert read_run(path).last_step == 60_000


# ------------------------------------------------------------------ what may leave


def test_a_public_report_has_nothing_of_the_private_part(tmp_path: Path) -> None:
    """Every file of the private part holds marks of its own; none is in what may leave, all the same with none at all."""
    rows = [step_row(step, loss=0.987654321, mean_norm=31.4159, units=54321) for step in range(10, 201, 10)]
    rows += [evaluation(200, auc=0.123456789), {"kind": "warning", "step": 3, "message": "MARK-warning"}]
    values = {name.partition(".")[0]: {"MARK": f"MARK-{name}"} for name in _PRIVATE if name.endswith(".json")}
    values["totals"] = totals(training_seconds=777.123)
    path = make_run(tmp_path / "run", rows, config=CONFIG | {"name": "PUBLIC"}, **values)
    (path / "private/config.yaml").write_text(yaml.safe_dump(CONFIG | {"name": "MARK-config"}))
    (path / "private/error.txt").write_text("MARK-error")
    public = {"html": render([read_run(path, public=True)]), "md": model_card(read_run(path, public=True))}
    for text in public.values():
        assert "PUBLIC" in text
        for mark in (
            "MARK",
            "0.9877",
            "0.987654321",
            "31.41",
            "0.1235",
            "0.123456789",
            "777.1",
            "54,3",
            "54321",
            "items.weight</th>",
            "private/",
        ):
            assert mark not in text.replace("release, and <code>private", "").replace("<code>private</code>", ""), mark
    private = render([read_run(path)])
    assert "MARK-warning" in private and "0.1235" in private and "MARK-config" in private
    for file in (path / "private").iterdir():
        file.unlink()
    assert (
        render([read_run(path, public=True)]) == public["html"]
        and model_card(read_run(path, public=True)) == public["md"]
    )


def test_where_a_report_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")

    def written(*arguments: str) -> str:
        assert main(["report", str(path), *arguments]) == 0
        return str(Path(capsys.readouterr().out.strip()).relative_to(tmp_path))

    assert written() == "run/private/report.html"
    assert written("--public") == "run/release/report.html"
    assert written("--markdown") == "run/release/README.md"
    assert written("--markdown", "--private") == "run/private/model_card.md"
    assert written(str(other)) == "run/private/comparison.html"
    assert written("--out", str(tmp_path / "new/mine.html")) == "new/mine.html"
    assert (
        "PRIVATE" in (path / "private/report.html").read_text()
        and "PRIVATE" in (path / "private/model_card.md").read_text()
    )
    assert "PRIVATE:" not in (path / "release/report.html").read_text() + (path / "release/README.md").read_text()
    for arguments, words in (
        (["--out", str(path / "release/x.html")], "lies in a folder for release"),
        ([str(other), "--public"], "name the file with --out"),
        ([str(other), "--markdown"], "--markdown is about one run; got 2"),
        (["--public", "--plan", "plan.json"], "leave out --public"),
        ([str(other), "--plan", str(path / "release/plan.json")], "--plan is about one run"),
        (["--plan", str(path / "release/environment.json")], "expected what `sparsedp plan CONFIG --json` prints"),
        (["--plan", str(path / "release/config.yaml")], "is no JSON"),
    ):
        assert main(["report", str(path), *arguments]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent")]) == 2 and "is not the folder of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2 and f"name those, as in {tmp_path}/*" in capsys.readouterr().err


def test_an_export_takes_the_public_report_along_and_can_be_reported_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run")
    (path / "private/config.yaml").write_text(
        (Path(__file__).parents[2] / "src/sparsedp/cli/configs/demo.yaml").read_text()
    )
    (path / "release/statement.txt").write_text("Privacy statement: epsilon = 2.5\n")
    assert main(["report", str(path), "--public"]) == main(["report", str(path), "--markdown"]) == 0
    assert main(["export", str(path), "--to", str(tmp_path / "out")]) == 0
    assert {"report.html", "README.md", "environment.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    (tmp_path / "out/report.html").unlink()
    assert main(["report", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out/report.html")
    assert "epsilon 2.5" in Page((tmp_path / "out/report.html").read_text()).words
    assert main(["report", str(tmp_path / "out"), "--private"]) == 2 and "no private part" in capsys.readouterr().err


def test_every_file_of_a_run_has_its_reason() -> None:
    files = {f"release/{name}" for name in RELEASED} | {f"private/{name}" for name in _PRIVATE}
    assert files <= who_may_read.FILES.keys()
    page = (Path(__file__).parents[2] / "docs/command-line.md").read_text()
    for file in files:
        assert f"`{file.partition('/')[2]}`" in page, file


# ------------------------------------------------------------------ hostile names


def hostile_run(path: Path) -> Path:
    tables = {f"{HOSTILE}.weight": {"touched": 3, "selected": 2, "false": 1}}
    rows = [step_row(step, tables=tables) for step in range(1, 30)]
    rows += [evaluation(step, **{HOSTILE: 0.5, "auc": 0.5}, periods={HOSTILE: {"auc": 0.5}}) for step in (10, 20)]
    rows.append({"kind": "warning", "step": 1, "message": HOSTILE})
    rows.append({"kind": "failed_evaluation", "step": 1, "error": HOSTILE})
    statement = (
        STATEMENT | dict.fromkeys(("unit", "mechanism", "sampling", "guarantee"), HOSTILE) | {"assumptions": [HOSTILE]}
    )
    plan = PLAN | {"parameters": [[f"{HOSTILE}.weight", [10, 2]]], "accountant": HOSTILE}
    audits = [{"sentence": HOSTILE, "attack": HOSTILE}]
    parts = {HOSTILE: 1.0}
    return make_run(path, rows, statement=statement, plan=plan, config=CONFIG | {HOSTILE: HOSTILE}, bound=audits,
                    totals=totals(parts=parts), code={"sha256": {HOSTILE: HOSTILE}}, provenance={"machine": {"system": HOSTILE}})  # fmt: skip


def test_nothing_that_a_name_holds_becomes_part_of_the_page(tmp_path: Path) -> None:
    path = hostile_run(tmp_path / "a<b>&'\"")
    page = Page(render([read_run(path), read_run(make_run(tmp_path / "run"))]))
    kinds = [tag for tag, _ in page.tags]
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert "img" not in kinds and [one for one in scripts if one.get("type") != "application/json"] == [{}]
    assert not any(
        name.startswith("on") or name in ("src", "href") for _, attributes in page.tags for name in attributes
    )
    assert "window.hacked=1" in page.text and "{{7*7}}" in page.text and "49" not in page.words.split()
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_a_model_card_stays_a_model_card(tmp_path: Path) -> None:
    card = model_card(read_run(hostile_run(tmp_path / "a|b`c")))
    _, header, body = card.split("---\n", 2)
    assert set(yaml.safe_load(header)) == {"library_name", "tags", "metrics", "model-index"}
    outside = re.sub(r"(`{3,})yaml\n.*?\n\1\n", "", body, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)<(script|img)", outside) and "\n---\n" not in outside.replace("| --- |", "")
    lines = outside.splitlines()
    tables = [i for i, line in enumerate(lines) if re.fullmatch(r"\|( --- \|)+ ?", line)]
    assert len(tables) >= 4
    for i in tables:  # each row has as many cells as the table has columns
        columns = len(re.findall(r"(?<!\\)\|", lines[i]))
        for row in lines[i + 1 :]:
            if not row.startswith("|"):
                break
            assert len(re.findall(r"(?<!\\)\|", row)) == columns, row


RESULTS = [step_row(10), evaluation(10, auc=0.75, log_loss=0.5, planted_auc=0.8, **{"ndcg@10": 0.25})]


BUNDLED_CONFIGS = sorted((Path(__file__).parents[2] / "src/sparsedp/cli/configs").glob("*.yaml"))


@pytest.mark.parametrize("config", BUNDLED_CONFIGS, ids=lambda path: path.stem)
def test_the_header_of_a_model_card_has_the_fields_of_the_hub(tmp_path: Path, config: Path) -> None:
    path = make_run(tmp_path / "run", config=yaml.safe_load(config.read_text()))
    (path / "release/config.yaml").write_text(config.read_text())
    header = model_card(read_run(path, public=True)).split("---\n")[1]
    known = yaml.safe_load(header)
    filled_in = yaml.safe_load(re.sub(r"^# ", "", header, flags=re.MULTILINE))  # each placeholder is a field of YAML
    assert {"license", "pipeline_tag", "datasets", "language", "tags", "metrics"} <= set(filled_in)
    assert {"license", "datasets", "language"} & set(known) == set()  # no configuration tells
    assert {key: filled_in[key] for key in known} == known and "model-index" not in known
    expected = {
        "demo": ("tabular-classification", ["auc", "log_loss"], "pctr"),
        "sst2": ("text-classification", ["accuracy"], "text_bag"),
        "movielens": (None, ["ndcg@10", "hit@10", "mrr"], "transformer"),
        "own_model": (None, None, "dp-sgd"),
    }
    if config.stem in expected:
        task, metrics, tag = expected[config.stem]
        assert (known.get("pipeline_tag"), known.get("metrics")) == (task, metrics) and known["tags"][-1] != "own_model"
        assert tag in known["tags"]


def test_a_model_card_is_what_the_hub_reads(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", RESULTS)
    private = yaml.safe_load(model_card(read_run(path)).split("---\n")[1])
    results = private["model-index"][0]["results"][0]["metrics"]
    assert {one["type"]: one["value"] for one in results} == {"auc": 0.75, "log_loss": 0.5, "ndcg@10": 0.25}
    public = yaml.safe_load(model_card(read_run(path, public=True)).split("---\n")[1])
    assert public == {"library_name": "pytorch", "tags": ["differential-privacy", "sparsedp", "dp-sgd"]}


@pytest.mark.models
def test_the_hub_reads_the_results_of_a_model_card(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    path = make_run(tmp_path / "run", RESULTS)
    data = hub.ModelCard(model_card(read_run(path))).data
    assert [(r.metric_type, r.metric_value) for r in data.eval_results] == [
        ("auc", 0.75),
        ("log_loss", 0.5),
        ("ndcg@10", 0.25),
    ]


# ------------------------------------------------------------------ several runs, predictions


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    other = CONFIG | {"training": {"epochs": 2, "batch_size": 1024}, "extra": None}
    mechanism = PLAN | {"mechanism": PLAN["mechanism"] | {"threshold": 40.0}}
    a, b = make_run(tmp_path / "x/run"), make_run(tmp_path / "y/run", config=other, plan=mechanism, statement=None)
    records = [read_run(a), read_run(b)]
    assert differences(records) == [  # in the order of the files
        ["privacy.mechanism.threshold", "10", "40"], ["training.batch_size", "512", "1,024"], ["extra", "–", "null"],
    ]  # fmt: skip
    page = Page(render(records))
    assert (
        "status finished not finished after step 200 of 200" in page.words
        and str(a) in page.words
        and str(b) in page.words
    )
    labels = [attributes["aria-label"] for _, attributes in page.tags if attributes.get("role") == "img"]
    assert (
        sum(label.startswith("Training loss.") and str(a) in label and str(b) in label for label in labels if label)
        == 1
    )
    assert differences([records[0], records[0]]) == []


def test_of_several_folders_those_that_are_no_runs_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, cache = make_run(tmp_path / "a"), make_run(tmp_path / "b"), tmp_path / "cache"
    cache.mkdir()
    assert main(["report", str(a), str(b), str(cache), "--quiet"]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(a / "private/comparison.html") and f"no folder of a run: {cache}" in told.err
    assert main(["report", str(a), str(tmp_path / "c")]) == 2 and f"{tmp_path / 'c'} is not" in capsys.readouterr().err
    assert main(["report", str(cache)]) == 2 and "neither release/ nor private/" in capsys.readouterr().err


def test_what_the_plan_predicted_stands_beside_what_happened(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", totals=totals())
    predicted = {
        "noise_multiplier": 0.9, "steps": 200, "predicted": {"gradient_size": 333.0, "rows_touched": 88.0},
        "measured": {"seconds_per_step": 0.0215}, "memory_bytes": {"total": 4e8},
    }  # fmt: skip
    words = Page(render([read_run(path)], predicted)).words
    assert "rows touched in a step 88 90" in words and "gradient size (coordinates a step) 333 320" in words
    assert "milliseconds of a step 21.5 20" in words and "at its peak) 400 500" in words
    assert "sparsedp plan " not in words
    (path / "private/predictions.json").write_text(json.dumps(predicted))  # where the report says to write it
    assert "rows touched in a step 88 90" in Page(render([read_run(path)])).words
    public = Page(render([read_run(path, public=True)])).words
    assert "rows touched" not in public and "sparsedp plan" not in public


def test_the_command_for_predictions_names_the_configuration_beside_which_the_users_code_lies(tmp_path: Path) -> None:
    code = {"configuration": "/home/me/my run.yaml", "trusted": ["mine"], "files": {"model.py": "/home/me/model.py"}}
    command = section(read_run(make_run(tmp_path / "run", code=code))).command_for_predictions
    assert command is not None and command.startswith("sparsedp plan '/home/me/my run.yaml' --trust mine --json > ")


def test_what_the_run_said_about_noise_is_not_said_twice(tmp_path: Path) -> None:
    said = {
        "kind": "warning",
        "step": 20,
        "message": f"In the first 20 steps: {concerns.mostly_noise(9, 10, 'adafest')}",
    }
    of = section(read_run(make_run(tmp_path / "run", [step_row(10), said])))
    assert [warning for warning in of.warnings if "touched by no unit" in warning] == [said["message"]]


@pytest.mark.parametrize(
    "losses, diverged",
    [
        ([0.5] * 9 + [6.0], False),  # one noisy batch at the end
        ([0.01] + [0.5] * 9, False),  # and at the beginning
        ([0.5] * 8 + [5.5, 6.0], True),
        ([-0.5] * 8 + [-5.5, -6.0], False),
    ],
)
def test_a_loss_has_diverged_by_the_means_of_both_ends_of_the_log(
    tmp_path: Path, losses: list[float], diverged: bool
) -> None:
    rows = [step_row(10 * (at + 1), loss=loss) for at, loss in enumerate(losses)]
    warned = section(read_run(make_run(tmp_path / "run", rows))).warnings
    assert any("has diverged" in warning for warning in warned) == diverged


def test_curves_of_tables_have_the_order_of_the_model(tmp_path: Path) -> None:
    names = [f"tables.{i}.weight" for i in range(12)]
    counts = {"touched": 4, "selected": 3, "false": 1}
    rows = [step_row(step, tables=dict.fromkeys(sorted(names), counts)) for step in (10, 20)]
    plan = PLAN | {"parameters": [[name, [100, 8]] for name in names]}
    of = section(read_run(make_run(tmp_path / "run", rows, plan=plan)))
    assert [one.title for one in of.table_charts] == names == [row[0] for row in of.tables]


def test_evaluations_on_other_data_are_not_the_runs_own(tmp_path: Path) -> None:
    rows = [evaluation(200, auc=0.7), {"kind": "evaluate", "step": 200, "auc": 0.1, "data": {"kind": "other"}}]
    of = section(read_run(make_run(tmp_path / "run", rows)))
    assert [row[:2] for row in of.metrics] == [("AUC", "0.7")]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither release/ nor private/"):
        read_run(tmp_path)
