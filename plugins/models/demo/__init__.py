"""The small chat model that is served when no model is named: weights, tokenizer and card, no code."""
