"""How the demo model in plugins/models/demo is made: text, dialogues, tokenizer, training, evaluation.

Nothing in frame imports this package; README.md beside this file has the commands.
"""
