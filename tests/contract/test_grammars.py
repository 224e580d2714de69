from frame.testing import GrammarBackendSuite


class TestGuidance(GrammarBackendSuite):
    plugin = "guidance"
    kinds = ("json", "regex", "choice", "json_object", "grammar", "structural_tag")
    wrong = (*GrammarBackendSuite.wrong, {"grammar": "start: missing"}, {"structural_tag": "{}"})
