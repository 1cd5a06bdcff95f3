"""rl-zoo3 with the algorithms, environments and hyperparameters of this package: registration, every command, installation."""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import optuna
import pytest
import rl_zoo3
import yaml
from rl_zoo3 import exp_manager, utils
from stable_baselines3.common.vec_env import VecNormalize

import sb3_ben
from benchmarks.common import tuned
from benchmarks.startup import OFFLINE, ROOT, build_wheel, copy_sources, install, make_venv
from sb3_ben.oracles import rescue_learned
from sb3_ben.zoo import config_file, register, registration, search
from sb3_ben.zoo.registration import ALGORITHMS, PREVIOUS_REWARD, hyperparams_folder

YML_FILES = sorted((ROOT / "hyperparams").glob("*.yml"))
ENTRIES = [(file.stem, name) for file in YML_FILES for name in yaml.safe_load(file.read_text())]
HOOK = ROOT / "sb3_ben" / "zoo" / "_hook.py"
#: little enough of everything for a run of a second
SMALL = ("-n", "64", "-params", "n_envs:2", "learning_starts:8", "batch_size:4")
Run = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


def run_script(script: str, folder: Path, *args: str) -> None:
    """``python -m rl_zoo3.SCRIPT ARGS`` in this process, in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *args])
        sys.modules.pop(f"rl_zoo3.{script}", None)  # else runpy warns that it is loaded already
        runpy.run_module(f"rl_zoo3.{script}", run_name="__main__")


@pytest.fixture
def zoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script of the zoo in an empty folder; return what it printed."""

    def run(script: str, *args: str) -> str:
        run_script(script, tmp_path, *args)
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run of BEN on the tiger problem."""
    folder = tmp_path_factory.mktemp("zoo")
    evaluation = ("--eval-freq", "32", "--n-eval-envs", "2", "--eval-episodes", "2")
    saving = ("--save-replay-buffer", "--save-freq", "32", "-tb", "tb", "-P")
    run_script("train", folder, "--algo", "ben", "--env", "Tiger-v0", *evaluation, *saving, *SMALL)
    return folder / "logs"


# ---------------------------------------------------------------------- registration


def test_register_adds_and_changes_nothing_else() -> None:
    assert utils.ALGOS["ben"] is sb3_ben.BEN
    assert utils.ALGOS["bootdqn"] is sb3_ben.BootDQN
    assert {"ppo", "dqn", "ppo_lstm"} <= utils.ALGOS.keys()
    for algo in ALGORITHMS:
        assert algo in exp_manager.HYPERPARAMS_SAMPLER
        assert algo in exp_manager.HYPERPARAMS_CONVERTER
    assert exp_manager.HYPERPARAMS_SAMPLER["ppo"].__module__ == "rl_zoo3.hyperparams_opt"


def test_register_again_is_harmless() -> None:
    before = utils.create_test_env, exp_manager.ExperimentManager.__init__, dict(utils.ALGOS)
    register()
    assert before == (utils.create_test_env, exp_manager.ExperimentManager.__init__, utils.ALGOS)


def test_late_registration_reaches_those_who_took_the_name() -> None:
    """``enjoy`` takes ``create_test_env`` from the package, which takes it from ``utils``."""
    assert rl_zoo3.create_test_env is utils.create_test_env
    assert hasattr(rl_zoo3.create_test_env, "is_from_sb3_ben")


def test_which_hyperparameters_serve() -> None:
    zoo_folder = Path(rl_zoo3.__file__).parent / "hyperparams"
    ours = hyperparams_folder()

    def chosen(algo: str, env_id: str) -> Path:
        return Path(config_file(algo, env_id, str(zoo_folder / f"{algo}.yml"))).parent

    assert ours == ROOT / "hyperparams"
    assert chosen("ben", "Acrobot-v1") == ours, "the zoo has no file"
    assert chosen("ppo_lstm", "Tiger-v0") == ours
    assert chosen("ppo_lstm", "CartPoleNoVel-v1") == ours, "both have an entry"
    assert chosen("ppo_lstm", "MountainCarNoVel-v0") == zoo_folder, "only the zoo has an entry"
    assert chosen("ppo_lstm", "FrozenLake-v1") == ours, "nobody has an entry, and the zoo's default is none for this algorithm"
    assert chosen("ppo", "CartPole-v1") == zoo_folder
    assert chosen("ppo", "Tiger-v0") == zoo_folder, "we have no file for PPO"


def test_our_default_serves_our_environments_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gym.registry, "Another-v0", gym.spec("Tiger-v0"))
    zoo_file = str(Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo_lstm.yml")
    assert config_file("ppo_lstm", "Another-v0", zoo_file) == str(ROOT / "hyperparams" / "ppo_lstm.yml")


def make_manager(algo: str, env_id: str, folder: Path, **kwargs: Any) -> exp_manager.ExperimentManager:
    args = argparse.Namespace()
    return exp_manager.ExperimentManager(args, algo, env_id, str(folder), eval_freq=-1, verbose=0, **kwargs)


def test_conf_is_respected(tmp_path: Path) -> None:
    zoo_file = str(Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo_lstm.yml")
    assert make_manager("ppo_lstm", "CartPoleNoVel-v1", tmp_path, config=zoo_file).config == zoo_file
    assert make_manager("ppo_lstm", "CartPoleNoVel-v1", tmp_path).config != zoo_file


@pytest.mark.parametrize(("algo", "env_id"), ENTRIES)
def test_every_entry_makes_a_model(algo: str, env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(rescue_learned.learned_filter, n_episodes=20, n_steps=2)
    monkeypatch.setattr(rescue_learned, "learned_filter", quick)  # in place of minutes of learning
    env_id = "Acrobot-v1" if env_id == "default" else env_id
    config = str(ROOT / "hyperparams" / f"{algo}.yml")
    result = make_manager(algo, env_id, tmp_path, config=config, device="cpu").setup_experiment()
    assert result is not None
    model, saved = result
    assert type(model) is utils.ALGOS[algo]
    assert model.get_env() is not None
    assert model.n_envs == saved.get("n_envs", 1)


def test_baselines_see_what_ben_sees() -> None:
    for algo in ("ppo_lstm", "bootdqn"):
        entries = yaml.safe_load((ROOT / "hyperparams" / f"{algo}.yml").read_text())
        remember = (
            "Tiger-v0",
            "SearchAndRescue-v0",
            "SearchAndRescue5x5-v0",
            "BernoulliBandit-v0",
            "CartPoleNoVel-v1",
            "default",
        )
        for name in remember:
            assert "PreviousActionReward" in str(entries[name].get("env_wrapper")), f"{algo}.yml: {name}"


# ---------------------------------------------------------------------- the commands


def test_train_leaves_a_complete_run(logs: Path) -> None:
    folder = logs / "ben" / "Tiger-v0_1"
    for name in (
        "Tiger-v0.zip",
        "best_model.zip",
        "rl_model_32_steps.zip",
        "evaluations.npz",
        "replay_buffer.pkl",
        "0.monitor.csv",
    ):
        assert (folder / name).is_file(), name
    saved = yaml.load((folder / "Tiger-v0" / "config.yml").read_text(), Loader=yaml.UnsafeLoader)
    assert saved["vec_env_wrapper"] == [PREVIOUS_REWARD]
    assert saved["n_envs"] == 2
    assert list((logs.parent / "tb").rglob("events.out.tfevents.*"))


@pytest.mark.parametrize("args", [(), ("--load-best",), ("--load-last-checkpoint", "--stochastic")])
def test_enjoy_gives_the_agent_its_rewards(logs: Path, zoo: Run, args: tuple[str, ...]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*reward.*")  # what BEN says when it has to guess them
        out = zoo("enjoy", "--algo", "ben", "--env", "Tiger-v0", "-f", str(logs), "--no-render", "-n", "23", *args)
    assert "2 Episodes" in out


def test_enjoy_draws(logs: Path, zoo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown: list[None] = []
    monkeypatch.setattr(pygame.display, "flip", lambda: shown.append(None))
    zoo("enjoy", "--algo", "ben", "--env", "Tiger-v0", "-f", str(logs), "-n", "3")
    assert len(shown) >= 3


def test_enjoy_without_the_wrapper_would_warn(logs: Path, zoo: Run, tmp_path: Path) -> None:
    """The control of the test above: the warning it looks for exists."""
    copy = shutil.copytree(logs, tmp_path / "copy")
    config = copy / "ben" / "Tiger-v0_1" / "Tiger-v0" / "config.yml"
    saved = yaml.load(config.read_text(), Loader=yaml.UnsafeLoader)
    del saved["vec_env_wrapper"]
    config.write_text(yaml.dump(saved))
    with pytest.warns(UserWarning, match="reward"):
        zoo("enjoy", "--algo", "ben", "--env", "Tiger-v0", "-f", str(copy), "--no-render", "-n", "12")


def test_the_wrapper_goes_outside_normalisation(zoo: Run, tmp_path: Path) -> None:
    zoo("train", "--algo", "ben", "--eval-freq", "32", "--eval-episodes", "1", *SMALL, "normalize:True")
    stats_path = tmp_path / "logs" / "ben" / "CartPole-v1_1" / "CartPole-v1"
    hyperparams, _ = utils.get_saved_hyperparams(str(stats_path))
    env = utils.create_test_env("CartPole-v1", stats_path=str(stats_path), should_render=False, hyperparams=hyperparams)
    assert isinstance(env, sb3_ben.VecPreviousReward)
    assert isinstance(env.venv, VecNormalize)


def test_the_wrapper_keeps_others() -> None:
    hyperparams = {"vec_env_wrapper": [{"stable_baselines3.common.vec_env.VecFrameStack": {"n_stack": 2}}, PREVIOUS_REWARD]}
    env = utils.create_test_env("CartPole-v1", should_render=False, hyperparams=hyperparams)
    assert isinstance(env, sb3_ben.VecPreviousReward)
    assert env.observation_space.shape == (8,)
    assert not hyperparams


def test_record_video(logs: Path, zoo: Run, tmp_path: Path) -> None:
    zoo("record_video", "--algo", "ben", "--env", "Tiger-v0", "-f", str(logs), "-n", "12", "-o", str(tmp_path), "--no-render")
    assert list(tmp_path.glob("*.mp4"))


def test_continue_with_the_replay_buffer(logs: Path, zoo: Run) -> None:
    agent = str(logs / "ben" / "Tiger-v0_1" / "Tiger-v0.zip")
    out = zoo("train", "--algo", "ben", "--env", "Tiger-v0", "-i", agent, "--eval-freq", "-1", *SMALL)
    assert "Loading pretrained agent" in out
    assert "Loading replay buffer" in out


@pytest.mark.parametrize(("algo", "vec_env"), [("ben", "subproc"), ("bootdqn", "dummy")])
def test_no_env_trains_cart_pole(algo: str, vec_env: str, zoo: Run, tmp_path: Path) -> None:
    out = zoo("train", "--algo", algo, "--vec-env", vec_env, "--eval-freq", "-1", *SMALL)
    assert f"hyperparams/{algo}.yml" in out
    assert (tmp_path / "logs" / algo / "CartPole-v1_1" / "CartPole-v1.zip").is_file()


def test_bootdqn_enjoys(zoo: Run) -> None:
    zoo("train", "--algo", "bootdqn", "--env", "Tiger-v0", "--eval-freq", "32", *SMALL)
    assert "2 Episodes" in zoo("enjoy", "--algo", "bootdqn", "--env", "Tiger-v0", "-f", "logs", "--no-render", "-n", "23")


def test_recurrent_ppo_sees_the_previous_reward(zoo: Run, tmp_path: Path) -> None:
    small = ("-n", "32", "-params", "n_envs:2", "n_steps:8", "batch_size:8", "n_epochs:1")
    out = zoo("train", "--algo", "ppo_lstm", "--env", "Tiger-v0", "--eval-freq", "-1", *small)
    assert str(ROOT / "hyperparams" / "ppo_lstm.yml") in out
    model = utils.ALGOS["ppo_lstm"].load(tmp_path / "logs" / "ppo_lstm" / "Tiger-v0_1" / "Tiger-v0.zip")
    assert model.observation_space.shape == (3 + 3 + 1,)
    assert "2 Episodes" in zoo("enjoy", "--algo", "ppo_lstm", "--env", "Tiger-v0", "-f", "logs", "--no-render", "-n", "23")


def test_other_algorithms_of_the_zoo_are_as_before(zoo: Run, tmp_path: Path) -> None:
    out = zoo("train", "--algo", "ppo", "-n", "32", "--eval-freq", "-1", "-params", "n_envs:1", "batch_size:16", "n_epochs:1")
    assert str(Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo.yml") in out
    saved = (tmp_path / "logs" / "ppo" / "CartPole-v1_1" / "CartPole-v1" / "config.yml").read_text()
    assert "sb3_ben" not in saved


# ---------------------------------------------------------------------- search


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_sampled_hyperparameters_are_arguments_and_convert_back(algo: str) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(5):
        trial = study.ask()
        sampled = search.SAMPLERS[algo](trial, 0, 1, {})
        assert search.CONVERTERS[algo](trial.params) == sampled
        assert trial.user_attrs["batch_size"] == sampled["batch_size"]
        assert 0.9 <= sampled["gamma"] < 1
        algorithm: Any = utils.ALGOS[algo]
        algorithm("MlpPolicy", "CartPole-v1", buffer_size=100, **sampled)


@pytest.mark.parametrize(("algo", "env_id"), [("ben", "CartPole-v1"), ("bootdqn", "SearchAndRescue5x5-v0")])
def test_optimize_in_a_shared_storage_and_train_its_trial(algo: str, env_id: str, zoo: Run, tmp_path: Path) -> None:
    name = ("--algo", algo, "--env", env_id, "--storage", "sqlite:///study.db", "--study-name", "study")
    plan = (
        "-optimize",
        "--sampler",
        "random",
        "--pruner",
        "none",
        "--n-evaluations",
        "1",
        "--eval-episodes",
        "1",
        "--no-optim-plots",
    )
    for _ in range(2):  # two workers share one study
        zoo("train", *name, *plan, "--n-trials", "1", *SMALL)
    study = optuna.load_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="study")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    out = zoo("train", *name, "--trial-id", "1", "--eval-freq", "-1", "-n", "16", "-params", "n_envs:2")
    assert "Loading from Optuna study" in out
    saved = yaml.load((tmp_path / "logs" / algo / f"{env_id}_3" / env_id / "config.yml").read_text(), Loader=yaml.UnsafeLoader)
    assert saved["learning_rate"] == study.trials[1].params["learning_rate"]
    sampled = search.CONVERTERS[algo](study.trials[1].params)["policy_kwargs"]
    assert saved["policy_kwargs"] == tuned(algo, env_id)["policy_kwargs"] | sampled  # what is not searched stays as it was


def test_search_changes_the_policy_of_the_file_only_where_it_samples() -> None:
    given = registration._Around({"gamma": 0.9, "policy_kwargs": {"averaging": 0.998, "net_arch": [128]}})
    changed = given.copy()
    changed.update({"gamma": 0.8, "policy_kwargs": {"net_arch": [32]}})
    assert changed == {"gamma": 0.8, "policy_kwargs": {"averaging": 0.998, "net_arch": [32]}}
    assert given["policy_kwargs"]["net_arch"] == [128]


def test_without_the_hub_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("no hub")

    monkeypatch.setattr(registration, "mend_hub", fail)
    with pytest.warns(UserWarning, match="no hub"):
        register()
    assert "ben" in exp_manager.HYPERPARAMS_SAMPLER


# ---------------------------------------------------------------------- the plain route and the hook


def python(*args: str, cwd: Path, interpreter: Any = sys.executable, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "SB3_BEN_NO_ZOO": "0", **env}
    return subprocess.run([interpreter, *args], cwd=cwd, env=variables, capture_output=True, text=True, check=False)


def test_plain_route_needs_no_hook(tmp_path: Path) -> None:
    args = ("train", "--algo", "ben", "--env", "Tiger-v0", "--eval-freq", "-1", *SMALL)
    result = python("-m", "sb3_ben.zoo", *args, cwd=tmp_path, SB3_BEN_NO_ZOO="1")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "logs" / "ben" / "Tiger-v0_1" / "Tiger-v0.zip").is_file()


def test_plain_route_explains_itself(tmp_path: Path) -> None:
    assert "record_video" in python("-m", "sb3_ben.zoo", cwd=tmp_path).stdout
    result = python("-m", "sb3_ben.zoo", "trian", cwd=tmp_path)
    assert result.returncode == 2
    assert "invalid choice: 'trian'" in result.stderr


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """The hook beside a small stand-in for rl-zoo3, whose package takes a name from its module as the real one does."""
    shutil.copy(HOOK, tmp_path / "_sb3_ben_zoo.py")
    (tmp_path / "rl_zoo3").mkdir()
    (tmp_path / "rl_zoo3" / "__init__.py").write_text("from rl_zoo3.utils import NAME\n")
    (tmp_path / "rl_zoo3" / "utils.py").write_text("NAME = 'the zoo'\n")
    (tmp_path / "sb3_ben").mkdir()
    (tmp_path / "sb3_ben" / "__init__.py").touch()
    return tmp_path


def hooked(lab: Path, code: str, extend: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code under the hook, with a stand-in for our side of it too; -S keeps what is really installed out."""
    (lab / "sb3_ben" / "zoo.py").write_text(f"def extend(module):\n    {extend}\n")
    start = "import sys; sys.path.insert(0, '.'); import _sb3_ben_zoo as hook; hook.install(); "
    return python("-S", "-c", start + code, cwd=lab, **env)


