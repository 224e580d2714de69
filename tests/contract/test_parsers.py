from frame.testing import ReasoningParserSuite, ToolParserSuite
from tests.contract.installed import classes

globals().update(classes(ToolParserSuite))
globals().update({f"{name}Reasoning": suite for name, suite in classes(ReasoningParserSuite).items()})
