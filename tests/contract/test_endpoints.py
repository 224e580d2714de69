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
            "responses": {
                "bodies": {"/v1/responses": {"input": "hello"}, "/v1/responses/input_tokens": {"input": "a"}}
            },
            "messages": {
                "bodies": {
                    "/v1/messages": {"model": "test-model", "messages": MESSAGES, "max_tokens": 5},
                    "/v1/messages/count_tokens": {"messages": MESSAGES},
                }
            },
            "tokens": {"bodies": {"/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [104, 105]}}},
        },
    )
)