def test_hook_extends_before_names_are_taken(lab: Path) -> None:
    code = "import rl_zoo3; print(rl_zoo3.NAME, rl_zoo3.utils.__spec__.loader.get_source('rl_zoo3.utils'))"
    result = hooked(lab, code, "module.NAME += ' and ours'")
    assert result.stdout.startswith("the zoo and ours NAME = 'the zoo'"), result.stderr


def test_hook_imports_nothing(lab: Path) -> None:
    """Nothing but ``os``, which Python's own start-up loads before any ``.pth`` file."""
    loaded = hooked(lab, "print(*sys.modules)", "pass").stdout.split()
    plain = python("-S", "-c", "import os, sys; print(*sys.modules)", cwd=lab).stdout.split()
    assert set(loaded) - set(plain) == {"_sb3_ben_zoo"}


def test_hook_is_installed_once_and_can_be_removed(lab: Path) -> None:
    count = "print(sum(type(finder) is hook.ZooFinder for finder in sys.meta_path)); "
    result = hooked(lab, f"hook.install(); {count} hook.uninstall(); {count}", "pass")
    assert result.stdout.split() == ["1", "0"], result.stderr


@pytest.mark.parametrize(("value", "expected"), [("1", "the zoo"), ("0", "ours"), ("", "ours")])
def test_a_variable_switches_the_hook_off(lab: Path, value: str, expected: str) -> None:
    result = hooked(lab, "import rl_zoo3; print(rl_zoo3.NAME)", "module.NAME = 'ours'", SB3_BEN_NO_ZOO=value)
    assert result.stdout.strip() == expected, result.stderr


