from sb3_ben.ben.ben import BEN
from sb3_ben.ben.policies import CnnLstmPolicy, MlpGruPolicy, MlpLstmPolicy, MlpPolicy, MultiInputLstmPolicy

__all__ = ["BEN", "CnnLstmPolicy", "MlpGruPolicy", "MlpLstmPolicy", "MlpPolicy", "MultiInputLstmPolicy"]
