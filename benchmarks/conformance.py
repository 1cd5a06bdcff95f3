"""Stable-Baselines3's own tests of DQN, and sb3-contrib's of RecurrentPPO, with BEN in their place.

git clone https://github.com/DLR-RM/stable-baselines3
git clone https://github.com/Stable-Baselines-Team/stable-baselines3-contrib
python -m benchmarks.conformance stable-baselines3/tests [stable-baselines3-contrib/tests/test_lstm.py] [-- arguments of pytest]

Of all tests those are run that make a DQN (a RecurrentPPO). "MlpPolicy" is BEN's recurrent "MlpLstmPolicy" there, and so on. Left
out are tests of what BEN does not have or is not: see ``NOT_ABOUT_BEN``.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, ClassVar

import pytest
import sb3_contrib
import stable_baselines3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_ben import BEN
from sb3_ben.ben.policies import CnnLstmPolicy, MlpLstmPolicy, MultiInputLstmPolicy

#: parts of the names of tests that are left out, and why
NOT_ABOUT_BEN = {
    "test_n_step_replay": "a buffer for several steps; BEN makes the sums itself",
    "optimize_memory": "observations are always stored once",
    "test_performance_her": "hyperparameters of DQN, for a buffer of single transitions",
    "test_save_load_no_target_params": "files that DQN of SB3 before 2.4 saved",
    "test_utils.py": "reads the parameters of DQN's optimiser by their names, and needs ale_py",
    "test_check": "one recurrent network has no critic to share it with",
    "test_run_sde": "continuous actions",
    "test_run[Pendulum-v1]": "continuous actions",
    "multi_dimensional_action_space": "continuous actions",
    "test_ppo_lstm_performance": "hyperparameters of PPO; benchmarks run cart_pole_no_velocity has BEN's",
}
#: what RecurrentPPO calls the arguments of its recurrent layer
LSTM_NAMES = {"lstm_hidden_size": "rnn_hidden_size", "n_lstm_layers": "n_rnn_layers", "lstm_kwargs": "rnn_kwargs"}


class DQN(BEN):
    """BEN under the name and with the policies of DQN."""

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpLstmPolicy,
        "CnnPolicy": CnnLstmPolicy,
        "MultiInputPolicy": MultiInputLstmPolicy,
    }

    def learn(
        self,
        total_timesteps: int = 100_000,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "DQN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Any:
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)


class RecurrentPPO(BEN):
    """BEN under the name of RecurrentPPO; arguments of PPO and of its second network are dropped."""

    def __init__(self, policy: Any, env: Any, policy_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        shared = set(inspect.signature(BEN).parameters) - {"n_steps"}  # of PPO, the length of a rollout
        own = {name: value for name, value in kwargs.items() if name in shared}
        renamed = {LSTM_NAMES.get(name, name): value for name, value in (policy_kwargs or {}).items()}
        known = [*LSTM_NAMES.values(), "features_extractor_kwargs"]
        super().__init__(policy, env, policy_kwargs={name: renamed[name] for name in known if name in renamed}, **own)


class BENInTheirPlace:
    """A plugin of pytest that runs what is about DQN or RecurrentPPO, with BEN."""

    def __init__(self) -> None:
        stable_baselines3.DQN = DQN  # type: ignore[misc, assignment]
        sb3_contrib.RecurrentPPO = RecurrentPPO  # type: ignore[misc, assignment]

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if is_about_them(item) and left_out(item) is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def is_about_them(item: Any) -> bool:
    """Whether a test is given one of the classes as a parameter or, with no class as a parameter, makes a model of it itself."""
    parameters = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    classes = [value for value in parameters if inspect.isclass(value) and issubclass(value, BaseAlgorithm)]
    if classes:
        return DQN in classes or RecurrentPPO in classes
    source = inspect.getsource(item.function)
    return "DQN(" in source or "RecurrentPPO(" in source


def left_out(item: pytest.Item) -> str | None:
    """Why a test is left out, ``None`` where it is not."""
    return next((reason for part, reason in NOT_ABOUT_BEN.items() if part in item.nodeid), None)


def main() -> int:
    own, _, rest = _split(sys.argv[1:], "--")
    if not own:
        print(__doc__)
        return 2
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return int(pytest.main([*own, *options, *rest], plugins=[BENInTheirPlace()]))


def _split(arguments: list[str], at: str) -> tuple[list[str], list[str], list[str]]:
    """As ``str.partition``."""
    where = arguments.index(at) if at in arguments else len(arguments)
    return arguments[:where], arguments[where : where + 1], arguments[where + 1 :]


if __name__ == "__main__":
    sys.exit(main())
