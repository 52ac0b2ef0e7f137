"""What others install: the wheel away from the checkout, and a package of a third party that adds a learner."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "third_party_learner"
KINDS = (".py", ".yaml", ".cpp", ".h", ".typed")  # of files that the wheel needs


def run(code: str, *paths: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process that sees only `paths` besides the environment's own packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def pip_install(source: Path, scratch: Path) -> Path:
    """Really install a project in a folder, built from a copy so that no build folder is left in the checkout."""
    skip = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", "*.egg-info", "build", "runs", ".venv", "venv")
    copy, target = scratch / "source", scratch / "installed"
    shutil.copytree(source, copy, symlinks=True, ignore=skip)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-compile", "--target", str(target)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


USE_FOURIER = """
import torch, metattt
from metattt.errors import MetaTTTError
x = torch.randn(2, 19, 32)
size = ("dim=32", "num_heads=2", "learner.frequencies=8", "seed=0")
by_name = metattt.build("learner=fourier", *size)
by_target = metattt.build("learner=custom", "learner._target_=fourier_learner.Fourier", *size)
y, state = by_name(x)
assert y.shape == x.shape and y.isfinite().all()
assert torch.equal(y, by_target(x)[0])
mistakes = {"learner.frequencys=8": "`learner.frequencies`", "learner.frequencies=few": "expected an integer"}
for override, expected in mistakes.items():
    try:
        metattt.build("learner=fourier", override)
    except MetaTTTError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(override)
from metattt.cli import main
main(["check", "--help"])
main(["train", "learner=fourier", "--help"])
"""


def test_learner_of_another_package(tmp_path: Path) -> None:
    out = run(USE_FOURIER, pip_install(EXAMPLE, tmp_path), ROOT, cwd=tmp_path).stdout
    assert "fourier " in out and "learned Fourier features" in out and "learner.frequencies=" in out


def test_broken_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    info = tmp_path / "broken_learner-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-learner\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[metattt.components]\nbroken = broken\n")
    code = "from metattt.cli import main; import sys; sys.exit(0 if main(['check', 'dim=8']) == 2 else 1)"
    done = run(code, tmp_path, ROOT, cwd=tmp_path)
    assert "broken-learner" in done.stderr and "nothing_of_this_name" in done.stderr and done.stderr.count("\n") == 2


IMPORT_AND_COMPOSE = """
import importlib, os, pathlib, pkgutil
import metattt
package = pathlib.Path(metattt.__file__).parent
assert str(package).startswith(os.environ["WHEEL"]), package
optional = {"triton", "datasets", "tokenizers"}
modules = ["metattt." + ".".join(f.relative_to(package).with_suffix("").parts) for f in package.rglob("*.py")]
for name in sorted(name.removesuffix(".__init__") for name in modules):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name in optional, (name, error)
walked = {m.name for m in pkgutil.walk_packages(metattt.__path__, "metattt.")}
assert {"metattt.layer", "metattt.learners.linear", "metattt.configs"} <= walked, walked
from metattt.composition.compose import compose
for file in sorted((package / "configs").glob("*.yaml")):  # the other files are compared with the sources'
    compose(job=file.stem)
"""


@pytest.mark.slow
def test_wheel_away_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = pip_install(ROOT, tmp_path)
    monkeypatch.setenv("WHEEL", str(wheel))
    run(IMPORT_AND_COMPOSE, wheel, cwd=tmp_path)
    sources = {str(f.relative_to(ROOT)) for f in (ROOT / "metattt").rglob("*") if f.suffix in KINDS}
    installed = {str(f.relative_to(wheel)) for f in (wheel / "metattt").rglob("*")}
    assert not sources - installed
    assert {Path(name).suffix for name in sources} == set(KINDS)