@pytest.mark.parametrize("extend", ["raise RuntimeError('broken')", "import a_module_that_is_not_there"])
def test_a_broken_registration_is_one_warning(lab: Path, extend: str) -> None:
    (lab / "rl_zoo3" / "exp_manager.py").touch()
    result = hooked(lab, "import rl_zoo3, rl_zoo3.exp_manager; print(rl_zoo3.NAME)", extend)
    assert result.returncode == 0
    assert result.stdout.strip() == "the zoo"
    assert result.stderr.count("sb3_ben is not available in rl-zoo3") == 1


def test_without_the_package_the_hook_is_one_warning(lab: Path) -> None:
    """The checkout of an editable installation may have been deleted."""
    code = "import shutil; shutil.rmtree('sb3_ben'); import rl_zoo3; print(rl_zoo3.NAME)"
    result = hooked(lab, code, "pass")
    assert result.stdout.strip() == "the zoo", result.stderr
    assert "No module named 'sb3_ben'" in result.stderr


# ---------------------------------------------------------------------- installation


def build_editable(sources: Path, folder: Path) -> Path:
    """Build what ``pip install -e`` would install."""
    folder.mkdir()
    code = "import sys, setuptools.build_meta as backend; backend.build_editable(sys.argv[1])"
    result = python("-c", code, str(folder), cwd=sources)
    assert result.returncode == 0, result.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.parametrize("build", [build_wheel, build_editable])
