"""What fits, how fast, and which setting to take: known before anything runs. See docs/planner.md.

shape       sizes of a model            hardware    speeds and sizes of a machine
costs       constants that were measured            setting     all that an estimate depends on
memory      bytes by item and tier      timing, exchange    seconds by part
search      the best memory plan        planning    the choice among modes and splits
report, picture         how it is shown             flags, cli  command lines
measure     speeds of the GPU at hand   training    the same for a run of train.py
"""

from .hardware import HARDWARE, Hardware
from .planning import Plan, plan
from .shape import ModelShape
from .training import engine_of, for_training, settle

__all__ = ["HARDWARE", "Hardware", "ModelShape", "Plan", "engine_of", "for_training", "plan", "settle"]
