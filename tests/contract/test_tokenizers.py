from frame.testing import TokenizerSuite, tokenizers
from tests.contract.installed import classes

globals().update(classes(TokenizerSuite))


class TestByteFallback(TokenizerSuite):
    plugin = "hf"
    texts = ("hello world", "the café 日本", "x")

    def write_files(self, folder):
        tokenizers.save(tokenizers.byte_fallback(), folder)


class TestWordPieces(TokenizerSuite):
    plugin = "hf"
    texts = ("hello world", "the foxes")

    def write_files(self, folder):
        tokenizers.save(tokenizers.word_pieces(), folder)