def test_installed_the_literal_command_works_and_uninstalling_leaves_nothing(
    build: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    sources = copy_sources(tmp_path / "sources")
    wheel = build(sources, tmp_path / "wheels")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"_sb3_ben_zoo.py", "_sb3_ben_zoo.pth"} <= names
    is_editable = build is build_editable
    installed = {f"sb3_ben/hyperparams/{file.name}" for file in YML_FILES}
    assert installed & names == (set() if is_editable else installed), "an editable installation uses those of the repository"

    interpreter, site_packages = make_venv(tmp_path / "venv")
    (site_packages / "another.py").touch()
    install(interpreter, wheel)
    # everything else comes from this very environment, whose own .pth files are not read again
    dependencies = site_packages / "zz_dependencies.pth"
    dependencies.write_text("\n".join({sysconfig.get_path(name) for name in ("purelib", "platlib")}))
    command = ("-m", "rl_zoo3.train", "--algo", "ben", "--env", "Tiger-v0", "--eval-freq", "-1", *SMALL)
    result = python(*command, cwd=tmp_path, interpreter=interpreter)
    assert result.returncode == 0, result.stderr
    assert "not available" not in result.stderr
    folder = sources / "hyperparams" if is_editable else site_packages / "sb3_ben" / "hyperparams"
    assert f"Loading hyperparameters from: {folder / 'ben.yml'}" in result.stdout
    assert (tmp_path / "logs" / "ben" / "Tiger-v0_1" / "Tiger-v0.zip").is_file()

    dependencies.unlink()
    uninstall = ("--python", str(interpreter), "uninstall", "--yes", *OFFLINE[:2], "sb3_ben")
    subprocess.run([sys.executable, "-m", "pip", *uninstall], check=True)
    assert [path.name for path in site_packages.rglob("*")] == ["another.py"]
