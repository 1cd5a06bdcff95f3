from sb3_ben.bootdqn.bootdqn import BootDQN
from sb3_ben.bootdqn.policies import CnnPolicy, MlpPolicy, MultiInputPolicy

__all__ = ["BootDQN", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
