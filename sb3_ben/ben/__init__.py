from sb3_ben.ben.ben import BEN
from sb3_ben.ben.policies import (
    CnnLstmPolicy,
    CnnPolicy,
    MlpGruPolicy,
    MlpLstmPolicy,
    MlpPolicy,
    MultiInputLstmPolicy,
    MultiInputPolicy,
)

__all__ = [
    "BEN",
    "CnnLstmPolicy",
    "CnnPolicy",
    "MlpGruPolicy",
    "MlpLstmPolicy",
    "MlpPolicy",
    "MultiInputLstmPolicy",
    "MultiInputPolicy",
]
