"""The code of docs/extending.md: an operation, a mechanism and an accountant from outside of the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsedp
from documentation import DOCS, code_of
from neighbours import CLIP, largest_influence
from sparsedp.accounting import accountant_names, epsilon_of, get_epsilon
from sparsedp.cli.config.load import load_config
from sparsedp.cli.config.schema import SchemaError, build
from sparsedp.cli.config.sections import PrivacyConfig
from sparsedp.cli.main import main
from sparsedp.clipping import Clipping
from sparsedp.errors import UnsupportedError
from support import Apply, assert_exact, capture_uses, clicks, dense, loader_of, train
from support import Clicks as ClickModel

PAGE = code_of("extending.md")
ACCOUNTANT = PAGE["PlainRdp"].name


# ---------------------------------------------------------------------- the operation


def scaled(shape: tuple[int, ...], scale: float = -1.7) -> tuple[nn.Module, torch.Tensor]:
    operation = PAGE["scaled_linear"]
    weight = nn.Parameter(torch.randn(3, shape[-1]))
    return Apply(lambda m, x: operation(x.sin(), m.w, scale), w=weight), torch.randn(*shape)


@pytest.mark.parametrize("shape", [(6, 8), (6, 5, 8), (6, 2, 5, 8), (1, 5, 8)])
def test_the_operation_is_exact(shape: tuple[int, ...]) -> None:
    module, x = scaled(shape)
    torch.testing.assert_close(module(x), -1.7 * (x.sin() @ module.w.T))
    assert_exact(module, x)


def test_nothing_from_an_empty_batch() -> None:
    module, x = scaled((0, 5, 8))
    uses = capture_uses(module, [x]).uses["w"]
    assert float(dense(uses.weighted_sum(torch.zeros(0), module.w.shape), module.w.shape).abs().sum()) == 0


def test_the_operation_is_exact_beside_other_uses_of_the_parameter() -> None:
    operation = PAGE["scaled_linear"]
    module = Apply(lambda m, i: operation(m.e(i), m.e.weight, 0.3), e=nn.Embedding(10, 8))
    assert_exact(module, torch.randint(10, (6, 5)))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_neighbours_of_the_operation(size: float) -> None:
    module, x = scaled((6, 5, 8))
    worst = largest_influence(module, [x], Clipping(CLIP), lambda out: size * out.sin().sum())
    assert worst <= CLIP * (1 + 1e-4)


def test_the_operation_in_a_form_without_a_rule_is_refused() -> None:
    """Where the parameter is the input, and the batch the matrix."""
    operation = PAGE["scaled_linear"]
    module = Apply(lambda m, x: operation(m.w, x, 2.0).T, w=nn.Parameter(torch.randn(70_000, 2)))
    with pytest.raises(UnsupportedError, match="scaled_linear"):
        assert_exact(module, torch.randn(4, 2))


# ---------------------------------------------------------------------- the mechanism


def test_the_mechanism_trains_its_rows() -> None:
    """`test_mechanisms.py` has the rest."""
    mechanism = PAGE["PublicRows"](rows=(3, 1))
    engine = sparsedp.PrivacyEngine()
    model = ClickModel()
    before = model.table.weight.detach().clone()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader_of(*clicks(64), batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0, mechanism=mechanism,
    )  # fmt: skip
    train(model, optimizer, loader)
    assert (model.table.weight != before).any(1).nonzero().flatten().tolist() == [1, 3]
    assert engine.statement(1e-5).mechanism == "public_rows"


# ---------------------------------------------------------------------- the accountant


def test_the_accountant_in_an_engine_and_its_statement(tmp_path: Path) -> None:
    engines = {}
    for name in (ACCOUNTANT, "rdp", "pld"):
        engine = engines[name] = sparsedp.PrivacyEngine(accountant=name, seed=0)
        model = ClickModel()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader_of(*clicks(64), batch_size=8), max_grad_norm=1.0,
            target_epsilon=2.0, target_delta=1e-5, epochs=1,
        )  # fmt: skip
        train(model, optimizer, loader)
    engine = engines[ACCOUNTANT]
    spent = engine.get_epsilon(1e-5)
    assert 1.94 <= spent <= 2.0 and spent == epsilon_of(engine.ledger, 1e-5, ACCOUNTANT)
    assert engine.plan.noise_multiplier == pytest.approx(engines["rdp"].plan.noise_multiplier, rel=0.01)
    assert engine.plan.noise_multiplier > 1.01 * engines["pld"].plan.noise_multiplier
    statement = engine.statement(1e-5)
    assert statement.epsilon == spent and statement.accountant == "PLAIN_RDP"
    assert "by the PLAIN_RDP accountant" in str(statement)
    assert json.loads(statement.to_json())["accountant"] == "PLAIN_RDP"
    assert sparsedp.PrivacyPlan.from_dict(engine.plan.to_dict()) == engine.plan
    engine.save_checkpoint(tmp_path / "run.pt")
    engine.load_checkpoint(tmp_path / "run.pt")
    assert engine.get_epsilon(1e-5) == spent


def test_the_accountant_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--noise-multiplier=0.8", "--delta=1e-5", "--sample-rate=0.01", "--steps=200", "--json"]
    assert main(["account", "epsilon", *run, f"--accountant={ACCOUNTANT}"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["accountant"] == ACCOUNTANT
    assert answer["epsilon"] == get_epsilon(
        noise_multiplier=0.8, sample_rate=0.01, steps=200, delta=1e-5, accountant=ACCOUNTANT
    )
    noise = ["--target-epsilon=2", "--target-delta=1e-5", "--sample-rate=0.01", "--steps=200", "--json"]
    assert main(["account", "noise", *noise, f"--accountant={ACCOUNTANT}"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] <= 2.0


def test_the_lists_of_the_command_line_come_from_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    for question in ("epsilon", "noise"):
        with pytest.raises(SystemExit):
            main(["account", question, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "--accountant {" + ",".join(accountant_names()) + "}" in shown
        assert "plain_rdp: dp_accounting's RDP as it is" in shown and "pld: tight, the default" in shown
    with pytest.raises(SystemExit):
        main(["account", "epsilon", "--accountant=gdp"])
    refused = capsys.readouterr().err
    assert all(name in refused for name in accountant_names())


def test_the_accountant_in_a_configuration() -> None:
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    assert build(PrivacyConfig, {**given, "accountant": ACCOUNTANT}, "privacy").accountant == ACCOUNTANT
    assert load_config("demo", [f"privacy.accountant={ACCOUNTANT}"]).privacy.accountant == ACCOUNTANT
    there_are = " or ".join(accountant_names())
    with pytest.raises(SchemaError, match=rf"privacy.accountant: expected {there_are}; got 'rpd'\. Did you mean 'rdp'"):
        build(PrivacyConfig, {**given, "accountant": "rpd"}, "privacy")
    with pytest.raises(SchemaError, match=f"privacy.accountant: expected {there_are}; got 7"):
        build(PrivacyConfig, {**given, "accountant": 7}, "privacy")


def test_the_bundled_configuration_names_the_accountants_of_the_package() -> None:
    text = (Path(sparsedp.__file__).parent / "cli" / "configs" / "demo.yaml").read_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("accountant:")]
    assert all(name in line.partition("#")[2] for name in accountant_names() if name != ACCOUNTANT)


def test_the_pages_command(tmp_path: Path) -> None:
    """As it stands on the page, with the page's accountant in `my_accountants.py` of the current directory."""
    text = (DOCS / "extending.md").read_text()
    section = text[text.index("## A new accountant") :]
    code, command = (section.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "bash"))
    (tmp_path / "my_accountants.py").write_text(code)
    shell = command.replace("python ", f"{sys.executable} ", 1)
    done = subprocess.run(shell, shell=True, cwd=tmp_path, check=True, capture_output=True, text=True)
    expected = get_epsilon(noise_multiplier=0.6, sample_rate=0.002, steps=500, delta=1e-6, accountant=ACCOUNTANT)
    assert f"epsilon           {expected:.6g}" in done.stdout and "plain_rdp" in done.stdout
