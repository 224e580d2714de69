from frame.testing import TokenizerSuite, tokenizers
from tests.contract.installed import classes

globals().update(classes(TokenizerSuite))


class TestByteFallback(TokenizerSuite):
    plugin = "hf"
    texts = ("hello world", "the café 日本", "x")

    @staticmethod
    def write(folder):
        tokenizers.save(tokenizers.byte_fallback(), folder)


class TestWordPieces(TokenizerSuite):
    plugin = "hf"
    texts = ("hello world", "the foxes")

    @staticmethod
    def write(folder):
        tokenizers.save(tokenizers.word_pieces(), folder)
