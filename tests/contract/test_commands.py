from frame.testing import CommandSuite


class TestGreet(CommandSuite):
    target = "tests.contract.commands:Greet"
    arguments = ("--name", "me")
