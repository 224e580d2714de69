from frame.testing import EndpointSuite
from tests.contract.installed import classes

MESSAGES = [{"role": "user", "content": "hello"}]

globals().update(
    classes(
        EndpointSuite,
        **{
            "completions": {"bodies": {"/v1/completions": {"model": "test-model", "prompt": "hello", "max_tokens": 4}}},
            "chat-completions": {
                "bodies": {"/v1/chat/completions": {"model": "test-model", "messages": MESSAGES, "stream": True}}
            },
            "tokens": {"bodies": {"/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [104, 105]}}},
        },
    )
)
