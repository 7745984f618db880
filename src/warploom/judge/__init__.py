"""Is a kernel that somebody else wrote right, is it faster, does it cheat?"""

from warploom.judge.problem import Problem, load_problem
from warploom.judge.referee import Referee, judge
from warploom.judge.verdict import CHECKS, Finding, Verdict

__all__ = ["CHECKS", "Finding", "Problem", "Referee", "Verdict", "judge", "load_problem"]
