"""What is added to the modules of rl-zoo3.

rl-zoo3 has no place for plugins: its tables of algorithms and search spaces are dictionaries, which are added to, and a few of
its functions are wrapped. Each step looks first whether it has been made, so that any of them can be repeated.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gymnasium.envs.registration import registry

import sb3_ben
from sb3_ben.envs.extractors import RescueExtractor
from sb3_ben.zoo import search
from sb3_ben.zoo.hub import ALGORITHMS, mend_hub

__all__ = ["ALGORITHMS", "config_file", "extend", "register"]

PREVIOUS_REWARD = "sb3_ben.history.previous_reward.VecPreviousReward"
#: algorithms that read the previous reward from the observation
READ_PREVIOUS_REWARD = ("ben",)


def register() -> None:
    """Make the algorithms, environments and hyperparameters of this package known to rl-zoo3; doing it again changes nothing."""
    for name in EXTENSIONS:
        extend(import_module(name))


def extend(module: ModuleType) -> None:
    """Add to one module of rl-zoo3 what this package has for it; doing it again changes nothing.

    :param module: ``rl_zoo3.utils`` or ``rl_zoo3.exp_manager``, just imported or long in use
    """
    EXTENSIONS[module.__name__](module)


def _extend_utils(utils: ModuleType) -> None:
    for name, class_name in ALGORITHMS.items():
        utils.ALGOS.setdefault(name, getattr(sb3_ben, class_name))
    _wrap(utils, "create_test_env", _carry_previous_reward)
    try:
        mend_hub()
    except Exception as error:  # who does not go to the Hub need not know
        warnings.warn(f"rl-zoo3's way to the Hugging Face Hub stays as it is: {error!r}", stacklevel=2)


def _extend_exp_manager(exp_manager: ModuleType) -> None:
    for name in ALGORITHMS:
        exp_manager.HYPERPARAMS_SAMPLER.setdefault(name, search.SAMPLERS[name])
        exp_manager.HYPERPARAMS_CONVERTER.setdefault(name, search.CONVERTERS[name])
    exp_manager.RescueExtractor = RescueExtractor  # type: ignore[attr-defined]  # a name for `policy_kwargs`, which are evaluated there
    _wrap(exp_manager.ExperimentManager, "__init__", _choose_config)
    _wrap(exp_manager.ExperimentManager, "read_hyperparameters", _save_previous_reward)
    _wrap(exp_manager.ExperimentManager, "read_hyperparameters", _complete_trial)
    _wrap(exp_manager.ExperimentManager, "objective", _search_around)


EXTENSIONS: dict[str, Callable[[ModuleType], None]] = {
    "rl_zoo3.utils": _extend_utils,
    "rl_zoo3.exp_manager": _extend_exp_manager,
}


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have ``wrapper(original, ...)`` called in place of ``owner.name(...)``, also by all in rl-zoo3 who have taken the name."""
    original = getattr(owner, name)
    if wrapper in getattr(original, "is_from_sb3_ben", ()):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.is_from_sb3_ben = (*getattr(original, "is_from_sb3_ben", ()), wrapper)  # type: ignore[attr-defined]
    takers = [module for key, module in sys.modules.items() if key.partition(".")[0] == "rl_zoo3"]
    for holder in (owner, *takers):
        if getattr(holder, name, None) is original:
            setattr(holder, name, wrapped)


# ---------------------------------------------------------------------- hyperparameters


def hyperparams_folder() -> Path:
    """Where the hyperparameters are: in the installed package, or beside it in the repository."""
    package = Path(sb3_ben.__file__).parent
    installed = package / "hyperparams"
    return installed if installed.is_dir() else package.parent / "hyperparams"


def config_file(algo: str, env_id: str, zoo_file: str) -> str:
    """The file that hyperparameters are read from when the user names none.

    Ours where it has an entry for the environment, for all our environments, and where the zoo has no entry; the zoo's own file
    otherwise.

    :param algo: name of the algorithm in the zoo
    :param env_id: environment id
    :param zoo_file: the zoo's own file for the algorithm, which need not exist
    """
    import yaml  # comes with rl-zoo3: without it, `python -m sb3_ben.zoo` should get as far as saying so

    file = hyperparams_folder() / f"{algo}.yml"
    if not file.is_file():
        return zoo_file
    entry_point = str(registry[env_id].entry_point) if env_id in registry else ""
    ours, theirs = (yaml.safe_load(one.read_text(encoding="utf-8")) if one.is_file() else {} for one in (file, Path(zoo_file)))
    if entry_point.startswith("sb3_ben.") or env_id in ours:
        return str(file)
    has_entry = env_id in theirs or ("atari" in theirs and entry_point.startswith("ale_py"))
    return zoo_file if has_entry else str(file)


def _choose_config(init: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    """In place of ``ExperimentManager.__init__``."""
    init(manager, *args, **kwargs)
    if inspect.signature(init).bind(manager, *args, **kwargs).arguments.get("config") is None:
        manager.config = config_file(manager.algo, manager.env_name.gym_id, manager.config)


# ---------------------------------------------------------------------- search


class _Around(dict):
    """Hyperparameters of which a trial of a search changes some: of ``policy_kwargs``, too, it changes no others."""

    def copy(self) -> _Around:
        return _Around(self)

    def update(self, sampled: dict[str, Any]) -> None:  # type: ignore[override]
        super().update(sampled | {"policy_kwargs": self.get("policy_kwargs", {}) | sampled.get("policy_kwargs", {})})


def _search_around(objective: Callable[..., float], manager: Any, trial: Any) -> float:
    """In place of ``ExperimentManager.objective``, which puts what was sampled in the place of the file's ``policy_kwargs``."""
    if manager.algo in ALGORITHMS:
        manager._hyperparams = _Around(manager._hyperparams)
    return objective(manager, trial)


def _complete_trial(read: Callable[..., Any], manager: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """In place of ``ExperimentManager.read_hyperparameters``: likewise for a trial that is read from a study."""
    trial_id, verbose = manager.trial_id, manager.verbose
    if manager.algo not in ALGORITHMS or not (manager.storage and manager.study_name and trial_id):
        return read(manager)
    manager.trial_id, manager.verbose = None, 0
    given = read(manager)[0].get("policy_kwargs", {})
    manager.trial_id, manager.verbose = trial_id, verbose
    hyperparams, saved = read(manager)
    if "policy_kwargs" not in (manager.custom_hyperparams or {}):
        given = eval(given, vars(sys.modules[type(manager).__module__])) if isinstance(given, str) else given  # as the zoo does
        hyperparams["policy_kwargs"] = saved["policy_kwargs"] = given | hyperparams["policy_kwargs"]
    return hyperparams, saved


# ---------------------------------------------------------------------- the previous reward


def _save_previous_reward(read: Callable[..., Any], manager: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """In place of ``ExperimentManager.read_hyperparameters``: note in the saved configuration that the agent needs the wrapper.

    In training the algorithm applies it by itself, so only what is saved changes.
    """
    hyperparams, saved = read(manager)
    wrappers = _as_list(saved.get("vec_env_wrapper"))
    if manager.algo in READ_PREVIOUS_REWARD and PREVIOUS_REWARD not in wrappers:
        saved["vec_env_wrapper"] = [*wrappers, PREVIOUS_REWARD]
    return hyperparams, saved


def _carry_previous_reward(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of ``create_test_env``: the wrapper goes outermost, outside the ``VecNormalize`` that the zoo may add."""
    hyperparams = inspect.signature(create).bind(*args, **kwargs).arguments.get("hyperparams") or {}
    wrappers = _as_list(hyperparams.get("vec_env_wrapper"))
    if PREVIOUS_REWARD not in wrappers:
        return create(*args, **kwargs)
    others = [wrapper for wrapper in wrappers if wrapper != PREVIOUS_REWARD]
    hyperparams["vec_env_wrapper"] = others  # the zoo, too, takes from its argument what it has dealt with
    if not others:
        del hyperparams["vec_env_wrapper"]
    return sb3_ben.VecPreviousReward(create(*args, **kwargs))


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
